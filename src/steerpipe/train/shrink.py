"""A narrower head out of a trained one: its most useful hidden units, with outputs fitted anew. R rows, D inputs."""

import torch
from torch import Tensor

from steerpipe.core.errors import ConfigError
from steerpipe.predict.head import HeadNetwork, ResidualHead
from steerpipe.predict.records import PackedTrace
from steerpipe.train.networks import sights_of, usable_rows

_RIDGE = 1e-4  # of a unit's mean square


@torch.no_grad()
def shrink(head: ResidualHead, trace: PackedTrace, rank: int, rows: int = 16_384) -> HeadNetwork:
    """A network of `rank` hidden units whose correction is closest to the head's on evenly spaced rows of `trace`.

    Units are taken one after the other, each the one that explains most of what is left; least squares, per layer.
    """
    wide = head.network
    if not 0 < rank <= wide.rank:
        raise ConfigError(f"a head of rank {wide.rank} cannot be shrunk to {rank}", fix=f"give 1 to {wide.rank}")
    narrow = HeadNetwork(head.routers, rank=rank, shared=wide.shared, inputs=wide.inputs)
    usable = usable_rows(trace)
    taken = usable[:: max(1, len(usable) // rows)]
    for layer, sight in enumerate(sights_of(trace, taken, head.horizons[0])):
        x, _ = wide.gather(sight)
        units = torch.nn.functional.silu(x @ wide.down[layer].T + wide.down_bias[layer]).double()  # [R, wide]
        wanted = units @ wide.up[layer].T.double() + wide.up_bias[layer]
        wanted = wanted - wanted.mean(1, keepdim=True)  # what all experts gain changes no rank
        constant = torch.ones(len(units), 1, dtype=units.dtype, device=units.device)
        chosen, weights = _select(torch.cat([constant, units], dim=1), wanted, rank)
        narrow.down[layer] = wide.down[layer, chosen - 1]
        narrow.down_bias[layer] = wide.down_bias[layer, chosen - 1]
        narrow.up[layer] = weights[1:].T.float()
        narrow.up_bias[layer] = weights[0].float()
    return narrow


def _select(columns: Tensor, wanted: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(numbers [count] of the columns taken besides the first, which is always in; weights [1 + count, E])."""
    gram, cross = columns.T @ columns, columns.T @ wanted
    gram = gram + torch.diag(_RIDGE * gram.diagonal())
    chosen = [0]
    for _ in range(count):
        inner = torch.linalg.inv(gram[chosen][:, chosen])
        left = cross - gram[:, chosen] @ inner @ cross[chosen]  # correlation with what is not explained yet
        free = gram.diagonal() - (gram[:, chosen] @ inner * gram[:, chosen]).sum(1)  # squared, apart from the chosen
        gain = left.pow(2).sum(1) / free.clamp_min(1e-12)
        gain[chosen] = -1.0
        chosen.append(int(gain.argmax()))
    return torch.tensor(chosen[1:]), torch.linalg.solve(gram[chosen][:, chosen], cross[chosen])
