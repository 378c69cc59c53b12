"""The router's choice, on the device and in the host's mailbox. R rows, E experts, k experts per row."""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from steerpipe.kernels.dense_configs import overlapped


@triton.jit
def _route(
    logits, experts, gates, positions, mailbox, stamp, forced,
    E: tl.constexpr, K: tl.constexpr, E_PAD: tl.constexpr, K_PAD: tl.constexpr, RENORMALISE: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    expert = tl.arange(0, E_PAD)
    rank = tl.arange(0, K_PAD)
    used = rank < K
    real = tl.load(positions + row) >= 0
    score = tl.load(logits + row * E + expert, mask=expert < E, other=float("-inf"))
    mass = tl.exp(score - tl.max(score, 0))
    chance = mass / tl.sum(mass, 0)
    chance = tl.where(expert < E, chance, -1.0)  # padding comes after every expert, also one of probability 0
    # an expert's place is the number of experts before it: all of them at once, no step waits for another
    above = chance[None, :] > chance[:, None]
    tied = (chance[None, :] == chance[:, None]) & (expert[None, :] < expert[:, None])
    place = tl.sum((above | tied).to(tl.int32), 1)  # [E_PAD]
    chosen = tl.sum(tl.where(place[None, :] == rank[:, None], expert[None, :], 0), 1)  # [K_PAD]
    chosen = tl.minimum(chosen, E - 1)  # only a NaN among the logits makes it larger; it must not leave the table
    if forced is not None:
        wish = tl.load(forced + row * K + rank, mask=used, other=-1)
        chosen = tl.where(wish >= 0, wish, chosen)
    answer = tl.where(real, chosen, -1)
    if mailbox is not None:  # first of all, and past the caches: the host is waiting
        word = (tl.load(stamp) << 32) | (answer.to(tl.int64) & 0xFFFFFFFF)
        tl.store(mailbox + row * K + rank, word, mask=used, cache_modifier=".wt")
    tl.store(experts + row * K + rank, answer, mask=used)
    gate = tl.sum(tl.where(expert[None, :] == chosen[:, None], chance[None, :], 0.0), 1)
    if RENORMALISE:
        gate = gate / tl.sum(tl.where(used, gate, 0.0), 0)
    tl.store(gates + row * K + rank, tl.where(real, gate, 0.0), mask=used)


def route(
    logits: Tensor,
    *,
    top_k: int,
    renormalise: bool,
    experts: Tensor,
    gates: Tensor,
    positions: Tensor,
    mailbox: Tensor | None = None,
    stamp: Tensor | None = None,
    forced: Tensor | None = None,
) -> None:
    """logits: [R, E] fp32 → experts [R, k] int32 and gates [R, k] fp32, the likeliest first, ties by index.

    At position -1 (positions: [R]) experts are -1 and gates 0. mailbox: [R · k] int64 in pinned memory; a word is
    stamp << 32 | expert, with stamp [1] int64 on the device, and 0xFFFFFFFF for no expert. forced: [R, k] int32; an
    element that is not negative takes the place of the router's choice of that rank, with its own probability.
    """
    rows, count = logits.shape
    assert experts.shape == (rows, top_k) and gates.shape == (rows, top_k), "k experts and gates per row"
    assert logits.is_contiguous() and experts.is_contiguous() and gates.is_contiguous(), "rows follow each other"
    assert (mailbox is None) == (stamp is None), "words in a mailbox carry a stamp"
    assert forced is None or forced.is_contiguous(), "rows follow each other"
    overlap = overlapped(logits)
    _route[(rows,)](
        logits, experts, gates, positions, mailbox, stamp, forced,
        E=count, K=top_k, E_PAD=triton.next_power_of_2(count), K_PAD=triton.next_power_of_2(top_k),
        RENORMALISE=renormalise, OVERLAP=overlap, num_warps=4, launch_pdl=overlap,
    )  # fmt: skip
