"""Experts are fetched for an answer that may come: behind everything, and not at the cost of what is in use."""

from collections.abc import Iterator

import numpy as np
import pytest

from steerpipe.intake.edits import paste
from steerpipe.predict.openings import OpeningTable
from steerpipe.runtime.draft_forecast import DraftForecast, Readiness
from steerpipe.runtime.draft_routing import DraftRouting
from steerpipe.runtime.drafts import DraftWork
from steerpipe.runtime.pipeline import Pipeline
from steerpipe.store.policies import Lfru
from steerpipe.transfer.cuda.copier import HostCopier
from steerpipe.transfer.cuda.source import CudaSource
from steerpipe.transfer.source import LadderSource
from tests.runtime.drafting import GREEDY, Desk, expected
from tests.transfer.cuda.blocks import CPU, EXPERTS, NAMES, backing, contents, made_up

TEXT = "Can you tell me what the capital of France is?"


@pytest.fixture
def pipe() -> Iterator[Pipeline]:
    with Pipeline(fast_memory="25%", dtype="float32", threads=1, predict="off", profile=False) as found:
        yield found


def ladder(pipe: Pipeline) -> LadderSource:
    assert isinstance(pipe.experts, LadderSource)
    return pipe.experts


def forecast(desk: Desk, draft_text: str) -> None:
    """Until nothing more is sent for; every transfer gets the time that it takes."""
    draft = desk.drafts.open("a", settings=GREEDY)
    desk.drafts.edit(draft, [paste(0, draft_text, 0.0)])
    for round_ in range(40):
        desk.drafts.tend(float(round_))
        while not desk.engine.idle:
            desk.engine.step()
        ladder(desk.pipe).check_integrity()


def test_the_experts_of_an_answers_beginning_are_there_before_it(pipe: Pipeline) -> None:
    desk = Desk(pipe)
    desk.drafts = pipe.drafts(DraftWork(prefill=False, ahead_tokens=0))
    forecast(desk, TEXT)
    (draft,) = desk.drafts._open
    warmth = desk.drafts.warmth(draft)
    assert warmth.experts_ready == warmth.experts_expected > 200 and warmth.bytes_in_flight == 0
    before = pipe.counters()
    assert before is not None and before.draft.transfers == warmth.experts_ready and before.demand.transfers == 0
    told = desk.answer(desk.drafts.submit(draft))
    after = pipe.counters()
    assert after is not None and (after - before).draft.hits > 100
    assert told == expected(pipe, TEXT)
    ladder(pipe).check_integrity()


def test_what_was_used_most_of_late_is_not_thrown_away(pipe: Pipeline) -> None:
    desk = Desk(pipe)
    desk.drafts = pipe.drafts(DraftWork(prefill=False, ahead_tokens=0))
    expected(pipe, "Hello there, how are you today?")
    source, policy = ladder(pipe), ladder(pipe).policy
    assert isinstance(policy, Lfru)
    counts = dict(zip(source.experts, policy.counts(source.tokens), strict=True))
    busiest = sorted(source.residents, key=lambda expert: -counts[expert])[:60]
    forecast(desk, TEXT)
    assert set(busiest) <= set(source.residents)


def test_a_draft_that_is_given_up_takes_its_transfers_with_it(pipe: Pipeline) -> None:
    desk = Desk(pipe)
    desk.drafts = pipe.drafts()
    draft = desk.drafts.open("a", settings=GREEDY)
    desk.drafts.edit(draft, [paste(0, TEXT, 0.0)])
    desk.drafts.tend(1.0)
    desk.drafts.close(draft)
    ladder(pipe).check_integrity()
    assert desk.drafts.next_wake() is None


def test_what_is_anticipated_counts_once_however_often_it_is_said() -> None:
    policy = Lfru(4)
    policy.touch(0, 1.0)
    for _ in range(3):
        policy.anticipate(np.array([0, 1]), np.array([0.5, 2.0]), 1.0)
    assert np.allclose(policy.counts(1.0), [1.0, 2.0, 0.0, 0.0])


def test_a_forecast_moves_experts_on_a_gpu_too() -> None:
    layers, copier = made_up(), HostCopier()
    behind = backing(contents(layers, 0), copier, ())
    with CudaSource(layers, behind, slots=8, device=CPU, copier=copier, policy="lfru", direct=False) as source:
        routing = DraftRouting(NAMES, EXPERTS)
        made = DraftForecast(source, OpeningTable.unknown(len(NAMES), EXPERTS), routing)
        uses = np.zeros((len(NAMES), EXPERTS), dtype=np.uint16)
        uses[:, [1, 3]] = 16  # of 16 tokens
        made.expect([uses], {}, 16)
        assert {(expert.layer, expert.expert) for expert in source.residents} == {
            (layer, index) for layer in NAMES for index in (1, 3)
        }
        assert made.readiness == Readiness(6, 6, 0)
        made.withdraw()
        source.check_integrity()
