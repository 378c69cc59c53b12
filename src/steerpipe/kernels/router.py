"""The router's choice, on the device and in the host's mailbox. R rows, E experts, k experts per row.

One row may also take slots for what is missing (`Tickets`): its experts are then read from pinned memory and kept.
What is supplied is read before the table, so a slot that is taken has no owner any more: its old owner's entry was
rewritten before the slot was supplied (docs/adr/0008-cuda.md). What a tap has sent for (`Guessed`) has a slot already.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from steerpipe.core.blocks import GUESSES
from steerpipe.kernels.dense_configs import overlapped
from steerpipe.kernels.fetch import PROGRAMS, Fetched


@triton.jit
def _find(answer, missed, guess_ring, progress, stamp, seen, since, K: tl.constexpr, K_PAD: tl.constexpr,
          N: tl.constexpr, PROGRAMS: tl.constexpr):  # fmt: skip
    """Which of the missing experts were sent for, and their slots."""
    rank, number = tl.arange(0, K_PAD), tl.arange(0, N)
    tag = tl.load(seen + number, volatile=True)
    live = tag >> 32 == tl.load(stamp)
    same = missed[:, None] & live[None, :] & ((tag & 0xFFFF)[None, :] == answer[:, None])  # [K_PAD, N]
    slots = tl.load(guess_ring + ((tag >> 16) & 0xFFFF), mask=live, other=0)
    sent = tl.sum(same.to(tl.int32), 1) > 0
    rows = progress.to(tl.int64) + number * (PROGRAMS * 8)
    tl.store(since + rank, tl.sum(tl.where(same, rows[None, :], 0), 1), mask=rank < K)
    return sent, tl.sum(tl.where(same, slots[None, :], 0), 1)


@triton.jit
def _take(
    answer, table, slots, taken, supplied, head, origin, target, tags, guess_ring, progress, stamp, seen, since,
    K: tl.constexpr, K_PAD: tl.constexpr, N: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Where each expert is read and kept; bits for its word: 1 << 16 landed, 1 << 17 missed, 1 << 18 sent for."""
    rank = tl.arange(0, K_PAD)
    used = rank < K
    entry = tl.load(table + answer, mask=used & (answer >= 0), other=0, volatile=True)
    # Several threads hold each entry, and the table may change between their loads: one of them says what was read.
    tl.store(origin + rank, entry, mask=used)
    if tags is not None:
        tl.store(seen + tl.arange(0, N), tl.load(tags + tl.arange(0, N), volatile=True))
    tl.debug_barrier()
    entry = tl.load(origin + rank, mask=used, other=0, volatile=True)
    missed = entry < 0
    told = tl.zeros_like(entry)
    place = tl.zeros_like(entry)
    if tags is not None:
        sent, place = _find(
            answer, missed, guess_ring, progress, stamp, seen, since, K, K_PAD, N, PROGRAMS
        )  # fmt: skip
        missed = missed & (sent == 0)
        told = sent.to(tl.int64) << 18
    before = tl.sum(((rank[None, :] < rank[:, None]) & missed[None, :]).to(tl.int32), 1)  # misses of lower rank
    landed = missed & (taken + before < supplied)
    slot = tl.sum(tl.where(rank[None, :] == before[:, None], slots[None, :], 0), 1)
    tl.store(target + rank, tl.where(landed, slot, place), mask=used)
    tl.store(head, taken + tl.sum(landed.to(tl.int64), 0))
    return told | (landed.to(tl.int64) << 16) | (missed.to(tl.int64) << 17)


