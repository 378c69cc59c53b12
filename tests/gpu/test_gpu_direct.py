"""One row that reads what is missing from pinned memory by itself: same bits, true tables, nobody waits."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from steerpipe.store.formats import ExpertFormat
from steerpipe.store.layout import plan_block
from steerpipe.transfer.cuda.source import CudaSource
from tests.support.running import Loaded
from tests.support.tiny import VOCAB, tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

if torch.cuda.is_available():  # importing kernels needs triton
    from steerpipe.kernels.experts import Reads, expert_row
    from steerpipe.kernels.router import Tickets, route
    from tests.kernels.expert_slots import fill_slots, poisoned
    from tests.support.gpu import load_gpu, pack_of

CUDA = torch.device("cuda")
PINNED = -(1 << 63)
FORMS = ("bfloat16", "int8", "int4")
BUDGETS = {"50 %": 36, "25 %": 18, "12.5 %": 9}  # slots, of 72 experts


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16", "int8", "int4"])
@pytest.mark.parametrize(("hidden", "width"), [(2048, 768), (2048, 1408), (320, 208), (1000, 72)])
def test_bits_do_not_depend_on_where_a_block_is_read_and_it_is_kept_whole(kind: str, hidden: int, width: int) -> None:
    slots = fill_slots(kind, hidden, width, 6, device="cuda", seed=hidden + width)
    layout = plan_block(ExpertFormat(kind), hidden, width)
    x = torch.randn(1, hidden, device=CUDA).bfloat16()
    experts = torch.tensor([5, 0, 3, -1, 2], dtype=torch.int32, device=CUDA)

    def run(reads: "Reads | None" = None) -> tuple[Tensor, Tensor]:
        act, part = poisoned(5, width, dtype=x.dtype, device="cuda"), poisoned(5, hidden, device="cuda")
        expert_row(x, experts, slots.table, slots.form, act=act, part=part, reads=reads)
        return act, part

    wanted = run()
    host = torch.stack([slots.blocks[expert] for expert in range(6)]).cpu().pin_memory()  # kernels see the same address
    kept = torch.full((2, layout.block_bytes), 0x55, dtype=torch.uint8, device=CUDA)
    far = [(host.data_ptr() + expert * layout.block_bytes) | PINNED for expert in (5, 0, 3)]
    origin = torch.tensor([*far, 0, int(slots.table[2])], device=CUDA)
    target = torch.tensor([kept[0].data_ptr(), 0, kept[1].data_ptr(), 0, 0], device=CUDA)
    slots.table.zero_()  # nobody looks there
    found = run(Reads(origin, target))
    live = [0, 1, 2, 4]
    assert torch.equal(found[0][live], wanted[0][live])
    assert torch.equal(found[1][live], wanted[1][live])
    assert found[1][3].isnan().all()
    for row, expert in ((0, 5), (1, 3)):
        written = torch.zeros(layout.block_bytes, dtype=torch.bool, device=CUDA)
        for part in layout.parts:
            own = slice(part.offset, part.offset + part.size_bytes)
            written[own] = True
            assert torch.equal(kept[row, own], slots.blocks[expert][own]), part.name
        assert (kept[row, ~written] == 0x55).all(), "something else was written"


@pytest.mark.parametrize("seed", range(8))
def test_the_nth_miss_takes_the_nth_ticket_while_there_are_some(seed: int) -> None:
    random = Random(seed)
    count, top_k = random.choice([(128, 8), (60, 4), (64, 8), (8, 2)])
    absent = set(random.sample(range(count), random.randint(0, count)))
    head, supply = random.randrange(200), random.choice([0, 1, 3, 32])
    ring = [0] * 64
    for ticket in range(head, head + supply):
        ring[ticket % 64] = 1000 + ticket
    table = [(500 + expert) | PINNED if expert in absent else 9000 + expert for expert in range(count)]
    words = (table, ring, [head + supply], [head], [77] * top_k, [77] * top_k)
    tickets = Tickets(*(torch.tensor(each, device=CUDA) for each in words))
    experts = torch.full((1, top_k), -7, dtype=torch.int32, device=CUDA)
    mailbox = torch.zeros(top_k, dtype=torch.int64, pin_memory=True)
    route(
        torch.randn(1, count, device=CUDA), top_k=top_k, renormalise=True, experts=experts,
        gates=poisoned(1, top_k, device="cuda"), positions=torch.zeros(1, dtype=torch.int64, device=CUDA),
        mailbox=mailbox, stamp=torch.tensor([9], device=CUDA), tickets=tickets,
    )  # fmt: skip
    torch.cuda.synchronize()
    chosen = experts[0].tolist()
    landed = [expert for expert in chosen if expert in absent][:supply]
    targets = [1000 + head + landed.index(expert) if expert in landed else 0 for expert in chosen]
    assert tickets.origin.tolist() == [table[expert] for expert in chosen]
    assert tickets.target.tolist() == targets
    assert tickets.head.tolist() == [head + len(landed)]
    said = [9 << 32 | expert | (expert in landed) << 16 | (expert in absent) << 17 for expert in chosen]
    assert mailbox.tolist() == said


@functools.cache
def model(form: str, family: str = "qwen3_moe") -> Loaded:
    own: dict[str, Any] = {"head_dim": 12} if family == "qwen3_moe" else {}
    pack = pack_of(tiny(family, num_experts=24, num_experts_per_tok=4, **own).folder, ExpertFormat(form))
    return load_gpu(pack, torch.bfloat16, CUDA)


@contextmanager
def opened(form: str, slots: int, family: str = "qwen3_moe", **named: Any) -> Iterator[CudaSource]:
    pack = model(form, family).experts.pack
    with CudaSource.open(pack, slots=slots, device=CUDA, pinned_bytes=1 << 30, **named) as source:
        yield source
        source.check_integrity()


def tokens(count: int, seed: int) -> list[int]:
    return Random(seed).choices(range(VOCAB), k=count)


def drive(loaded: Loaded, experts: Any) -> Tensor:
    """Prompts, one row and batches in turn: all logits, as bits."""
    use = replace(loaded, experts=experts)
    kvs = [loaded.pool.sequence()]
    logits = [use.prefill(tokens(41, 0), (21,), kvs[0]), use.one_row(tokens(48, 1), kvs[0])]
    kvs += [kvs[0].fork(length) for length in (40, 3, 16)]
    for step in range(4):
        logits.append(use.one_row(tokens(5, 50 + step), kvs[0]))
        logits.append(use.batch(kvs, tokens(len(kvs), 200 + step)))
        logits.append(use.prefill(tokens(9, 300 + step), (), kvs[1]))
        logits.append(use.one_row(tokens(3, 400 + step), kvs[2]))
    for kv in kvs:
        kv.free()
    return torch.cat(logits).cpu().view(torch.int32)


@functools.cache
def all_resident(form: str) -> Tensor:
    found = drive(model(form), model(form).experts)
    assert found.view(torch.float32).isfinite().all()
    return found


@pytest.mark.parametrize("budget", list(BUDGETS))
@pytest.mark.parametrize("form", FORMS)
def test_no_bit_depends_on_the_budget(form: str, budget: str) -> None:
    with opened(form, BUDGETS[budget], direct=True) as source:
        assert source.direct
        assert torch.equal(drive(model(form), source), all_resident(form))
        assert source.landing is not None and source.landing.taken > 10
        assert source.counters().misses and source.counters().evictions
    with opened(form, BUDGETS[budget], direct=False) as source:
        assert torch.equal(drive(model(form), source), all_resident(form))


@pytest.mark.parametrize("form", FORMS)
def test_a_shared_expert_on_its_own_branch_changes_no_bit(form: str) -> None:
    """Against single launches, one after the other: all resident, served, and read from pinned memory."""
    loaded = model(form, "qwen2_moe")
    loaded.decoder.graphs = False  # type: ignore[attr-defined]
    try:
        want = drive(loaded, loaded.experts)
    finally:
        loaded.decoder.graphs = True  # type: ignore[attr-defined]
    assert torch.equal(drive(loaded, loaded.experts), want)
    for direct in (True, False):
        with opened(form, BUDGETS["25 %"], "qwen2_moe", direct=direct) as source:
            assert torch.equal(drive(loaded, source), want)
            assert source.counters().misses


def test_many_short_steps_leave_a_true_table() -> None:
    """The host lags, entries are on their way when the next step looks."""
    loaded = model("int4")
    kv = loaded.pool.sequence()
    with opened("int4", 18, direct=True) as source:
        use = replace(loaded, experts=source)
        for turn in range(6):
            kv.truncate(0)
            use.one_row(tokens(60, turn), kv)
            source.check_integrity()
    kv.free()


def test_it_is_the_default_where_slots_are_not_few() -> None:
    with opened("int4", 36) as source:
        assert source.direct
    with opened("int4", 18) as source:
        assert not source.direct
    with opened("int4", 72) as source:
        assert source.resident and not source.direct


class Interrupted:
    """A landing whose `follow` is interrupted now and then, before or after its work."""

    def __init__(self, landing: Any) -> None:
        self._landing, self._calls, self.failures = landing, 0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._landing, name)

    def follow(self, layer: int, reads: Any, ticket: int) -> int:
        self._calls += 1
        fails = self._calls % 7 == 0
        if fails and self.failures % 2 == 0:
            self.failures += 1
            raise KeyboardInterrupt
        following: int = self._landing.follow(layer, reads, ticket)
        if fails:
            self.failures += 1
            raise KeyboardInterrupt
        return following


def test_an_interrupted_host_leaves_everything_true() -> None:
    loaded = model("int4")
    kv = loaded.pool.sequence()
    want = loaded.one_row(tokens(24, 5), kv)
    kv.truncate(0)
    with opened("int4", 18, direct=True) as source:
        failing = Interrupted(source.landing)
        source._landing = failing  # type: ignore[assignment]
        use = replace(loaded, experts=source)
        for step, token in enumerate(tokens(24, 5)):
            while True:
                try:
                    found = use.one_row([token], kv)
                    break
                except KeyboardInterrupt:
                    source.check_integrity()
                    kv.truncate(step)
            assert torch.equal(found[0], want[step]), f"step {step}"
        assert failing.failures >= 4
    kv.free()
