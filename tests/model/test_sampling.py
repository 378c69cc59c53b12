"""Sampling against transformers' own processors, against hand-computed values, and against itself bit by bit."""

import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from steerpipe.core.errors import InputError, NumericsError
from steerpipe.core.random import uniform
from steerpipe.core.sampling import SamplingSettings
from steerpipe.model.sampling import Sampled, SamplingContext, candidates, sample, sample_row

VISIBLE = 1e-10  # below it our grid of 2**-40 may show a probability as 0


def _context(
    seed: int = 1, position: int = 0, prompt: tuple[int, ...] = (), answer: tuple[int, ...] = (), **named: Any
) -> SamplingContext:
    return SamplingContext(SamplingSettings(**named), seed, position, prompt, answer)


def _probabilities(logits: Tensor, context: SamplingContext) -> Tensor:
    ids, weights = candidates(logits, context)
    full = torch.zeros(len(logits), dtype=torch.float64)
    full[ids] = weights.double() / weights.sum()
    return full


def _logits(seed: int, size: int, scale: float = 3.0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * scale


def _tokens(logits: Tensor, count: int, **named: Any) -> list[int]:
    return [sample_row(logits, _context(position=p, **named)).token_id for p in range(count)]


# --- greedy


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_takes_the_lowest_id_among_equal_maxima(dtype: torch.dtype) -> None:
    logits = torch.zeros(5000, dtype=dtype)
    logits[[4321, 77, 1999]] = 2.0
    assert sample_row(logits, _context(temperature=0.0)) == Sampled(77)


def test_greedy_sees_the_penalties() -> None:
    logits = torch.tensor([1.0, 3.0, 2.5])
    assert sample_row(logits, _context(temperature=0.0, answer=(1,), presence_penalty=1.0)).token_id == 2


def test_bf16_logits_that_differ_only_in_bf16_tie_as_they_are() -> None:
    logits = torch.tensor([4.0, 4.001]).bfloat16()  # both 4.0
    assert sample_row(logits, _context(temperature=0.0)).token_id == 0


# --- the distribution, against transformers


def _reference(logits: Tensor, context: SamplingContext) -> Tensor:
    """transformers' processors in the order that generate() uses them. fp64, so that only we round. [V] → [V]"""
    wanted, ids = context.settings, torch.tensor([[*context.prompt_ids, *context.answer_ids]], dtype=torch.int64)
    scores = logits.double()[None]
    if ids.numel():
        scores = RepetitionPenaltyLogitsProcessor(wanted.repetition_penalty)(ids, scores)
    scores = TemperatureLogitsWarper(wanted.temperature)(ids, scores)
    if wanted.top_k:
        scores = TopKLogitsWarper(wanted.top_k)(ids, scores)
    scores = TopPLogitsWarper(wanted.top_p)(ids, scores)
    scores = MinPLogitsWarper(wanted.min_p)(ids, scores)
    return scores.softmax(-1)[0]


def _near_an_edge(logits: Tensor, context: SamplingContext) -> bool:
    """Whether our rounding to fp32 could move a token over the limit of top-p or min-p."""
    wanted = context.settings
    before = _reference(logits, SamplingContext(_without(wanted), 0, 0, context.prompt_ids, context.answer_ids))
    sums = before.sort(descending=True).values.cumsum(0)
    shares = (before / before.max())[before < before.max()]
    near = ((sums - wanted.top_p).abs() < 1e-6).any() and wanted.top_p < 1
    return bool(near or (((shares - wanted.min_p).abs() < 1e-6).any() and wanted.min_p > 0))


def _without(wanted: SamplingSettings) -> SamplingSettings:
    return wanted.override(top_p=1.0, min_p=0.0)


@settings(max_examples=200, derandomize=True, deadline=None)
@given(
    logits_seed=st.integers(0, 10**6),
    size=st.sampled_from([2, 7, 50, 1000]),
    temperature=st.floats(0.3, 3.0),
    top_k=st.sampled_from([0, 1, 2, 5, 40, 5000]),
    top_p=st.floats(0.05, 1.0),
    min_p=st.sampled_from([0.0, 0.01, 0.1, 0.5, 1.0]),
    repetition=st.floats(0.5, 2.0),
    seen=st.lists(st.integers(0, 1), max_size=3),
)
def test_kept_tokens_and_probabilities_equal_those_of_transformers(
    logits_seed: int,
    size: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    repetition: float,
    seen: list[int],
) -> None:
    context = _context(
        prompt=tuple(seen[:1]),
        answer=tuple(seen[1:]),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition,
    )
    logits = _logits(logits_seed, size)
    assume(not _near_an_edge(logits, context))
    ours, theirs = _probabilities(logits, context), _reference(logits, context)
    assert torch.equal(ours > VISIBLE, theirs > VISIBLE)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-9)


