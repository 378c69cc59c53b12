"""Drafts on a GPU: experts are moved for them, and the answer is that of a model whose experts are all there."""

from typing import Any

import pytest
import torch

from steerpipe import Pipeline
from steerpipe.intake.edits import paste
from tests.runtime.drafting import GREEDY, Desk, keys

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
TEXT = "Can you tell me what the capital of France is, and how many people live there today?"
SETTINGS: dict[str, Any] = {"device": "cuda", "profile": False, "kv_memory": "64MiB", "max_context": 512}


def answered(pipe: Pipeline, *, pause: bool) -> tuple[list[int], int]:
    """The tokens of an answer to what was typed, and how many of them were there at Enter."""
    desk = Desk(pipe)
    desk.drafts = pipe.drafts()
    draft = desk.drafts.open("a", settings=GREEDY)
    desk.type(draft, [paste(0, TEXT[:40], 0.0), *keys(TEXT[40:], 1.0, at=40)])
    if pause:
        desk.rest(desk.now + 2.0)
    known = desk.drafts.opening(draft)
    promise = None if known is None else known.promise
    told = [] if promise is None else [*promise.token_ids]
    request = None if known is None else known.request
    tokens = told + desk.answer(desk.drafts.submit(draft, request=request, promise=promise))
    desk.close()
    return tokens, len(told)


@pytest.mark.parametrize("pause", [False, True])
def test_drafts_move_experts_and_change_no_token(pause: bool) -> None:
    with Pipeline(**SETTINGS, fast_memory="100%") as whole:
        expected = answered(whole, pause=pause)
    assert expected[1] == (8 if pause else 0)
    with Pipeline(**SETTINGS, fast_memory="25%") as tight:
        assert answered(tight, pause=pause) == expected
        counters = tight.counters()
        assert counters is not None and counters.draft.transfers > 50 and counters.draft.hits > 20
        tight.experts.check_integrity()  # type: ignore[union-attr]


def test_most_experts_of_an_answers_beginning_are_there_before_it() -> None:
    with Pipeline(**SETTINGS, fast_memory="25%") as pipe:
        desk = Desk(pipe)
        desk.drafts = pipe.drafts()
        draft = desk.drafts.open("a", settings=GREEDY)
        desk.type(draft, keys(TEXT))
        for _ in range(100):
            desk.rest(desk.now + 0.1)
            torch.cuda.synchronize()
        warmth = desk.drafts.warmth(draft)
        assert warmth.experts_ready > 200 and warmth.bytes_in_flight == 0
        desk.close()
