"""A predictor's arithmetic at a tap of one row's step: what the next layers will route to, told to the host.

A tap stands behind a router: `look` gathers what exists there, a product and the target's own router follow, and
`foretell` makes probabilities of the scores and posts the likeliest. Legend: H hidden, E experts, k experts per row,
r rank, n experts that are named, D = 2 H + 2 E inputs of a head: q, gates, and of the token before its experts and
its residual (predict/head.py).
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from steerpipe.core.blocks import GUESSES
from steerpipe.kernels.dense_configs import overlapped

PROBABILITY_BITS = 15  # of a word: stamp << 32 | probability << 16 | expert
SURE = (1 << PROBABILITY_BITS) - 1
LEAST_PROBABILITY = 0.2  # below it a guess displaces more than it brings


@triton.jit
def _look(
    x, shared, switch, normed, experts, gates, state, inputs, own, target, stride,
    H: tl.constexpr, E: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, E_PAD: tl.constexpr, K_PAD: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, BLOCK)
    inside = at < H
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if shared is not None:
        product = tl.load(shared + at, mask=inside, other=0.0).to(tl.float32)
        if switch is not None:
            product = product / (1.0 + tl.exp(-tl.load(switch).to(tl.float32)))
        value += product
    tl.store(state + at, value.to(state.dtype.element_ty), mask=inside)
    if inputs is not None:
        rank = tl.arange(0, K_PAD)
        expert = tl.arange(0, E_PAD)
        chosen = tl.load(experts + rank, mask=rank < K, other=-1)
        gate = tl.load(gates + rank, mask=rank < K, other=0.0)
        here = chosen[None, :] == expert[:, None]  # [E_PAD, K_PAD]
        dtype = inputs.dtype.element_ty
        ahead, mine = inputs + target * stride, inputs + own * stride
        tl.store(ahead + H + expert, tl.sum(tl.where(here, gate[None, :], 0.0), 1).to(dtype), mask=expert < E)
        tl.store(mine + H + E + expert, tl.sum(here.to(tl.float32), 1).to(dtype), mask=expert < E)
        tl.store(mine + H + 2 * E + at, tl.load(normed + at, mask=inside, other=0.0), mask=inside)


@triton.jit
def _send(
    named, told, real, now, table, sighted, head, tags, entries, LEAST: tl.constexpr, N: tl.constexpr,
    N_PAD: tl.constexpr, RING: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Likely experts that are not here take tickets, at most MOST of them, the likeliest first; a tag for each."""
    rank = tl.arange(0, N_PAD)
    # as in the router: one thread says what was read
    tl.store(entries + rank, tl.load(table + named, mask=rank < N, other=0, volatile=True), mask=rank < N)
    tl.debug_barrier()
    absent = tl.load(entries + rank, mask=rank < N, other=0, volatile=True) < 0
    again = tl.sum(((rank[None, :] < rank[:, None]) & (named[None, :] == named[:, None])).to(tl.int32), 1) > 0
    wanted = real & absent & (rank < N) & ((told >> 16) >= LEAST) & (again == 0)
    before = tl.sum(((rank[None, :] < rank[:, None]) & wanted[None, :]).to(tl.int32), 1)
    taken = tl.load(head)
    sent = wanted & (before < MOST) & (taken + before < tl.atomic_add(sighted, 0, sem="relaxed"))
    tag = (now << 32) | ((taken + before) % RING << 16) | named
    tl.store(tags + before, tag, mask=sent)
    tl.debug_barrier()
    tl.store(head, taken + tl.sum(sent.to(tl.int64), 0))


