"""The router's choice and its mailbox against torch."""

import pytest
import torch
from torch import Tensor

from steerpipe.kernels import reference
from steerpipe.kernels.router import route


def run(
    logits: Tensor, top_k: int, *, renormalise: bool = True, positions: Tensor | None = None,
    forced: Tensor | None = None, mailbox: Tensor | None = None, stamp: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    rows = len(logits)
    positions = torch.arange(rows) if positions is None else positions
    experts, gates = torch.full((rows, top_k), -7, dtype=torch.int32), torch.full((rows, top_k), torch.nan)
    stamps = None if stamp is None else torch.tensor([stamp])
    route(
        logits, top_k=top_k, renormalise=renormalise, experts=experts, gates=gates, positions=positions,
        mailbox=mailbox, stamp=stamps, forced=forced,
    )  # fmt: skip
    return experts, gates, positions


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize(("count", "top_k"), [(60, 4), (128, 8), (8, 2), (5, 3), (1, 1), (4, 4)])
def test_experts_and_gates_are_those_of_a_softmax_and_a_top_k(count: int, top_k: int, *, renormalise: bool) -> None:
    logits = torch.randn(5, count) * 2
    experts, gates, positions = run(logits, top_k, renormalise=renormalise)
    expected = reference.route(logits, positions, top_k=top_k, renormalise=renormalise)
    assert torch.equal(experts, expected[0])
    torch.testing.assert_close(gates, expected[1], rtol=1e-5, atol=1e-7)


def test_a_tie_goes_to_the_lower_index() -> None:
    logits = torch.zeros(2, 12)
    logits[1, 7] = logits[1, 3] = logits[1, 11] = 2.0
    experts, _, _ = run(logits, 4)
    assert experts.tolist() == [[0, 1, 2, 3], [3, 7, 11, 0]]


def test_experts_of_probability_zero_come_before_padding() -> None:
    logits = torch.full((1, 5), -1e9)
    logits[0, 4] = 0.0
    experts, gates, _ = run(logits, 3)
    assert experts.tolist() == [[4, 0, 1]]
    assert gates.tolist() == [[1.0, 0.0, 0.0]]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, about NaN
def test_a_row_without_a_position_has_no_experts() -> None:
    logits = torch.randn(3, 12)
    logits[1] = torch.nan
    experts, gates, _ = run(logits, 4, positions=torch.tensor([4, -1, 0]))
    assert experts[1].tolist() == [-1] * 4
    assert gates[1].tolist() == [0.0] * 4
    alone, alone_gates, _ = run(logits[2:].contiguous(), 4)
    assert torch.equal(experts[2:], alone)
    assert torch.equal(gates[2:], alone_gates)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, about NaN
def test_logits_that_are_not_numbers_still_name_experts_that_exist() -> None:
    logits = torch.full((1, 60), torch.nan)
    experts, _, _ = run(logits, 4)
    assert bool(((experts >= 0) & (experts < 60)).all())


@pytest.mark.parametrize("renormalise", [False, True])
def test_forced_experts_keep_their_own_probability(*, renormalise: bool) -> None:
    logits = torch.randn(3, 20)
    forced = torch.tensor([[19, 0, 7], [-1, -1, -1], [4, -1, -1]], dtype=torch.int32)
    experts, gates, positions = run(logits, 3, renormalise=renormalise, forced=forced)
    assert experts[0].tolist() == [19, 0, 7]
    expected = reference.route(logits, positions, top_k=3, renormalise=renormalise, forced=forced)
    assert torch.equal(experts, expected[0])
    torch.testing.assert_close(gates, expected[1], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("stamp", [1, 123_456, 2**31 - 1])
def test_the_mailbox_says_stamp_and_expert_and_nothing_else_is_touched(stamp: int) -> None:
    logits = torch.randn(3, 12)
    mailbox = torch.full((3 * 4 + 2,), -5)
    experts, _, _ = run(logits, 4, positions=torch.tensor([9, -1, 9]), mailbox=mailbox, stamp=stamp)
    assert torch.equal(mailbox[:12], reference.mailbox_words(experts, stamp))
    assert mailbox[12:].tolist() == [-5, -5]
    word = int(mailbox[4])
    assert (word >> 32, word & 0xFFFFFFFF) == (stamp, 0xFFFFFFFF)
