"""The ExpertTransformer as kernels, against the network that was trained."""

import pytest
import torch

from steerpipe.kernels.history import Kept, TransformerKernels
from steerpipe.model.gpu.apart import shown
from steerpipe.predict.trajectory_networks import ExpertTransformer

LAYERS, EXPERTS, TOP_K = 24, 60, 4


def network(experts: int = EXPERTS) -> ExpertTransformer:
    torch.manual_seed(0)
    made = ExpertTransformer(experts).eval().requires_grad_(False)
    for name, tensor in made.state_dict().items():
        if "bias" in name or "norm" in name:  # as initialised they say little
            tensor.add_(torch.randn_like(tensor) * 0.2)
    return made


def routing(experts: int, top_k: int = TOP_K) -> torch.Tensor:
    random = torch.Generator().manual_seed(3)
    return torch.stack([torch.randperm(experts, generator=random)[:top_k] for _ in range(LAYERS)])


@pytest.mark.parametrize(("steps", "experts", "top_k"), [(10, 60, 4), (3, 10, 2), (16, 33, 8), (20, 128, 1)])
def test_kernels_say_what_the_network_says(steps: int, experts: int, top_k: int) -> None:
    made, routed = network(experts), routing(experts, top_k)
    kernels = TransformerKernels(made.state_dict(), steps, top_k)
    for order in (0, 1, steps - 1, steps, LAYERS - 1):
        expected = made(shown(routed, order, steps, experts, torch.float32))
        torch.testing.assert_close(kernels.answer(routed, order), expected, atol=2e-5, rtol=1e-4)


def test_a_step_s_own_buffer_is_read_where_it_lies_and_the_answer_has_its_place() -> None:
    kernels, routed = TransformerKernels(network().state_dict(), 10, 3), routing(EXPERTS, 3)
    apart = torch.full((LAYERS, 8), 7, dtype=torch.int32)
    apart[:, :3] = routed
    kept = Kept(torch.zeros(1, EXPERTS), torch.zeros(2, dtype=torch.int64), torch.tensor([9]), torch.tensor([41]))
    assert kernels.answer(apart[:, :3], 13, kept) is kept.logits
    assert torch.equal(kept.logits, kernels.answer(routed, 13)) and kept.when.tolist() == [9, 41]


@pytest.mark.parametrize("change", [{"ff": 384}, {"width": 96}, {"layers": 3}])
def test_a_network_of_another_shape_is_refused(change: dict[str, int]) -> None:
    shape = {"width": 128, "ff": 512, "layers": 2} | change
    made = torch.nn.ModuleDict(
        {
            "embedding": torch.nn.Linear(EXPERTS, shape["width"]),
            "out": torch.nn.Linear(shape["width"], EXPERTS),
            "encoder": torch.nn.TransformerEncoder(
                torch.nn.TransformerEncoderLayer(shape["width"], 4, shape["ff"], batch_first=True), shape["layers"]
            ),
        }
    )
    state = made.state_dict() | {"positions": torch.zeros(1, 50, shape["width"])}
    with pytest.raises(AssertionError, match=r"no dot|two encoder layers"):
        TransformerKernels(state, 10, TOP_K)


def test_layers_that_have_not_come_and_experts_that_there_are_not_are_not_seen() -> None:
    made, routed = network(), routing(EXPERTS)
    kernels = TransformerKernels(made.state_dict(), 10, TOP_K)
    plain = kernels.answer(routed, 5)
    later = routed.clone()
    later[6:] = 59 - later[6:]
    assert torch.equal(kernels.answer(later, 5), plain)
    fewer = routed.clone()
    fewer[3, 2:] = -1
    expected = made(shown(fewer, 5, 10, EXPERTS, torch.float32))
    torch.testing.assert_close(kernels.answer(fewer, 5), expected, atol=2e-5, rtol=1e-4)
    assert not torch.equal(plain, kernels.answer(fewer, 5))
    said = kernels.answer(fewer, 5)
    fewer[3, 2:] = EXPERTS  # beyond the embedding
    kernels._embedding = torch.cat([kernels._embedding, torch.full((4, 128), float("nan"))])[:EXPERTS]
    assert torch.equal(said, kernels.answer(fewer, 5))
