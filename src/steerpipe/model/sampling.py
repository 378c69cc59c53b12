"""From one row of logits to one token. Settings and their order are in `core.sampling`.

V vocabulary, n candidates. Each row is worked on alone and from a fresh copy, so its bits depend neither on the batch
nor on where in the batch it lies. From the weights on everything is integers: sums are then exact in any order, and
the same on every device.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from steerpipe.core.errors import NumericsError
from steerpipe.core.events import TokenLogprob
from steerpipe.core.random import random_word
from steerpipe.core.sampling import SamplingSettings

# 2**40 steps below the likeliest token: what is rounded away is less than 2e-7 of the mass even if each of 152k tokens
# loses a whole step, and the sum of 2**22 weights still fits an int64.
_ONE = 2**40
_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True)
class SamplingContext:
    """What one sequence brings to the choice of its next token."""

    settings: SamplingSettings
    seed: int  # 64 bits, resolved: never None here
    position: int  # absolute position of the token being chosen; the counter of its random number
    prompt_ids: Sequence[int] = ()
    answer_ids: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Sampled:
    """The token, and what `settings.logprobs` asked for: of the model's own distribution, before any setting."""

    token_id: int
    logprob: TokenLogprob | None = None
    top: tuple[TokenLogprob, ...] = ()  # likeliest first, lowest id first among equals


class Candidates(NamedTuple):
    """The tokens that the settings leave, with integer weights: weight / sum is the probability."""

    ids: Tensor  # [n] int64, ascending
    weights: Tensor  # [n] int64; the likeliest has 2**40


def sample(logits: Tensor, contexts: Sequence[SamplingContext]) -> list[Sampled]:
    """One token per row of `logits` [B, V] (fp32 or bf16). Raises NumericsError at the first row that is not finite;
    a caller who wants the other rows then asks `sample_row` for them: the answers are the same."""
    assert logits.ndim == 2, f"logits are [B, V], not {list(logits.shape)}"
    assert len(logits) == len(contexts), f"{len(logits)} rows of logits for {len(contexts)} contexts"
    return [sample_row(row, context) for row, context in zip(logits, contexts, strict=True)]


def sample_row(logits: Tensor, context: SamplingContext) -> Sampled:
    """One token from `logits` [V]. Waits for the device."""
    if logits.is_cuda and _is_plain_greedy(context.settings):
        return Sampled(_greedy_at_once(logits, context))
    own = _finite_row(logits, context)  # [V]
    if context.settings.temperature == 0:
        token_id = _first_maximum(_penalised(own, context))
    else:
        token_id = _draw(_candidates(_penalised(own, context), context.settings), context)
    return _with_logprobs(token_id, own, context.settings.logprobs)


def score_row(logits: Tensor, token_id: int, count: int, context: SamplingContext) -> Sampled:
    """What `sample_row` would say of `token_id`, had it been chosen: its log probability and the `count` likeliest."""
    return _with_logprobs(token_id, _finite_row(logits, context), count)


def candidates(logits: Tensor, context: SamplingContext) -> Candidates:
    """The distribution that `sample_row` draws from. The temperature must not be 0."""
    assert context.settings.temperature > 0, "greedy has no distribution"
    return _candidates(_penalised(_finite_row(logits, context), context), context.settings)


def _finite_row(logits: Tensor, context: SamplingContext) -> Tensor:
    # The copy matters on CUDA: reductions there peel unaligned heads, so a view's sums would depend on its row number.
    row = logits.to(torch.float32, copy=True)  # [V]
    low, high = row.aminmax()  # NaN wins both
    _check_finite(low.item(), high.item(), row, context)
    return row


def _check_finite(low: float, high: float, row: Tensor, context: SamplingContext) -> None:
    if math.isfinite(low) and math.isfinite(high):
        return
    count = int((~torch.isfinite(row)).sum())
    raise NumericsError(
        f"{count} of {len(row)} logits at position {context.position} are not finite numbers",
        fix="run with --dtype float32; if it stays, the weights are damaged: fetch the checkpoint again",
    )


def _is_plain_greedy(settings: SamplingSettings) -> bool:
    penalised = settings.repetition_penalty != 1 or settings.presence_penalty or settings.frequency_penalty
    return settings.temperature == 0 and settings.logprobs is None and not penalised


def _greedy_at_once(row: Tensor, context: SamplingContext) -> int:
    """As `_finite_row` and `_first_maximum`, but reads from the device once instead of four times."""
    low, high = row.aminmax()
    places = torch.arange(len(row), device=row.device)
    first = torch.where(row == high, places, len(row)).min()
    lowest, highest, token_id = torch.stack((low.double(), high.double(), first.double())).tolist()
    _check_finite(lowest, highest, row, context)
    return int(token_id)