@triton.jit
def _route(
    logits, experts, gates, positions, mailbox, stamp, forced, table, ring, tail, head, origin, target,
    tags, guess_ring, guess_tail, sighted, progress, looked, seen, since,
    E: tl.constexpr, K: tl.constexpr, E_PAD: tl.constexpr, K_PAD: tl.constexpr, RENORMALISE: tl.constexpr,
    RING: tl.constexpr, N: tl.constexpr, PROGRAMS: tl.constexpr, OVERLAP: tl.constexpr,
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
    supplied, taken, slots = 0, 0, 0
    if table is not None:  # while the scores are on their way; whoever has seen the tail sees all that came before it
        supplied = tl.atomic_add(tail, 0, sem="acquire", scope="sys")
        taken = tl.load(head)
        slots = tl.load(ring + (taken + rank) % RING, volatile=True)  # of the tickets to come; valid up to `supplied`
    if tags is not None:
        tl.store(sighted, tl.atomic_add(guess_tail, 0, sem="acquire", scope="sys"))
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
    told = answer.to(tl.int64) & 0xFFFFFFFF
    if table is not None:
        told |= _take(
            answer, table, slots, taken, supplied, head, origin, target, tags, guess_ring, progress, stamp, seen,
            since, K, K_PAD, N, PROGRAMS,
        )  # fmt: skip
    if tags is not None:  # whoever fetches for this layer stops: the link is for what is missing now
        tl.store(looked, tl.load(stamp))
    if mailbox is not None:  # first of all, and past the caches: the host is waiting
        word = (tl.load(stamp) << 32) | told
        tl.store(mailbox + row * K + rank, word, mask=used, cache_modifier=".wt")
    tl.store(experts + row * K + rank, answer, mask=used)
    gate = tl.sum(tl.where(expert[None, :] == chosen[:, None], chance[None, :], 0.0), 1)
    if RENORMALISE:
        gate = gate / tl.sum(tl.where(used, gate, 0.0), 0)
    tl.store(gates + row * K + rank, tl.where(real, gate, 0.0), mask=used)


MOST_EXPERTS = 1024  # model/gpu/limits.py says so to people; a word with tickets has 16 bits for them


@dataclass(frozen=True, slots=True)
class Guessed:
    """What was sent for before the layer's router looks, and where it says so; all int64 on the device.

    words: see `fetch.Fetched`. ring, tail: slots for guesses, as `Tickets` has them. sighted [1] receives how many had
    been supplied when the router looked: so many may be taken by who comes after it. seen [N] is scratch; since [k]
    receives addresses of progress, 0 where nothing was sent for.
    """

    words: Fetched
    ring: Tensor
    tail: Tensor
    sighted: Tensor
    seen: Tensor
    since: Tensor


@dataclass(frozen=True, slots=True)
class Tickets:
    """What the router of one row needs to take slots; all int64 on the device.

    table [E]: where each expert's block begins, < 0 in pinned memory. ring [a power of two]: slots that may be taken,
    the n-th at n % len; tail [1]: how many were ever supplied; head [1]: how many were taken, written by this kernel
    alone. origin [k] and target [k] receive what `experts.Reads` says.
    """

    table: Tensor
    ring: Tensor
    tail: Tensor
    head: Tensor
    origin: Tensor
    target: Tensor
    guessed: Guessed | None = None


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
    tickets: Tickets | None = None,
) -> None:
    """logits: [R, E] fp32 → experts [R, k] int32 and gates [R, k] fp32, the likeliest first, ties by index.

    At position -1 (positions: [R]) experts are -1 and gates 0. mailbox: [R · k] int64 in pinned memory; a word is
    stamp << 32 | expert, with stamp [1] int64 on the device, and 0xFFFFFFFF for no expert. forced: [R, k] int32; an
    element that is not negative takes the place of the router's choice of that rank, with its own probability.
    tickets: for one row; its words have bit 16 set where the expert is kept (it took the next ticket, by rank),
    bit 17 where it is read from pinned memory, and bit 18 where it was sent for, and a part of it may be here.
    """
    rows, count = logits.shape
    assert experts.shape == (rows, top_k) and gates.shape == (rows, top_k), "k experts and gates per row"
    assert logits.is_contiguous() and experts.is_contiguous() and gates.is_contiguous(), "rows follow each other"
    assert (mailbox is None) == (stamp is None), "words in a mailbox carry a stamp"
    assert forced is None or forced.is_contiguous(), "rows follow each other"
    assert tickets is None or rows == 1, "tickets are taken by one row, one after the other"
    assert count <= MOST_EXPERTS, f"{count} experts: the kernel compares each with each"
    t = tickets
    taking = (None,) * 6 if t is None else (t.table, t.ring, t.tail, t.head, t.origin, t.target)
    g = None if t is None else t.guessed
    assert g is None or stamp is not None, "what was sent for carries a stamp"
    finding = (None,) * 8 if g is None else (
        g.words.tags, g.ring, g.tail, g.sighted, g.words.progress, g.words.looked, g.seen, g.since
    )  # fmt: skip
    overlap = overlapped(logits)
    _route[(rows,)](
        logits, experts, gates, positions, mailbox, stamp, forced, *taking, *finding,
        E=count, K=top_k, E_PAD=triton.next_power_of_2(count), K_PAD=triton.next_power_of_2(top_k),
        RENORMALISE=renormalise, RING=0 if t is None else len(t.ring), N=GUESSES, PROGRAMS=PROGRAMS, OVERLAP=overlap,
        num_warps=4, launch_pdl=overlap,
    )  # fmt: skip