def test_plain_settings_leave_the_softmax_of_a_large_vocabulary() -> None:
    logits = _logits(5, 150_000)
    torch.testing.assert_close(_probabilities(logits, _context()), logits.double().softmax(0), rtol=1e-5, atol=1e-11)


# --- each filter at its edge, by hand


def _kept(logits: Tensor, **named: Any) -> list[int]:
    ids = candidates(logits, _context(**named)).ids.tolist()
    assert ids == sorted(ids)
    return ids


def test_top_k_keeps_exactly_k_and_the_lowest_ids_among_equals() -> None:
    logits = torch.tensor([1.0, 2.0, 2.0, 5.0, 2.0])
    assert _kept(logits, top_k=2) == [1, 3]
    assert _kept(logits, top_k=3) == [1, 2, 3]
    assert _kept(logits, top_k=99) == [0, 1, 2, 3, 4]


def test_top_k_of_one_is_greedy_even_among_equals() -> None:
    logits = torch.zeros(1000)
    logits[[900, 30]] = 1.0
    assert set(_tokens(logits, 20, top_k=1)) == {sample_row(logits, _context(temperature=0.0)).token_id} == {30}


def test_top_p_keeps_the_token_that_reaches_the_mass_and_no_more() -> None:
    logits = torch.tensor([0.1, 0.5, 0.15, 0.25]).log()
    assert _kept(logits, top_p=0.49) == [1]
    assert _kept(logits, top_p=0.51) == [1, 3]
    assert _kept(logits, top_p=0.76) == [1, 2, 3]
    assert _kept(logits, top_p=0.91) == [0, 1, 2, 3]


def test_top_p_reached_exactly_needs_no_further_token() -> None:
    assert _kept(torch.zeros(4), top_p=0.5) == [0, 1]  # equal: the lowest ids
    assert _kept(torch.zeros(4), top_p=0.5001) == [0, 1, 2]


def test_a_tiny_top_p_still_keeps_the_likeliest() -> None:
    assert _kept(_logits(1, 500), top_p=1e-300) == [int(_logits(1, 500).argmax())]


def test_top_p_almost_one_drops_next_to_nothing() -> None:
    assert len(_kept(_logits(2, 500, scale=1.0), top_p=math.nextafter(1, 0))) == 500


def test_min_p_is_relative_to_the_likeliest_after_the_temperature() -> None:
    logits = torch.tensor([0.6, 0.3, 0.1]).log()
    assert _kept(logits, min_p=0.49) == [0, 1]
    assert _kept(logits, min_p=0.51) == [0]
    assert _kept(logits, min_p=0.51, temperature=2.0) == [0, 1]  # sqrt(0.5) of the likeliest now
    assert _kept(torch.zeros(3), min_p=1.0) == [0, 1, 2]


