"""The host's part of guesses that a step sends for by itself."""

from collections.abc import Callable, Collection, Sequence

import torch

from steerpipe.core.blocks import GUESSES, DirectReads, Near, SentBlock
from steerpipe.kernels.foretell import LEAST_PROBABILITY, SURE
from steerpipe.model.gpu.fetching import NAMED, SECOND_BYTES, Fetching, guesses_within
from steerpipe.model.gpu.mailbox import Mailbox

LAYERS = (1, 2, 4)


class Slots:
    """Writes down who is near when slots are about to be lent."""

    def __init__(self) -> None:
        self.tags = torch.zeros(len(LAYERS), GUESSES, dtype=torch.int64)
        self.ring = self.head = torch.zeros(2, dtype=torch.int64)
        self.near: list[Near] = []
        self.sizes = dict.fromkeys(LAYERS, 0)

    def block_bytes(self, layer: int) -> int:
        return self.sizes[layer]

    def settle_owed(self, wanted: Collection[int], near: Callable[[], Near]) -> None:
        self.near.append(near())

    def settle(
        self, layer: int, sent: Sequence[SentBlock], wanted: Collection[int], near: Callable[[], Near]
    ) -> None:  # fmt: skip
        self.near.append(near())

    def owe(self, layer: int, sent: Callable[[], Sequence[SentBlock]]) -> None:
        pass


def test_who_is_in_use_or_likely_in_the_next_layer_is_near_as_soon_as_a_tap_has_said_so() -> None:
    slots, words, stamp = Slots(), Mailbox(len(LAYERS), NAMED, pinned=False), 7
    fetching = Fetching(slots, [], [], LAYERS, 2, torch.zeros(1, dtype=torch.int64))  # type: ignore[arg-type]
    fetching.mail.words.fill_(stamp << 32 | 0xFFFFFFFF)  # nobody was sent for
    likely = [(5, 1.0), (3, LEAST_PROBABILITY), (4, LEAST_PROBABILITY - 0.01)]
    for place in range(NAMED):
        expert, probability = likely[place] if place < len(likely) else (0, 0.0)
        words.words[0, place] = words.words[2, place] = stamp << 32 | int(probability * SURE + 0.5) << 16 | expert
    for order in range(len(LAYERS)):
        fetching.settle(order, stamp, DirectReads([6, order], [], []), words, lambda: True)
    assert slots.near == [{2: [5, 3], 1: [6, 0]}, {4: [], 2: [6, 1]}, {1: [5, 3], 4: [6, 2]}]


def test_a_second_block_is_sent_for_where_the_first_may_end_and_while_logits_are_computed() -> None:
    slots, tables = Slots(), [torch.zeros(4, dtype=torch.int64)] * len(LAYERS)
    fetching = Fetching(slots, tables, [], LAYERS, 2, torch.zeros(1, dtype=torch.int64))  # type: ignore[arg-type]
    slots.sizes = {1: 4_595_712, 2: SECOND_BYTES + 1, 4: SECOND_BYTES}  # the first: Qwen1.5-MoE in int4
    sent = [fetching.sending(order) for order in range(len(LAYERS))]
    assert [(each.later, each.most) for each in sent] == [(0, 1), (0, GUESSES), (1, GUESSES)]
    assert guesses_within(slots.sizes[1]) == 1
