"""The law: memory, links and guesses change time, never a bit of the logits.

Every case runs the same greedy and sampled requests on a ladder and compares all logits, tokens and log
probabilities with those of the same pack when everything is resident.
"""

import functools
import math
import threading
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from random import Random

import pytest
import torch

from steerpipe.core.ids import ExpertId
from steerpipe.core.protocols import Lease
from steerpipe.transfer.faulty import FaultyLink
from steerpipe.transfer.queue import Reason
from steerpipe.transfer.source import LadderSource
from tests.law.cases import BUDGETS, DTYPES, FORMATS, LINKS, TIERS, Case, every_case, pairwise_cases
from tests.transfer.packs import EXPERTS, LAYERS, tiny_pack
from tests.transfer.running import Run, resident, run


@functools.cache
def all_resident(family: str, form: str, dtype: str) -> Run:
    return run(resident(family, FORMATS[form], DTYPES[dtype]), family, DTYPES[dtype])


class RandomGuesses:
    """An ExpertSource that guesses, withdraws and protects at random before every lease and wave."""

    def __init__(self, source: LadderSource, seed: int) -> None:
        self._source = source
        self._random = Random(seed)

    def disturb(self) -> None:
        random = self._random
        some = [ExpertId(random.randrange(LAYERS), random.randrange(EXPERTS)) for _ in range(random.randint(0, 6))]
        self._source.prefetch(some, random.choice([Reason.PREFETCH, Reason.DRAFT]), random.choice([0.0, math.inf]))
        self._source.cancel_prefetches(random.sample(some, len(some) // 2))
        self._source.protect(some[::2])

    def lease(
        self, layer: int, routed: Sequence[int], keep: Collection[int] | None = None
    ) -> AbstractContextManager[Lease]:
        self.disturb()
        return self._source.lease(layer, routed, keep)


def open_source(case: Case) -> LadderSource:
    pack = tiny_pack(case.family, FORMATS[case.form])
    slots = max(2, round(BUDGETS[case.budget] * EXPERTS * LAYERS))
    return LadderSource.open(
        pack,
        slots=slots,
        dtype=DTYPES[case.dtype],
        ram_bytes=TIERS[case.tier] * pack.layout(pack.spec.moe_layers[0]).block_bytes,
        readers=case.readers,
        wrap=lambda link: FaultyLink(link, LINKS[case.link], seed=7),
    )


def check(case: Case) -> None:
    with open_source(case) as source:
        experts = RandomGuesses(source, 3) if case.guesses == "random" else source
        found = run(experts, case.family, DTYPES[case.dtype])
        assert found.same_bits(all_resident(case.family, case.form, case.dtype))
        source.check_integrity()
        counts = source.counters()
        if case.link == "failing once":
            assert counts.retries
        if case.budget == "two slots":
            assert counts.evictions


@pytest.mark.parametrize("case", pairwise_cases(), ids=str)
def test_no_bit_changes(case: Case) -> None:
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe", "mixtral", "olmoe"])
@pytest.mark.parametrize("form", FORMATS)
def test_no_bit_changes_in_any_case(family: str, form: str) -> None:
    for case in every_case():
        if (case.family, case.form) == (family, form):
            check(case)


def test_every_two_values_meet_in_the_cases() -> None:
    cases = pairwise_cases()
    assert any(c.family == "olmoe" and c.form == "int4" for c in cases)
    assert any(c.budget == "two slots" and c.link == "failing once" for c in cases)
    assert any(c.tier == "disk" and c.guesses == "random" for c in cases)
    assert len(cases) < 40


def test_the_cases_can_tell_runs_apart() -> None:
    exact, coarse = (all_resident("qwen3_moe", form, "float32") for form in ("float32", "bfloat16"))
    assert not exact.same_bits(coarse)
    assert exact.same_bits(run(resident("qwen3_moe", FORMATS["float32"], torch.float32)))


def test_no_bit_changes_while_another_thread_guesses_at_random() -> None:
    case = Case("qwen3_moe", "float32", "float32", "12.5 %", "disk", "slow", "random")
    over = threading.Event()
    with open_source(case) as source:
        guesses = RandomGuesses(source, 5)

        def guess_on() -> None:
            while not over.wait(0.0002):
                guesses.disturb()

        thread = threading.Thread(target=guess_on)
        thread.start()
        try:
            found = run(source)
        finally:
            over.set()
            thread.join()
        assert found.same_bits(all_resident("qwen3_moe", "float32", "float32"))
        source.check_integrity()
        assert source.counters().draft.transfers + source.counters().prefetch.transfers