# --- penalties, by hand


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits_of_prompt_and_answer_once() -> None:
    logits = torch.tensor([2.0, -2.0, 0.0, 1.0, -1.0])
    context = _context(prompt=(0, 2, 0), answer=(1, 1), repetition_penalty=4.0)
    expected = torch.tensor([0.5, -8.0, 0.0, 1.0, -1.0], dtype=torch.float64).softmax(0)
    torch.testing.assert_close(_probabilities(logits, context), expected, rtol=1e-6, atol=1e-9)


def test_presence_counts_once_and_frequency_each_time_over_the_answer_only() -> None:
    logits = torch.tensor([1.0, 1.0, 1.0])
    context = _context(prompt=(2, 2), answer=(0, 1, 1), presence_penalty=0.5, frequency_penalty=0.25)
    expected = torch.tensor([0.25, 0.0, 1.0], dtype=torch.float64).softmax(0)
    torch.testing.assert_close(_probabilities(logits, context), expected, rtol=1e-6, atol=1e-9)


def test_repetition_comes_before_presence_and_both_before_the_temperature() -> None:
    logits = torch.tensor([2.0, 0.0])
    context = _context(answer=(0,), repetition_penalty=2.0, presence_penalty=0.5, temperature=0.5)
    expected = torch.tensor([(2.0 / 2 - 0.5) / 0.5, 0.0], dtype=torch.float64).softmax(0)
    torch.testing.assert_close(_probabilities(logits, context), expected, rtol=1e-6, atol=1e-9)


def test_negative_penalties_invite_repetition() -> None:
    assert sample_row(torch.zeros(3), _context(temperature=0.0, answer=(2,), frequency_penalty=-1.0)).token_id == 2


@pytest.mark.parametrize("penalty", [1e-300, 1e300])
def test_absurd_repetition_penalties_do_not_overflow(penalty: float) -> None:
    logits = torch.tensor([100.0, -100.0, 0.0])
    assert int(_probabilities(logits, _context(prompt=(0, 1, 2), repetition_penalty=penalty)).isnan().sum()) == 0


def test_a_seen_id_beyond_the_logits_is_our_mistake() -> None:
    with pytest.raises(AssertionError, match="beyond the 3 logits"):
        sample_row(torch.zeros(3), _context(answer=(3,), presence_penalty=1.0))


# --- temperature


@pytest.mark.parametrize("temperature", [1e-6, 1e-300])
def test_a_tiny_temperature_is_greedy_and_does_not_overflow(temperature: float) -> None:
    logits = _logits(3, 400, scale=1000.0)
    assert set(_tokens(logits, 20, temperature=temperature)) == {int(logits.argmax())}


def test_a_huge_temperature_is_uniform() -> None:
    logits = torch.tensor([-3e38, 0.0, 3e38])
    expected = torch.full((3,), 1 / 3, dtype=torch.float64)
    torch.testing.assert_close(_probabilities(logits * 1e-38, _context(temperature=1e300)), expected)
    assert not _probabilities(logits, _context(temperature=1e300)).isnan().any()


# --- the draw


def test_the_draw_follows_the_distribution() -> None:
    logits = torch.tensor([1.5, 0.0, -1.0, 0.7, 0.7, -0.3, 2.0, -2.0])
    count = 4000
    named: dict[str, Any] = {"temperature": 1.3, "top_p": 0.95}
    expected = _probabilities(logits, _context(**named)) * count
    found = torch.bincount(torch.tensor(_tokens(logits, count, seed=11, **named)), minlength=8)
    kept = expected > 0
    assert int(found[~kept].sum()) == 0
    chi_square = float(((found - expected)[kept] ** 2 / expected[kept]).sum())
    assert int(kept.sum()) == 6
    assert chi_square < 20.5, "5 degrees of freedom pass 20.5 once in a thousand seeds, and ours is fixed"


def test_the_draw_is_the_inverse_of_the_cumulative_distribution_in_the_order_of_the_ids() -> None:
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()
    ends = [0.1, 0.3, 0.6, 1.0]
    expected = [next(i for i, end in enumerate(ends) if uniform(9, p) < end) for p in range(300)]
    assert _tokens(logits, 300, seed=9) == expected


