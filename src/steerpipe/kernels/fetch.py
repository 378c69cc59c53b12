"""Blocks that may be wanted, read from pinned memory into lent slots while the link is idle: as much as comes.

`foretell` has taken tickets for experts of the next layer and left a tag for each; the programs of `fetch` share one
block after the other, chunk by chunk, and stop when that layer's router has looked. Whoever wants a block then reads
what has come from its slot, waits for a chunk that is on its way, and reads the rest from pinned memory
(experts_row.py). A word of progress carries its step's stamp, so one of an earlier step counts for nothing.
Legend: N guesses, G programs, E experts.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from steerpipe.core.blocks import GUESSES, BlockForm

PROGRAMS = 64
WARPS = 8
MULTIPROCESSORS = 1024  # no device has more
CHUNK_BYTES = 4096  # of one program; all of them together keep more under way than the link's latency times its rate
WIDE_CHUNK_BYTES = 2 * CHUNK_BYTES
_WIDE = range(2 << 20, 6 << 20)  # bytes of weights: blocks of which a few rounds come (of larger ones: slower)
_BITS = {"int4": 4, "int8": 8, "float16": 16, "bfloat16": 16, "float32": 32}
WHOLE = (1 << 15) - 1  # a word of the mail: stamp << 32 | share that moved << 16 | expert
NOBODY = 0xFFFFFFFF


def chunk_for(form: BlockForm) -> int:
    """Bytes that a program copies at a time: of all blocks of that form, and for who reads them."""
    return WIDE_CHUNK_BYTES if 3 * form.hidden * form.width * _BITS[form.format] // 8 in _WIDE else CHUNK_BYTES


@triton.jit
def _multiprocessor():
    return tl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def give_way(running, reads):
    """Before anything is read from pinned memory, if `reads`: until `fetch`, which the router has stopped, has ended on
    this multiprocessor, or for some 100 us. Its last stores and words would wait behind those reads, and others wait
    for them. No bit depends on it.
    """
    if reads:
        place = running + _multiprocessor()
        looks = 0
        while (tl.atomic_add(place, 0, sem="relaxed") > 0) & (looks < 128):
            looks += 1


@triton.jit
def _copy_share(
    source, place, progress, looked, now,
    SIZE: tl.constexpr, ROUNDS: tl.constexpr, PROGRAMS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Every PROGRAMS-th chunk, from one's own on, until the router has looked. Progress counts rounds."""
    word = tl.arange(0, CHUNK // 4)
    origin = tl.multiple_of(source.to(tl.pointer_type(tl.int32)), 16)
    target = tl.multiple_of(place.to(tl.pointer_type(tl.int32)), 16)
    at = tl.program_id(0) * (CHUNK // 4)
    rounds = 0
    going = True
    while going:
        inside = at + word < SIZE // 4
        tl.store(target + at + word, tl.load(origin + at + word, inside), inside)
        at += PROGRAMS * (CHUNK // 4)
        rounds = tl.where(at < SIZE // 4, rounds + 1, ROUNDS)  # all end on the same count
        said = tl.atomic_add(looked, 0, sem="relaxed")  # one thread asks, so all of them go on or none
        going = (at < SIZE // 4) & (said < now)
        ended = tl.where(going, 0, 1).to(tl.int64) << 31
        tl.debug_barrier()
        tl.atomic_xchg(progress + tl.program_id(0), (now << 32) | ended | rounds, sem="release")


@triton.jit
def _fetch(
    tags, ring, pinned, looked, stamp, progress, arrived, mail, running,
    SIZE: tl.constexpr, ROUNDS: tl.constexpr, N: tl.constexpr, PROGRAMS: tl.constexpr, CHUNK: tl.constexpr,
    WHOLE: tl.constexpr, NOBODY: tl.constexpr, LATER: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    place = running
    if NATIVE:
        place += _multiprocessor()  # once: who is preempted may go on elsewhere
        tl.atomic_add(place, 1, sem="relaxed")
    now = tl.load(stamp) + LATER
    for number in range(N):
        tag = tl.load(tags + number)
        if (tag >> 32 == now) & (tl.atomic_add(looked, 0, sem="relaxed") < now):
            slot = tl.load(ring + ((tag >> 16) & 0xFFFF))
            source = tl.load(pinned + (tag & 0xFFFF)) & 0x7FFFFFFFFFFFFFFF
            _copy_share(
                source, slot, progress + number * PROGRAMS, looked, now, SIZE, ROUNDS, PROGRAMS, CHUNK
            )  # fmt: skip
    tl.debug_barrier()
    if NATIVE:
        tl.atomic_add(place, -1, sem="relaxed")
    if tl.atomic_add(arrived, 1, sem="acq_rel") % PROGRAMS == PROGRAMS - 1:  # the last one says how far all came
        for number in range(N):
            tag = tl.load(tags + number)
            words = tl.load(progress + number * PROGRAMS + tl.arange(0, PROGRAMS), volatile=True)
            moved = tl.sum(tl.where(words >> 32 == now, words & 0x7FFFFFFF, 0), 0) * WHOLE // (ROUNDS * PROGRAMS)
            told = tl.where(tag >> 32 == now, (moved << 16) | (tag & 0xFFFF), NOBODY)
            tl.store(mail + number, ((now - LATER) << 32) | told, cache_modifier=".wt")


@dataclass(frozen=True, slots=True)
class Fetched:
    """Words of one layer that a tap before it, its router and `fetch` share; all int64 on the device.

    tags [N]: stamp << 32 | place in the ring << 16 | expert. progress [N, G]: stamp << 32 | ended << 31 | rounds
    that are there.
    looked [1]: the stamp of the step in which the layer's router looked last. pinned [E]: where blocks lie; their sign
    bits are ignored.
    """

    tags: Tensor
    progress: Tensor
    looked: Tensor
    pinned: Tensor


@triton.jit
def _stop(looked, stamp):
    tl.store(looked, tl.load(stamp) + 1)


def stop(looked: Tensor, stamp: Tensor) -> None:
    """Whoever fetches for the first layer of the next step stops: this one ends."""
    _stop[(1,)](looked, stamp, num_warps=1)


def fetch(
    given: Fetched, *, ring: Tensor, stamp: Tensor, size_bytes: int, chunk_bytes: int, arrived: Tensor, mail: Tensor,
    running: Tensor, later: int = 0,
) -> None:  # fmt: skip
    """Copies the tagged experts' blocks into their slots, in order, until the router has looked.

    `chunk_bytes`: `chunk_for` their form. `later`: the tags are for so many steps after this one.

    ring: slots, as `Tickets` has them. arrived [1] int64 belongs to this layer. running: see `Reads`.
    mail [N] in pinned memory comes when nobody writes any more: per guess stamp << 32 | share that moved (of WHOLE) <<
    16 | expert, or stamp << 32 | NOBODY.
    """
    assert size_bytes % 16 == 0, f"a block of {size_bytes} bytes"
    _fetch[(PROGRAMS,)](
        given.tags, ring, given.pinned, given.looked, stamp, given.progress, arrived, mail, running,
        SIZE=size_bytes, ROUNDS=-(-size_bytes // (PROGRAMS * chunk_bytes)), N=GUESSES, PROGRAMS=PROGRAMS,
        CHUNK=chunk_bytes,
        WHOLE=WHOLE, NOBODY=NOBODY, LATER=later, NATIVE=stamp.is_cuda, num_warps=WARPS,
    )  # fmt: skip