@triton.jit
def _foretell(
    logits, hidden, up, up_bias, scale, bias, positions, stamp, asked, forced, words, experts, gates,
    table, sighted, head, tags, entries,
    E: tl.constexpr, R: tl.constexpr, N: tl.constexpr, K: tl.constexpr, E_PAD: tl.constexpr, R_PAD: tl.constexpr,
    N_PAD: tl.constexpr, SURE: tl.constexpr, RENORMALISE: tl.constexpr, LEAST: tl.constexpr, RING: tl.constexpr,
    MOST: tl.constexpr, LATER: tl.constexpr, AGO: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    expert = tl.arange(0, E_PAD)
    rank = tl.arange(0, N_PAD)
    unit = tl.arange(0, R_PAD)
    known = expert < E
    rows, raised = tl.zeros((1,), tl.float32), tl.zeros((1,), tl.float32)
    if hidden is not None:  # weights, while the kernel before ends
        rows = tl.load(up + expert[:, None] * R + unit[None, :], mask=known[:, None] & (unit < R)[None, :], other=0.0)
        raised = tl.load(up_bias + expert, mask=known, other=0.0).to(tl.float32)
    if OVERLAP:
        gdc_wait()
    score = tl.load(logits + expert, mask=known, other=float("-inf"))
    if hidden is not None:
        seen = tl.load(hidden + unit, mask=unit < R, other=0.0).to(tl.float32)
        seen = seen / (1.0 + tl.exp(-seen))
        score += tl.sum(rows.to(tl.float32) * seen[None, :], 1)
        score += raised
    above = score[None, :] > score[:, None]
    tied = (score[None, :] == score[:, None]) & (expert[None, :] < expert[:, None])
    place = tl.sum((above | tied).to(tl.int32), 1)  # [E_PAD]
    odds = score
    if scale is not None:
        edge = tl.sum(tl.where((place == K - 1) | (place == K), score, 0.0), 0) / 2.0  # between the k-th and the next
        odds = tl.load(scale) * (score - edge) + tl.load(bias)
    chance = 1.0 / (1.0 + tl.exp(-odds))
    ranked = place[None, :] == rank[:, None]  # [N_PAD, E_PAD]
    named = tl.minimum(tl.sum(tl.where(ranked, expert[None, :], 0), 1), E - 1)
    likely = tl.sum(tl.where(ranked, chance[None, :], 0.0), 1)
    told = ((likely * SURE).to(tl.int32) << 16) | named
    if forced is not None:
        wish = tl.load(forced + rank, mask=rank < N, other=-1)
        told = tl.where(wish >= 0, wish, told)
        named = tl.minimum(told & 0xFFFF, E - 1)
    real = tl.load(positions) >= 0
    if asked is not None:
        at = tl.load(asked + 1)  # below 0: the run before a capture, whose stamp 0 is that of the step before the first
        real = real & (at >= 0) & (at + AGO == tl.load(positions)) & (tl.load(asked) + AGO == tl.load(stamp))
    if table is not None:
        then = tl.load(stamp) + LATER
        _send(named, told, real, then, table, sighted, head, tags, entries, LEAST, N, N_PAD, RING, MOST)
    word = (tl.load(stamp) << 32) | tl.where(real, told, 0).to(tl.int64)
    tl.store(words + rank, word, mask=rank < N, cache_modifier=".wt")
    if experts is not None:
        mass = tl.exp(score - tl.max(score, 0))
        share = mass / tl.sum(mass, 0)
        weight = tl.sum(tl.where(named[:, None] == expert[None, :], share[None, :], 0.0), 1)
        used = rank < K
        if RENORMALISE:
            weight = weight / tl.sum(tl.where(used, weight, 0.0), 0)
        tl.store(experts + rank, tl.where(real, named, -1), mask=used)
        tl.store(gates + rank, tl.where(real, weight, 0.0), mask=used)


@dataclass(frozen=True, slots=True)
class HeadInputs:
    """What a head reads, for every layer: rows [L, D]. `look` fills in what a layer leaves for itself and another."""

    rows: Tensor
    own: int  # the layer of the tap: its experts and its residual, for the next token
    target: int  # the layer that is predicted: the gates


def look(
    x: Tensor, shared: Tensor | None, switch: Tensor | None, normed: Tensor, experts: Tensor, gates: Tensor,
    *, state: Tensor, inputs: HeadInputs | None,
) -> None:  # fmt: skip
    """state [1, H] = x + sigmoid(switch) · shared: what enters the next layer, as far as it is known.

    x, shared, normed: [1, H]; switch [1, 1]; experts [1, k] int32, gates [1, k] fp32. normed is what the layer's own
    norm made of x.
    """
    hidden, top_k = x.shape[1], experts.shape[1]
    given = (None, 0, 0, 0) if inputs is None else (inputs.rows, inputs.own, inputs.target, inputs.rows.stride(0))
    count = 1 if inputs is None else (inputs.rows.shape[1] - 2 * hidden) // 2
    _look[(1,)](
        x, shared, switch, normed, experts, gates, state, *given,
        H=hidden, E=count, K=top_k, BLOCK=triton.next_power_of_2(hidden), E_PAD=triton.next_power_of_2(count),
        K_PAD=triton.next_power_of_2(top_k), num_warps=8,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Correction:
    """What a trained head adds to the router's logits: hidden [1, r] before its SiLU, up [E, r], up_bias [E]."""

    hidden: Tensor
    up: Tensor
    up_bias: Tensor


@dataclass(frozen=True, slots=True)
class Asked:
    """When logits were made: stamp and position [2] int64 of a step that has to be `ago` steps before this one.

    Of which sequence that was is not known: another one's answer, at just the position before, is a guess like others.
    """

    when: Tensor
    ago: int


@dataclass(frozen=True, slots=True)
class Sending:
    """What the likeliest absent experts take tickets of, as a router does; all int64 on the device.

    table [E] is the target layer's; ring, head: slots for guesses; sighted [1]: how many of them a router has seen
    supplied (router.Guessed); tags [GUESSES]: see `fetch.Fetched`. entries [n] is scratch.
    `later`: the target layer comes so many steps after this one. `most`: so many tickets at most.
    """

    table: Tensor
    ring: Tensor
    sighted: Tensor
    head: Tensor
    tags: Tensor
    entries: Tensor
    later: int = 0
    most: int = GUESSES


def foretell(
    logits: Tensor, correction: Correction | None, *, top_k: int, renormalise: bool, scale: Tensor | None,
    bias: Tensor | None, positions: Tensor, stamp: Tensor, words: Tensor, forced: Tensor | None = None,
    experts: Tensor | None = None, gates: Tensor | None = None, sending: Sending | None = None,
    asked: Asked | None = None,
) -> None:  # fmt: skip
    """logits [1, E] fp32 → words [n] int64 in pinned memory, the likeliest first: stamp << 32 | p << 16 | expert.

    p has 15 bits; the probability is sigmoid(scale · margin + bias), with scale and bias [1] fp32 and the margin as
    `predict.calibration` has it; without them sigmoid(logit). A row at position -1 posts p 0, and so does one whose
    logits were made for another token than `asked` has it. forced [n] int32: what is said instead (-1: its own).
    experts and gates [1, k] receive the named ones and their softmax weights, for a layer that is not asked itself.
    sending: experts named with LEAST_PROBABILITY at least that are not here get slots, for `fetch`.
    """
    count, named = logits.shape[1], words.shape[0]
    assert named >= top_k, f"{named} words for {top_k} experts"
    c = correction
    given = (None, None, None) if c is None else (c.hidden, c.up, c.up_bias)
    rank = 1 if c is None else c.up.shape[1]
    s = sending
    sent = (None,) * 5 if s is None else (s.table, s.sighted, s.head, s.tags, s.entries)
    overlap = overlapped(logits)
    _foretell[(1,)](
        logits, *given, scale, bias, positions, stamp, None if asked is None else asked.when, forced, words, experts,
        gates, *sent,
        E=count, R=rank, N=named, K=top_k, E_PAD=triton.next_power_of_2(count), R_PAD=triton.next_power_of_2(rank),
        N_PAD=triton.next_power_of_2(named), SURE=SURE, RENORMALISE=renormalise,
        LEAST=int(LEAST_PROBABILITY * SURE), RING=1 if s is None else len(s.ring), MOST=0 if s is None else s.most,
        LATER=0 if s is None else s.later, AGO=0 if asked is None else asked.ago,
        OVERLAP=overlap, num_warps=8, launch_pdl=overlap,
    )  # fmt: skip