def test_a_token_without_weight_is_never_drawn() -> None:
    logits = torch.tensor([-200.0, 0.0, -200.0, 0.0, -200.0])
    assert set(_tokens(logits, 200)) == {1, 3}


def test_a_seed_reproduces_and_another_seed_or_position_differs() -> None:
    logits = _logits(8, 1000, scale=0.1)
    first = _tokens(logits, 50, seed=2**63 + 5)
    assert first == _tokens(logits, 50, seed=2**63 + 5)
    assert len(set(first)) > 40
    assert first != _tokens(logits, 50, seed=5)


# --- rows


def _mixed_contexts() -> list[SamplingContext]:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0, "logprobs": 3},
        {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "logprobs": 5},
        {"min_p": 0.05, "repetition_penalty": 1.2, "logprobs": 0},
        {"top_p": 0.8, "frequency_penalty": 0.5, "presence_penalty": 0.1},
    ]
    return [_context(seed=i, position=100 + i, prompt=(1, 2), answer=(3, 3), **kinds[i % 4]) for i in range(16)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_gives_the_same_bits_alone_and_anywhere_in_a_batch(dtype: torch.dtype) -> None:
    logits = _logits(4, 16 * 777).view(16, 777).to(dtype)  # odd width: rows lie at every alignment
    contexts = _mixed_contexts()
    whole = sample(logits, contexts)
    assert whole == [sample_row(row.clone(), context) for row, context in zip(logits, contexts, strict=True)]
    order = list(range(15, -1, -1))
    assert sample(logits[order], [contexts[i] for i in order]) == [whole[i] for i in order]


def test_sampling_leaves_the_logits_as_they_are() -> None:
    logits = _logits(6, 16 * 50).view(16, 50)
    before = logits.clone()
    sample(logits, _mixed_contexts())
    assert torch.equal(logits, before)


def test_rows_and_contexts_must_agree_in_number() -> None:
    with pytest.raises(AssertionError, match="2 rows of logits for 1 contexts"):
        sample(torch.zeros(2, 3), [_context()])


# --- log probabilities


def test_logprobs_are_of_the_raw_distribution_whatever_the_settings() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, 3.0])
    context = _context(
        temperature=0.2, top_k=2, answer=(1, 3), presence_penalty=2.0, repetition_penalty=2.0, logprobs=3
    )
    sampled = sample_row(logits, context)
    expected = logits.log_softmax(0)
    assert sampled.logprob is not None
    assert sampled.logprob.token_id == sampled.token_id
    assert sampled.logprob.logprob == expected[sampled.token_id].item()
    assert [t.token_id for t in sampled.top] == [1, 3, 2]  # equals: the lowest id first
    assert [t.logprob for t in sampled.top] == expected[[1, 3, 2]].tolist()


def test_logprobs_off_none_and_more_than_the_vocabulary() -> None:
    logits = torch.tensor([0.0, 1.0])
    assert sample_row(logits, _context(temperature=0.0)) == Sampled(1)
    bare = sample_row(logits, _context(temperature=0.0, logprobs=0))
    assert bare.logprob is not None
    assert bare.top == ()
    assert [t.token_id for t in sample_row(logits, _context(temperature=0.0, logprobs=20)).top] == [1, 0]


# --- numbers that are none


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_raise_an_error_that_is_not_the_callers(bad: float, temperature: float) -> None:
    logits = torch.zeros(2, 10)
    logits[1, [3, 4]] = bad
    with pytest.raises(NumericsError) as caught:
        sample(logits, [_context(position=8, temperature=temperature)] * 2)
    assert caught.value.what == "2 of 10 logits at position 8 are not finite numbers"
    assert "--dtype float32" in caught.value.fix
    assert not isinstance(caught.value, InputError)
    assert caught.value.exit_status == 1
