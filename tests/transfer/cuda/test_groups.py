"""The order in which words and blocks are queued: the link pauses where they alternate, so they seldom do."""

import itertools
from collections.abc import Sequence
from random import Random

import pytest

from steerpipe.transfer.cuda.backing import LayerBlocks
from steerpipe.transfer.cuda.copier import HostCopier, Mark
from steerpipe.transfer.cuda.shelf import GROUP
from steerpipe.transfer.cuda.source import CudaSource
from tests.transfer.cuda.blocks import CPU, NAMES, backing, contents, made_up

EXPERTS = 40
ALL = list(range(EXPERTS))


class Listed(HostCopier):
    """Writes down what is queued on the copy stream."""

    def __init__(self) -> None:
        super().__init__()
        self.queued: list[tuple[str, int, int]] = []  # what, address, value

    def copy(self, source: int, into: int, size_bytes: int) -> None:
        self.queued.append(("block", into, source))
        super().copy(source, into, size_bytes)

    def write(self, address: int, value: int) -> None:
        self.queued.append(("word", address, value))
        super().write(address, value)

    def copied(self) -> Mark:
        self.queued.append(("mark", 0, 0))
        return super().copied()

    def take(self) -> list[tuple[str, int, int]]:
        taken, self.queued = self.queued, []
        return taken


def open_source(slots: int, limit: int | None = None) -> tuple[CudaSource, Listed]:
    layers: dict[int, LayerBlocks] = made_up(experts=EXPERTS)
    copier = Listed()
    behind = backing(contents(layers), copier)
    return CudaSource(layers, behind, slots=slots, device=CPU, copier=copier, transient_limit=limit), copier


def lease(source: CudaSource, layer: int, routed: Sequence[int], keep: Sequence[int] = ()) -> list[int]:
    with source.lease(layer, routed, keep) as held:
        return [len(wave) for wave in held.waves()]


def runs(queued: Sequence[tuple[str, int, int]]) -> list[int]:
    """Lengths of the runs of blocks between which words are written."""
    kinds = [kind for kind, _, _ in queued if kind != "mark"]
    return [len(list(run)) for kind, run in itertools.groupby(kinds) if kind == "block"]


def test_what_is_sent_ahead_is_a_few_groups() -> None:
    source, copier = open_source(80, 80)
    with source:
        for layer in NAMES[:2]:
            lease(source, layer, ALL)
        copier.take()
        lease(source, NAMES[2], ALL)  # of the first layer nothing is left; the third was sent ahead of this lease
        lease(source, NAMES[0], ALL)
        lengths = runs(copier.take())
        assert sum(lengths) == 2 * EXPERTS
        assert lengths.count(GROUP) >= 2 and len(lengths) <= 12


def test_few_slots_still_pass_groups_of_one_size() -> None:
    source, copier = open_source(32)
    with source:
        lease(source, NAMES[0], ALL)
        copier.take()
        waves = lease(source, NAMES[2], ALL)
        assert sum(waves) == EXPERTS and max(waves) == 8
        assert len(waves) <= 9, "one, two, four, then eight: small groups do not come again and again"
        assert len(runs(copier.take())) <= len(waves) + 1


@pytest.mark.parametrize("misses", [1, 2, 3, 8, 13])
def test_a_served_layer_is_copied_in_few_runs_and_its_entries_follow(misses: int) -> None:
    source, copier = open_source(20)
    with source:
        source.serve(NAMES[0], ALL[:18])
        source.serve(NAMES[0], ALL[20:38])
        copier.take()
        source.serve(NAMES[1], ALL[:misses])
        queued = copier.take()
        lengths = runs(queued)
        assert sum(lengths) == misses and len(lengths) <= misses.bit_length()
        assert [kind for kind, _, _ in queued][-misses:] == ["word"] * misses
        assert queued[0][0] == "word" and queued[1][0] == "block", "the first copy begins as soon as its slot is clear"


@pytest.mark.parametrize("seed", range(5))
def test_entries_go_before_blocks_come_and_come_after_them(seed: int) -> None:
    random = Random(seed)
    source, copier = open_source(30, random.choice([None, 5, 20]))
    with source:
        entries: dict[int, int] = {}
        for _ in range(12):
            layer, routed = random.choice(NAMES), random.sample(ALL, random.randint(1, 20))
            if random.random() < 0.5:
                source.serve(NAMES[-1], routed)  # a step that has come to its end
            else:
                lease(source, layer, routed, random.sample(ALL, 5))
            filled: set[int] = set()
            for kind, address, value in copier.take():
                if kind == "block":
                    assert address not in entries.values(), "a slot is written while the table points to it"
                    filled.add(address)
                elif kind == "word":
                    assert value <= 0 or value in filled, "an entry points to a slot that nothing was copied to"
                    entries[address] = value
        source.check_integrity()