def _penalised(row: Tensor, context: SamplingContext) -> Tensor:
    """Repetition over prompt and answer, then presence and frequency over the answer. [V] → [V]; `row` stays."""
    settings = context.settings
    if settings.repetition_penalty != 1:
        ids = _index(sorted({*context.prompt_ids, *context.answer_ids}), row)  # [n]
        seen = row[ids].double()  # fp64: 0 * 1e300 is 0, in fp32 it would be 0 * inf
        seen = torch.where(seen > 0, seen / settings.repetition_penalty, seen * settings.repetition_penalty)  # [n]
        row = row.index_put((ids,), seen.clamp(-_LARGEST, _LARGEST).float())
    if settings.presence_penalty or settings.frequency_penalty:
        counts = Counter(context.answer_ids)
        ids = _index(list(counts), row)  # [n]
        times = torch.tensor(list(counts.values()), device=row.device)  # [n]
        row = row.index_put((ids,), row[ids] - settings.presence_penalty - settings.frequency_penalty * times)
    return row


def _index(ids: list[int], row: Tensor) -> Tensor:
    assert all(0 <= i < len(row) for i in ids), f"a token id beyond the {len(row)} logits"
    return torch.tensor(ids, dtype=torch.int64, device=row.device)


def _first_maximum(row: Tensor) -> int:
    """The lowest id among equals: bf16 logits tie often, and torch promises no order for argmax."""
    return int((row == row.max()).nonzero()[0])


def _candidates(row: Tensor, settings: SamplingSettings) -> Candidates:
    """top-k is taken before the temperature, which it commutes with: the order of the tokens stays."""
    ids = _largest(row, settings.top_k) if settings.top_k else torch.arange(len(row), device=row.device)  # [n]
    logits = row[ids] if settings.top_k else row  # [n]
    gaps = (logits - row.max()).double() / settings.temperature  # [n], 0 for the likeliest: no temperature overflows
    shares = gaps.exp()  # [n] of the likeliest; fp64, whose last-bit differences between devices vanish on the grid
    left = Candidates(ids, (shares * _ONE).to(torch.int64))
    if settings.top_p < 1:
        left = _nucleus(left, settings.top_p)
    if settings.min_p > 0:
        likely = left.weights >= math.ceil(settings.min_p * _ONE)  # [n]; a float here would compare in fp32
        left = Candidates(left.ids[likely], left.weights[likely])
    return left


def _largest(row: Tensor, count: int) -> Tensor:
    """Ids of exactly `count` largest, lowest ids first among equals; [count] ascending.

    So top_k=1 is greedy. (transformers keeps all that equal the k-th; torch.topk picks any of them.)
    """
    count = min(count, len(row))
    edge = row.topk(count).values[-1]  # the value is certain, the indices are not
    above = (row > edge).nonzero()[:, 0]
    equal = (row == edge).nonzero()[:, 0]
    return torch.cat((above, equal[: count - len(above)])).sort().values


def _nucleus(full: Candidates, top_p: float) -> Candidates:
    """The smallest set of likeliest tokens whose mass reaches `top_p`; lowest ids first among equals."""
    total = int(full.weights.sum())
    needed = min(total, max(1, math.ceil(top_p * total)))
    # All tokens at or below this weight together hold no more than total - needed: without them the sort is short
    # (all of 152k would take 13 ms on one EPYC core).
    able = full.weights > (total - needed) // len(full.ids)  # [n]
    ids, weights = full.ids[able], full.weights[able]  # [m]
    descending = weights.sort(descending=True, stable=True)
    kept = int(torch.searchsorted(descending.values.cumsum(0), needed)) + 1
    chosen = descending.indices[:kept].sort().values  # [kept]
    return Candidates(ids[chosen], weights[chosen])


def _draw(left: Candidates, context: SamplingContext) -> int:
    """Inverse of the cumulative distribution, in the order of the ids.

    By id and not by probability: a last-bit change of the logits then moves each boundary by a last bit; in sorted
    order two near-equal tokens would change places, and the whole interval of both with them.
    """
    ends = left.weights.cumsum(0)  # [n]
    target = int(ends[-1]) * random_word(context.seed, context.position) >> 64  # below the sum
    return int(left.ids[torch.searchsorted(ends, target, right=True)])


def _with_logprobs(token_id: int, own: Tensor, count: int | None) -> Sampled:
    if count is None:
        return Sampled(token_id)
    logprobs = own.log_softmax(0)  # [V]
    top: list[int] = []
    if count > 0:
        ids = _largest(own, count)  # [count] ascending
        top = ids[own[ids].sort(descending=True, stable=True).indices].tolist()
    values = logprobs[[token_id, *top]].tolist()
    chosen, *rest = (TokenLogprob(i, value) for i, value in zip([token_id, *top], values, strict=True))
    return Sampled(token_id, chosen, tuple(rest))
