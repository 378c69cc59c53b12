"""Log probabilities of the prompt, and requests that want nothing but the prompt."""

import pytest
import torch

from steerpipe.core.errors import RequestError
from steerpipe.core.events import Completion, FinishReason, PromptEvent, TokenEvent
from steerpipe.core.sampling import SamplingSettings
from steerpipe.engine.request import Request
from tests.engine.test_engine import GREEDY, bench, complete, model, prompt


def score(ids: list[int], *, chunk: int = 32, count: int = 2, sampling: SamplingSettings | None = None) -> Completion:
    """With `sampling` an answer follows the prompt."""
    here = bench(prefill_chunk=chunk)
    request = Request(
        tuple(ids), sampling or GREEDY, batched=True, prompt_logprobs=count, prompt_only=sampling is None, scope="a"
    )
    sequence = here.engine.submit(request)
    while not here.engine.idle:
        here.events += here.engine.step()
    here.engine.check_integrity()
    return here.engine.take_completion(sequence)


@pytest.mark.parametrize("count", [1, 2, 16, 33, 140])
def test_scores_are_the_log_softmax_of_every_row_but_the_last(count: int) -> None:
    ids = prompt(7, count)
    logprobs = model().prefill(ids).log_softmax(-1)
    found = score(ids)
    assert [entry.token_id for entry in found.prompt_logprobs] == ids[1:]
    expected = [logprobs[place, token].item() for place, token in enumerate(ids[1:])]
    assert [entry.logprob for entry in found.prompt_logprobs] == pytest.approx(expected, abs=1e-6)
    best = logprobs[:-1].topk(2).values
    assert (
        torch.tensor([[e.logprob for e in top] for top in found.prompt_top_logprobs])
        .reshape(-1, 2)
        .allclose(best, atol=1e-6)
    )
    assert found.token_ids == () and found.finish_reason is FinishReason.LENGTH


def test_the_size_of_chunks_changes_no_score() -> None:
    ids = prompt(8, 140)
    scores = {score(ids, chunk=chunk).prompt_logprobs for chunk in (16, 48, 256)}
    assert len(scores) == 1


def test_an_answer_follows_a_scored_prompt_as_it_follows_any_other() -> None:
    ids = prompt(9, 50)
    found = score(ids, sampling=GREEDY)
    assert found.token_ids == complete(ids).token_ids
    assert found.prompt_logprobs == score(ids).prompt_logprobs


def test_the_prompt_is_told_before_the_first_token() -> None:
    here = bench()
    here.engine.submit(Request(tuple(prompt(1, 40)), GREEDY, batched=True, prompt_logprobs=0))
    while not here.engine.idle:
        here.events += here.engine.step()
    kinds = [type(event) for event in here.events]
    assert kinds == [PromptEvent, *[TokenEvent] * 12]


def test_a_scored_prompt_is_computed_even_where_it_is_kept() -> None:
    here, ids = bench(), prompt(2, 64)
    for _ in range(2):
        sequence = here.engine.submit(Request(tuple(ids), GREEDY, prompt_logprobs=0, prompt_only=True, scope="a"))
        while not here.engine.idle:
            here.engine.step()
        found = here.engine.take_completion(sequence)
        assert len(found.prompt_logprobs) == 63 and found.timings.cache_n == 0


def test_a_prompt_alone_is_ready_for_the_request_that_follows() -> None:
    here, ids = bench(), prompt(3, 100)
    here.engine.submit(Request(tuple(ids), GREEDY, scope="a", prompt_only=True))
    while not here.engine.idle:
        here.events += here.engine.step()
    assert [type(event) for event in here.events] == [PromptEvent]
    sequence = here.engine.submit(Request(tuple(ids), GREEDY, batched=True, scope="a"))
    while not here.engine.idle:
        here.engine.step()
    completion = here.engine.take_completion(sequence)
    assert completion.timings.cache_n == 96 and completion.timings.prompt_n == 4
    assert completion.token_ids == complete(ids).token_ids


def test_a_prompt_alone_may_fill_the_context() -> None:
    here = bench(max_context=64)
    here.engine.submit(Request(tuple(prompt(1, 64)), GREEDY, prompt_only=True))
    with pytest.raises(RequestError, match="64 tokens; the context holds 64"):
        here.engine.submit(Request(tuple(prompt(1, 64)), GREEDY))


def test_a_prompt_in_the_background_is_ready_in_the_end_and_delays_nobody() -> None:
    here, ids = bench(prefill_chunk=16), prompt(3, 100)
    behind = here.engine.submit(Request(tuple(ids), GREEDY, scope="a", prompt_only=True, background=True))
    here.engine.step()
    answer = here.engine.submit(Request(tuple(prompt(4, 60)), GREEDY, batched=True, scope="b"))
    while not here.engine.idle:
        here.events += here.engine.step()
    order = [event.sequence for event in here.events]
    assert order == [*[answer] * 12, behind]
    assert here.engine.take_completion(behind).timings.cache_n == 0, (
        "what it computed before it was interrupted is its own"
    )
    assert here.engine.take_completion(answer).token_ids == complete(prompt(4, 60)).token_ids
    here.engine.check_integrity()
