"""A router that takes slots for what is missing: tickets by rank, and nothing that the ring does not have."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steerpipe.kernels.router import Tickets, route
from steerpipe.model.gpu.mailbox import Mailbox

PINNED = -(1 << 63)
RING = 8
EXPERTS = 12


class Device:
    """Tensors of one layer, with slots 1000, 1001, ... supplied and `absent` experts in pinned memory."""

    def __init__(self, absent: set[int], head: int, supplied: int, top_k: int) -> None:
        table = [(500 + expert) | PINNED if expert in absent else 9000 + expert for expert in range(EXPERTS)]
        ring = [0] * RING
        for ticket in range(head, supplied):
            ring[ticket % RING] = 1000 + ticket
        words = (table, ring, [supplied], [head], [77] * top_k, [77] * top_k)
        self.tickets = Tickets(*(torch.tensor(each) for each in words))
        self.top_k = top_k
        self.mailbox = Mailbox(1, top_k, pinned=False)

    def route(self, chosen: list[int], position: int = 3) -> None:
        logits = torch.zeros(1, EXPERTS)
        for rank, expert in enumerate(chosen):
            logits[0, expert] = 10.0 - rank
        experts, gates = torch.full((1, self.top_k), -7, dtype=torch.int32), torch.zeros(1, self.top_k)
        route(
            logits, top_k=self.top_k, renormalise=True, experts=experts, gates=gates,
            positions=torch.tensor([position]), mailbox=self.mailbox.words[0], stamp=torch.tensor([5]),
            tickets=self.tickets,
        )  # fmt: skip
        assert experts[0].tolist() == (chosen if position >= 0 else [-1] * self.top_k)


@settings(max_examples=60)
@given(
    chosen=st.lists(st.integers(0, EXPERTS - 1), unique=True, min_size=1, max_size=5),
    absent=st.sets(st.integers(0, EXPERTS - 1)),
    head=st.integers(0, 20),
    supply=st.integers(0, RING),
)
def test_the_nth_miss_takes_the_nth_ticket_while_there_are_some(
    chosen: list[int], absent: set[int], head: int, supply: int
) -> None:
    device = Device(absent, head, head + supply, len(chosen))
    before = device.tickets.table.clone()
    device.route(chosen)
    missed = [expert for expert in chosen if expert in absent]
    landed = missed[:supply]
    assert device.tickets.origin.tolist() == before[chosen].tolist()
    targets = [1000 + head + landed.index(expert) if expert in landed else 0 for expert in chosen]
    assert device.tickets.target.tolist() == targets
    assert device.tickets.head.tolist() == [head + len(landed)]
    assert device.tickets.tail.tolist() == [head + supply]
    assert torch.equal(device.tickets.table, before)
    reads = device.mailbox.take_reads(0, 5, lambda: False)
    assert (reads.routed, reads.missed, reads.landed) == (chosen, missed, landed)


def test_a_row_without_a_position_takes_nothing() -> None:
    device = Device(set(range(EXPERTS)), 0, 4, 3)
    device.route([1, 2, 3], position=-1)
    assert device.tickets.target.tolist() == [0, 0, 0]
    assert device.tickets.head.tolist() == [0]
    reads = device.mailbox.take_reads(0, 5, lambda: False)
    assert (reads.routed, reads.missed, reads.landed) == ([], [], [])


def test_tickets_are_for_one_row() -> None:
    device = Device(set(), 0, 0, 2)
    with pytest.raises(AssertionError, match="one row"):
        route(
            torch.zeros(2, EXPERTS), top_k=2, renormalise=True, experts=torch.zeros(2, 2, dtype=torch.int32),
            gates=torch.zeros(2, 2), positions=torch.arange(2), tickets=device.tickets,
        )  # fmt: skip


def test_the_mailbox_knows_whether_a_layer_has_posted() -> None:
    mailbox = Mailbox(2, 2, pinned=False)
    mailbox.words[1, 0] = 7 << 32 | 3
    assert not mailbox.posted(1, 7)
    mailbox.words[1, 1] = 7 << 32 | 1 << 17 | 1 << 16 | 4
    assert mailbox.posted(1, 7) and not mailbox.posted(0, 7)
    reads = mailbox.take_reads(1, 7, lambda: False)
    assert (reads.routed, reads.missed, reads.landed) == ([3, 4], [4], [4])
