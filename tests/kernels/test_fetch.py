"""Blocks that are sent for before their layer looks: who takes slots, what is copied, and that no bit depends on it."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from steerpipe.core.blocks import GUESSES
from steerpipe.kernels.experts import Reads, expert_row
from steerpipe.kernels.experts_keep import _told
from steerpipe.kernels.experts_launch import row_constants
from steerpipe.kernels.fetch import CHUNK_BYTES, PROGRAMS, WIDE_CHUNK_BYTES, Fetched, _copy_share, chunk_for, fetch
from steerpipe.kernels.foretell import LEAST_PROBABILITY, SURE, Sending, foretell
from steerpipe.kernels.router import Guessed, Tickets, route
from steerpipe.model.gpu.mailbox import Mailbox
from steerpipe.store.formats import ExpertFormat
from steerpipe.store.layout import plan_block
from tests.kernels.expert_slots import fill_slots, poisoned

PINNED = -(1 << 63)
STAMP = 7
MARGIN = 16 << 10  # rows that one program reads together: all of them from pinned memory if one has not come
EXPERTS, RING = 12, 8
ROUND_BYTES = PROGRAMS * CHUNK_BYTES


def words(count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.int64)


@dataclass
class Layer:
    """What a tap, a router and `fetch` share, over blocks of `size` random bytes and as many slots."""

    size: int
    blocks: Tensor = field(init=False)
    slots: Tensor = field(init=False)
    shared: Fetched = field(init=False)
    ring: Tensor = field(init=False)
    mail: Mailbox = field(init=False)

    def __post_init__(self) -> None:
        self.blocks = torch.randint(0, 256, (EXPERTS, self.size), dtype=torch.uint8)
        self.slots = torch.full((RING, self.size), 0x55, dtype=torch.uint8)
        places = torch.tensor([block.data_ptr() | PINNED for block in self.blocks])
        self.shared = Fetched(torch.full((GUESSES,), -1), words(GUESSES * PROGRAMS), words(1), places)
        self.ring = torch.tensor([slot.data_ptr() for slot in self.slots])
        self.mail = Mailbox(1, GUESSES, pinned=False)

    def tag(self, number: int, place: int, expert: int, stamp: int = STAMP) -> None:
        self.shared.tags[number] = stamp << 32 | place << 16 | expert

    def fetch(self, chunk_bytes: int = CHUNK_BYTES) -> list[tuple[int, float]]:
        fetch(
            self.shared, ring=self.ring, stamp=torch.tensor([STAMP]), size_bytes=self.size, chunk_bytes=chunk_bytes,
            arrived=words(1), mail=self.mail.words[0], running=torch.zeros(1, dtype=torch.int32),
        )  # fmt: skip
        return [(each.expert, each.share) for each in self.mail.take_sent(0, STAMP, lambda: True)]


@pytest.mark.parametrize("chunk", [CHUNK_BYTES, WIDE_CHUNK_BYTES])
@pytest.mark.parametrize("size", [4096, ROUND_BYTES, ROUND_BYTES * 2 + CHUNK_BYTES + 48])
def test_what_is_tagged_comes_whole_and_nothing_else_is_written(size: int, chunk: int) -> None:
    layer, rounds = Layer(size), -(-size // (PROGRAMS * chunk))
    layer.tag(0, 5, 3)
    layer.tag(1, 2, 11)
    assert layer.fetch(chunk) == [(3, 1.0), (11, 1.0)]
    assert torch.equal(layer.slots[5], layer.blocks[3]) and torch.equal(layer.slots[2], layer.blocks[11])
    assert (layer.slots[[0, 1, 3, 4, 6, 7]] == 0x55).all()
    assert layer.shared.progress.tolist() == [STAMP << 32 | 1 << 31 | rounds] * (GUESSES * PROGRAMS)


def test_tags_of_another_step_are_nobodys() -> None:
    layer = Layer(4096)
    layer.tag(0, 5, 3, stamp=STAMP - 1)
    layer.tag(1, 2, 11)
    assert layer.fetch() == [(11, 1.0)]
    assert (layer.slots[5] == 0x55).all()


def test_nothing_begins_when_the_router_has_looked() -> None:
    layer = Layer(4096)
    layer.tag(0, 5, 3)
    layer.shared.looked[0] = STAMP
    assert layer.fetch() == [(3, 0.0)], "it took a ticket all the same"
    assert (layer.slots == 0x55).all() and not layer.shared.progress.any()


@triton.jit
def one_share(places, progress, looked, stamp, SIZE: tl.constexpr, ROUNDS: tl.constexpr, CHUNK: tl.constexpr):  # noqa: N803
    _copy_share(tl.load(places), tl.load(places + 1), progress, looked, tl.load(stamp), SIZE, ROUNDS, 64, CHUNK)


def test_who_is_stopped_says_what_came_and_that_it_has_ended() -> None:
    """The router looks while the first chunks are on their way."""
    size = 3 * ROUND_BYTES
    block, slot = torch.randint(0, 256, (size,), dtype=torch.uint8), torch.full((size,), 0x55, dtype=torch.uint8)
    progress, looked = words(PROGRAMS), torch.tensor([STAMP])
    places = torch.tensor([block.data_ptr(), slot.data_ptr()])  # a number of its own may be one of 32 bits
    one_share[(PROGRAMS,)](places, progress, looked, looked, SIZE=size, ROUNDS=3, CHUNK=CHUNK_BYTES)
    assert progress.tolist() == [STAMP << 32 | 1 << 31 | 1] * PROGRAMS
    assert torch.equal(slot[:ROUND_BYTES], block[:ROUND_BYTES]) and (slot[ROUND_BYTES:] == 0x55).all()


@triton.jit
def four_parts(progress, now, chunks, found, PROGRAMS: tl.constexpr):  # noqa: N803
    chunk = tl.load(chunks + tl.arange(0, 8)).reshape(4, 2)
    tl.store(found, _told(progress.to(tl.int64), now, chunk, chunk >= 0, PROGRAMS))


def test_a_chunk_on_its_way_is_told_from_one_that_came_and_one_that_will_not() -> None:
    going, ended, other = STAMP << 32, STAMP << 32 | 1 << 31, (STAMP - 1) << 32
    progress = torch.tensor([going | 2, ended | 2, other | 9, 0] + [ended | 1] * (PROGRAMS - 4))
    came, coming, cut, far, silent = 0, 2 * PROGRAMS, 2 * PROGRAMS + 1, 3 * PROGRAMS, 2

    def told(*parts: tuple[int, int]) -> int:
        found = words(1)
        four_parts[(1,)](progress, STAMP, torch.tensor(parts), found, PROGRAMS)
        return int(found[0])

    assert told((came, 5), (coming, came), (cut, came), (silent, -1)) == 0b0001 | 0b0010 << 4
    assert told((far, -1), (came, -1), (5, came), (3, 3)) == 0b0110
    progress[0] = 0  # nothing was ever said: nobody is awaited, whatever the stamp
    assert told((came, -1), (-1, -1), (5, -1), (5, -1)) == 0b1110


def send(
    likely: list[tuple[int, float]], absent: set[int], head: int, sighted: int, position: int = 4, most: int = GUESSES
) -> list[int]:  # fmt: skip
    """Tags behind a tap that names these experts; -1 where there is none."""
    table = torch.tensor([each | PINNED if each in absent else 9000 + each for each in range(1, EXPERTS + 1)])
    tags, heads = torch.full((GUESSES,), -1), torch.tensor([head])
    forced = torch.zeros(8, dtype=torch.int32)
    for rank, (expert, chance) in enumerate(likely):
        forced[rank] = round(chance * SURE) << 16 | expert
    foretell(
        torch.zeros(1, EXPERTS), None, top_k=2, renormalise=True, scale=torch.ones(1), bias=torch.zeros(1),
        positions=torch.tensor([position]), stamp=torch.tensor([STAMP]), words=words(8), forced=forced,
        sending=Sending(table, torch.arange(RING), torch.tensor([sighted]), heads, tags, words(8), most=most),
    )  # fmt: skip
    assert int(heads[0]) == head + int((tags >= 0).sum())
    return [int(tag) for tag in tags]


@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.integers(0, EXPERTS - 1), st.sampled_from([0.0, 0.1, 0.5, 1.0])), max_size=8),
    st.sets(st.integers(1, EXPERTS)), st.integers(0, 20), st.integers(0, 4), st.integers(1, GUESSES),
)  # fmt: skip
@example([(3, 1.0), (3, 1.0), (4, 0.5)], {4, 5}, 2, 4, GUESSES)
@example([(3, 1.0), (4, 0.5)], {4, 5}, 2, 1, GUESSES)
@example([(3, 1.0), (4, 0.5)], {4, 5}, 2, 4, 1)
def test_likely_absent_experts_take_the_next_tickets_that_a_router_has_seen(
    likely: list[tuple[int, float]], absent: set[int], head: int, supplied: int, most: int
) -> None:
    named: list[int] = []
    for rank, (expert, chance) in enumerate(likely):
        first = expert not in [each for each, _ in likely[:rank]]
        if first and chance >= LEAST_PROBABILITY and expert + 1 in absent:
            named.append(expert)
    sent = named[: min(most, supplied)]
    tags = [STAMP << 32 | (head + at) % RING << 16 | expert for at, expert in enumerate(sent)]
    assert send(likely, absent, head, head + supplied, most=most) == tags + [-1] * (GUESSES - len(sent))


def test_a_row_without_a_position_sends_for_nobody() -> None:
    assert send([(3, 1.0)], set(range(1, 13)), 0, 4, position=-1) == [-1] * GUESSES


@settings(max_examples=25)
@given(
    chosen=st.lists(st.integers(0, EXPERTS - 1), unique=True, min_size=1, max_size=5),
    absent=st.sets(st.integers(0, EXPERTS - 1)), supply=st.integers(0, 3),
    sent=st.lists(st.integers(0, EXPERTS - 1), unique=True, max_size=GUESSES),
    stamp=st.sampled_from([STAMP, STAMP - 1]),
)  # fmt: skip
@example(chosen=[1, 2, 3], absent={1, 2}, supply=2, sent=[2], stamp=STAMP)
def test_what_was_sent_for_is_kept_where_it_goes_and_takes_no_ticket(
    chosen: list[int], absent: set[int], supply: int, sent: list[int], stamp: int
) -> None:
    table = torch.tensor([(500 + each) | PINNED if each in absent else 9000 + each for each in range(EXPERTS)])
    layer = Layer(64)
    for number, expert in enumerate(sent):
        layer.tag(number, 3 + number, expert, stamp)
    since, sighted = torch.full((len(chosen),), 77), words(1)
    guessed = Guessed(layer.shared, layer.ring, torch.tensor([6]), sighted, words(GUESSES), since)
    tickets = Tickets(
        table,
        1000 + torch.arange(RING),
        torch.tensor([supply]),
        words(1),
        words(len(chosen)),
        words(len(chosen)),
        guessed,
    )
    logits = torch.zeros(1, EXPERTS)
    for rank, expert in enumerate(chosen):
        logits[0, expert] = 10.0 - rank
    mailbox = Mailbox(1, len(chosen), pinned=False)
    route(
        logits, top_k=len(chosen), renormalise=True, experts=torch.zeros(1, len(chosen), dtype=torch.int32),
        gates=torch.zeros(1, len(chosen)), positions=torch.tensor([3]), mailbox=mailbox.words[0],
        stamp=torch.tensor([STAMP]), tickets=tickets,
    )  # fmt: skip
    live = sent if stamp == STAMP else []
    found = [expert for expert in chosen if expert in absent and expert in live]
    missed = [expert for expert in chosen if expert in absent and expert not in live]
    landed = missed[:supply]
    reads = mailbox.take_reads(0, STAMP, lambda: False)
    assert (reads.routed, reads.missed, reads.landed, reads.sent) == (chosen, missed, landed, found)
    place = {each: 1000 + at for at, each in enumerate(landed)}
    place |= {each: int(layer.ring[3 + sent.index(each)]) for each in found}
    assert tickets.target.tolist() == [place.get(expert, 0) for expert in chosen]
    rows = {each: layer.shared.progress.data_ptr() + 8 * PROGRAMS * sent.index(each) for each in found}
    assert since.tolist() == [rows.get(expert, 0) for expert in chosen]
    assert (int(sighted[0]), int(layer.shared.looked[0])) == (6, STAMP)


def test_blocks_of_a_few_megabytes_come_in_wide_chunks() -> None:
    """Qwen1.5-MoE's are 4.6 MB in int4; what was slower with them, or was not measured, has narrow ones."""
    chunks = {kind: chunk_for(plan_block(ExpertFormat(kind), 2048, 1408).form) for kind in ("int4", "int8", "bfloat16")}
    assert chunks == {"int4": WIDE_CHUNK_BYTES, "int8": CHUNK_BYTES, "bfloat16": CHUNK_BYTES}
    assert chunk_for(plan_block(ExpertFormat.INT4, 192, 96).form) == CHUNK_BYTES


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Blocks of any size come in wide chunks."""
    monkeypatch.setattr("steerpipe.kernels.fetch._WIDE", range(1 << 30))
    row_constants.cache_clear()
    yield
    row_constants.cache_clear()


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize("state", ["some are behind", "the end is missing"])
def test_bits_do_not_depend_on_how_much_has_come_in_wide_chunks(state: str) -> None:
    test_bits_do_not_depend_on_how_much_of_a_block_has_come("int4", state)


def rounds_of(state: str, size: int, chunk_bytes: int) -> list[int]:
    """How much each program of `fetch` says; 0: of another step."""
    rounds = -(-size // (PROGRAMS * chunk_bytes))
    if state == "nothing":
        return [0] * PROGRAMS
    said = [rounds] * PROGRAMS
    if state == "the end is missing":  # of int8 and int4 these are scales
        said[(size - 1) // chunk_bytes % PROGRAMS] = rounds - 1
    elif state == "scales of up are missing":
        said[44] = 0  # of int4 below: all scales of gate have come
    elif state == "some are behind":
        for number in (5, 22, 23, 49):
            said[number] = number % rounds
    return said


@pytest.mark.parametrize(
    ("kind", "state"),
    [pytest.param("float32", "some are behind", marks=pytest.mark.slow), ("bfloat16", "some are behind"),
     ("bfloat16", "all"), ("int8", "nothing"), ("int8", "the end is missing"), ("int4", "some are behind"),
     ("int4", "scales of up are missing"), pytest.param("int4", "the end is missing", marks=pytest.mark.slow)],
)  # fmt: skip
def test_bits_do_not_depend_on_how_much_of_a_block_has_come(kind: str, state: str) -> None:
    """Where it has come, pinned memory is not read any more, and what had not come is kept."""
    hidden, width = (384, 448) if kind == "int4" else (256, 512) if kind == "int8" else (256, 192)
    slots = fill_slots(kind, hidden, width, 3)
    size = slots.blocks[0].numel()
    x, experts = torch.randn(1, hidden), torch.tensor([2, 0], dtype=torch.int32)
    act, wanted = poisoned(2, width, dtype=x.dtype), poisoned(2, hidden)
    expert_row(x, experts, slots.table, slots.form, act=act, part=wanted)
    chunk_bytes = chunk_for(slots.form)
    said = rounds_of(state, size, chunk_bytes)
    come = [said[chunk % PROGRAMS] > chunk // PROGRAMS for chunk in range(-(-size // chunk_bytes))]
    whole, far = slots.blocks[2].clone(), slots.blocks[2].clone()
    near = torch.full_like(whole, 0x55)
    for chunk, here in enumerate(come):
        own = slice(chunk * chunk_bytes, (chunk + 1) * chunk_bytes)
        if here:
            near[own] = whole[own]
        if all(come[max(0, chunk - MARGIN // chunk_bytes) : chunk + MARGIN // chunk_bytes + 1]):
            far[own] = 0x7F
    progress = torch.tensor([STAMP << 32 | 1 << 31 | each if each else (STAMP - 1) << 32 | 9 for each in said])
    reads = Reads(
        torch.tensor([far.data_ptr() | PINNED, int(slots.table[0])]), torch.tensor([near.data_ptr(), 0]),
        torch.tensor([progress.data_ptr(), 0]), torch.tensor([STAMP]),
    )  # fmt: skip
    part = poisoned(2, hidden)
    expert_row(x, experts, slots.table, slots.form, act=act, part=part, reads=reads)
    assert torch.equal(part, wanted)
    for each in plan_block(ExpertFormat(kind), hidden, width).parts:
        own = slice(each.offset, each.offset + each.size_bytes)
        assert torch.equal(near[own], whole[own]), each.name
