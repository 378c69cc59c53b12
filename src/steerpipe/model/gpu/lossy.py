"""A pass on a GPU that somebody looks into: a desk that answers misses without waiting, a tap that names routes.

Both live on the host, as on a CPU: what they are shown is read back, which the choice of experts is anyway. What is
there is computed by the kernels; what stands in for the rest is written where they would have written. Legend: R rows,
V valid rows, H hidden, k experts per row, P = R · k pairs.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from steerpipe.core.blocks import BlockSource
from steerpipe.core.ids import SequenceId
from steerpipe.core.protocols import ForwardTap, RouterProbe
from steerpipe.model.gpu.experts import Leased
from steerpipe.model.gpu.rows import Pass
from steerpipe.model.gpu.tap import Sighted
from steerpipe.model.misses import MissDesk, Settled
from steerpipe.model.moe import Route, pair_up


class Watched:
    """An ExpertRun, and the `watch` of its Step. For one pass."""

    def __init__(
        self, source: BlockSource, rows: Pass, device: torch.device, desk: MissDesk | None, tap: ForwardTap | None
    ) -> None:
        self._leased = Leased(source, rows.valid, rows.keep_rows, device)
        self._rows = rows
        self._valid = torch.from_numpy(rows.valid).to(device)  # [V]
        self._desk = desk
        self._tap = tap
        self._x: Tensor | None = None  # [V, H] on the host: what the experts of the newest layer are given
        self._settled: Settled | None = None  # of the newest layer
        self._probe: RouterProbe | None = None  # of the newest layer, until the tap has seen it

    def tickets(self, layer: int, order: int) -> None:
        return None

    def enter(self, layer: int, x: Tensor) -> Tensor:
        """x [R, H] as it enters a layer with experts, with what has come since for earlier layers."""
        added = None if self._desk is None else self._desk.mend(layer)
        if added is not None:
            x = x.index_add(0, self._valid, added.to(device=x.device, dtype=x.dtype))
        if self._tap is not None:
            self._tap.entering(layer, *self._host(x))
        return x

    def settle(self, layer: int, seen: Sighted) -> tuple[Tensor, Tensor]:
        """Experts [R, k] int32 and gates [R, k] that are added up; waits for the device."""
        shown = () if self._tap is None else tuple(
            each for each in (seen.x, seen.shared, seen.switch) if each is not None
        )  # fmt: skip
        experts, gates, self._x, *told = self._host(seen.experts, seen.gates, seen.normed, *shown)
        route = Route(experts.long(), gates)
        self._settled = Settled(route) if self._desk is None else self._desk.settle(layer, self._x, route)
        if self._tap is not None:
            self._probe = RouterProbe(layer, told[0], route.experts, route.gates, _switched(*told[1:]))
        run = self._settled.route
        if run is route:
            return seen.experts, seen.gates
        committed = seen.experts.clone(), seen.gates.clone()
        for own, other in zip(committed, (run.experts, run.gates), strict=True):
            own[self._valid] = other.to(own)
        return committed

    def begin(self, layer: int, experts: Tensor) -> None:
        """`settle` reads them back."""

    def run(self, layer: int, order: int, x: Tensor, experts: Tensor, *, act: Tensor, part: Tensor) -> None:
        settled, top_k = self._settled, experts.shape[1]
        assert settled is not None, "run comes after settle"
        leased = set(settled.leased())
        replaced = () if settled.stand_ins is None else settled.stand_ins.pairs
        chosen = np.full((self._rows.rows, top_k), -1, dtype=np.int32)
        own = settled.route.experts.numpy().astype(np.int32)  # [V, k]
        own[~np.isin(own, list(leased))] = -1
        own.flat[list(replaced)] = -1
        chosen[self._rows.valid] = own
        self._leased.run_chosen(layer, x, None, chosen, act=act, part=part)
        if self._tap is not None and self._probe is not None:  # who sends for later layers takes none of this one's
            self._tap.routed(self._probe)
            self._probe = None
        if settled.stand_ins is not None:
            self._fill(part, replaced, settled.stand_ins.vectors, top_k)
        if settled.nearby is not None:  # last: kernels and copies go on meanwhile
            self._fill_nearby(part, settled, top_k)

    def end(self) -> None:
        if self._tap is not None:
            self._tap.end()

    def _fill_nearby(self, part: Tensor, settled: Settled, top_k: int) -> None:
        nearby, pairs_of = settled.nearby, pair_up(settled.route, settled.stand_ins)
        assert nearby is not None and self._x is not None, "somebody computes elsewhere"
        for expert in nearby.experts:
            pairs = pairs_of[expert]
            rows = torch.tensor([pair // top_k for pair in pairs])
            self._fill(part, pairs, nearby.compute(expert, self._x[rows]), top_k)
        nearby.let_go()

    def _fill(self, part: Tensor, pairs: Sequence[int], vectors: Tensor, top_k: int) -> None:
        """`pairs` are numbered by valid rows."""
        of_valid = np.array(pairs, dtype=np.int64)
        places: NDArray[np.int64] = self._rows.valid[of_valid // top_k] * top_k + of_valid % top_k
        part.index_copy_(0, torch.from_numpy(places).to(part.device), vectors.to(part))

    def _host(self, *given: Tensor) -> list[Tensor]:
        """Each [R, …] → [V, …] on the host, with one wait for all."""
        own = given if len(self._valid) == self._rows.rows else [x.index_select(0, self._valid) for x in given]
        if self._valid.device.type != "cuda":
            return [x.clone() for x in own]
        found = [torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True) for x in own]
        torch.cuda.current_stream().synchronize()
        return found


def _switched(shared: Tensor | None = None, switch: Tensor | None = None) -> Tensor | None:
    """The shared expert's output as it is added."""
    return shared if shared is None or switch is None else torch.sigmoid(switch) * shared


def watched(
    desk: MissDesk | None, tap: ForwardTap | None, source: BlockSource, rows: Pass,
    sequences: tuple[SequenceId, ...], device: torch.device, *, decode: bool,
) -> Watched | None:  # fmt: skip
    """None: neither has a say in this pass. `sequences` [V]."""
    if tap is not None and not tap.begin(sequences, torch.from_numpy(rows.tokens[rows.valid]), decode=decode):
        tap = None
    if desk is not None and not desk.begin(sequences, decode=decode):
        desk = None
    return None if desk is None and tap is None else Watched(source, rows, device, desk, tap)
