"""KV blocks: shared by reference, copied on write, never leaked, never over capacity."""

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule

from steerpipe.core.errors import CapacityError
from steerpipe.model.kv_cache import BLOCK, KvPool, KvSequence
from steerpipe.model.spec import AttentionSpec, DenseMlpSpec, LayerSpec, ModelSpec, RopeKind, RopeSpec

LAYERS = (AttentionSpec(4, 2, 4), AttentionSpec(3, 1, 6))  # of unlike shapes
SPEC = ModelSpec(
    family="mixtral", vocab=8, hidden=8, layers=tuple(LayerSpec(attention, DenseMlpSpec(8)) for attention in LAYERS),
    norm_eps=1e-6, rope=RopeSpec(RopeKind.DEFAULT, 1e4, 4), tied_embeddings=False, max_context=4096,
    stored_dtype="float32",
)  # fmt: skip


def pool_of(blocks: int) -> KvPool:
    return KvPool(SPEC, torch.float32, torch.device("cpu"), blocks)


def write(kv: KvSequence, start: int, marks: list[float]) -> None:
    """Position start + i holds marks[i] in every key and minus that in every value, in all layers."""
    end = start + len(marks)
    for cell in range(start - start % 16, end, 16):  # as prefill does: by cells, which never straddle blocks
        low, high = max(cell, start), min(cell + 16, end)
        part = torch.tensor(marks[low - start : high - start])
        for layer, attention in enumerate(LAYERS):
            keys = part[:, None, None].expand(-1, attention.kv_heads, attention.head_dim)
            kv.write(layer, low, keys, -keys)


def extend(kv: KvSequence, marks: list[float]) -> None:
    start = kv.length
    kv.append(len(marks))
    write(kv, start, marks)


def marks_of(kv: KvSequence) -> list[float]:
    """What `write` wrote, read back; checks that all layers, heads and dimensions say the same."""
    if kv.length == 0:
        return []
    found = []
    for layer in range(len(LAYERS)):
        blocks = list(kv.read(layer, 0, kv.length - 1))
        assert [start for start, _, _ in blocks] == [i * BLOCK for i in range(len(blocks))]
        keys = torch.cat([keys for _, keys, _ in blocks], dim=1)[:, : kv.length]
        values = torch.cat([values for _, _, values in blocks], dim=1)[:, : kv.length]
        assert torch.equal(keys, -values)
        assert (keys == keys[:1, :, :1]).all()
        found.append(keys[0, :, 0].tolist())
    assert found[0] == found[1]
    return found[0]


def numbered(count: int, first: int = 0) -> list[float]:
    return [float(first + i) for i in range(count)]


def test_what_is_written_is_read_back_across_blocks() -> None:
    kv = pool_of(3).sequence()
    extend(kv, numbered(100))
    extend(kv, numbered(200, 100))
    assert marks_of(kv) == numbered(300)


def test_a_read_gives_only_the_blocks_that_hold_the_positions() -> None:
    kv = pool_of(4).sequence()
    extend(kv, numbered(500))
    assert [start for start, _, _ in kv.read(0, 127, 128)] == [0, 128]
    assert [start for start, _, _ in kv.read(0, 128, 255)] == [128]
    assert [start for start, _, _ in kv.read(1, 300, 499)] == [256, 384]


def test_a_block_is_taken_with_its_first_position_and_given_back_with_its_last() -> None:
    pool = pool_of(3)
    kv = pool.sequence()
    held = []
    for step in (0, 128, 1, 127, 1):
        kv.append(step)
        held.append(pool.live_blocks)
    for length in (257, 256, 129, 128, 1, 0):
        kv.truncate(length)
        held.append(pool.live_blocks)
    assert held == [0, 1, 2, 2, 3, 3, 2, 2, 1, 1, 0]
    assert pool.capacity_blocks - pool.live_blocks == 3


def test_a_fork_shares_blocks_until_one_side_writes() -> None:
    pool = pool_of(4)
    kv = pool.sequence()
    extend(kv, numbered(200))
    fork = kv.fork(150)
    assert pool.live_blocks == 2
    extend(fork, numbered(3, 1000))
    assert pool.live_blocks == 3, "only the block that is written into was copied"
    assert marks_of(kv) == numbered(200)
    assert marks_of(fork) == numbered(150) + numbered(3, 1000)
    extend(kv, numbered(2, 2000))
    assert pool.live_blocks == 3, "the other side is alone now and copies nothing"
    assert marks_of(fork) == numbered(150) + numbered(3, 1000)


def test_a_fork_at_a_block_s_edge_never_copies() -> None:
    pool = pool_of(3)
    kv = pool.sequence()
    extend(kv, numbered(200))
    fork = kv.fork(128)
    extend(fork, numbered(5, 500))
    assert pool.live_blocks == 3
    assert marks_of(kv) == numbered(200) and marks_of(fork) == numbered(128) + numbered(5, 500)


def test_an_append_that_does_not_fit_changes_nothing() -> None:
    pool = pool_of(3)
    kv, other = pool.sequence(), pool.sequence()
    extend(kv, numbered(100))
    extend(other, numbered(10, 50))
    with pytest.raises(CapacityError, match=r"all 3 KV blocks \(384 tokens\) are in use") as caught:
        kv.append(300)
    assert "raise kv_memory" in caught.value.fix
    assert kv.length == 100 and marks_of(kv) == numbered(100) and pool.live_blocks == 2
    extend(kv, numbered(156, 100))
    assert marks_of(kv) == numbered(256)


def test_a_copy_on_write_that_does_not_fit_changes_nothing() -> None:
    pool = pool_of(1)
    kv = pool.sequence()
    extend(kv, numbered(10))
    fork = kv.fork()
    with pytest.raises(CapacityError):
        fork.append(1)
    assert fork.length == 10 and marks_of(fork) == numbered(10) and marks_of(kv) == numbered(10)
    kv.free()
    extend(fork, numbered(1, 10))
    assert marks_of(fork) == numbered(11)


def test_a_block_that_is_used_again_holds_zeros() -> None:
    """A masked key has probability 0, and 0 times a stale infinity would not be 0."""
    pool = pool_of(1)
    kv = pool.sequence()
    extend(kv, [float("inf")] * 20)
    kv.free()
    kv.append(1)
    for layer in range(2):
        for _, keys, values in kv.read(layer, 0, 0):
            assert not keys.any() and not values.any()


def test_a_write_into_a_shared_block_is_refused() -> None:
    kv = pool_of(2).sequence()
    extend(kv, numbered(10))
    fork = kv.fork()
    with pytest.raises(AssertionError, match="a write into a shared KV block"):
        write(fork, 3, [1.0])


def test_a_write_across_two_blocks_is_refused() -> None:
    kv = pool_of(2).sequence()
    kv.append(140)
    rows = torch.zeros(2, 2, 4)
    with pytest.raises(AssertionError, match="a write straddles two KV blocks"):
        kv.write(0, 127, rows, rows)


def test_freeing_a_block_twice_is_noticed() -> None:
    pool = pool_of(1)
    block = pool.take()
    pool.drop(block)
    with pytest.raises(AssertionError, match="a KV block was freed twice"):
        pool.drop(block)


def test_a_freed_sequence_is_empty_and_can_be_used_again() -> None:
    pool = pool_of(1)
    kv = pool.sequence()
    extend(kv, numbered(9))
    kv.free()
    kv.free()
    assert kv.length == 0 and pool.live_blocks == 0
    extend(kv, numbered(4, 7))
    assert marks_of(kv) == numbered(4, 7)


@pytest.mark.parametrize("length", [-1, 11])
def test_a_length_that_was_never_there_is_refused(length: int) -> None:
    kv = pool_of(1).sequence()
    kv.append(10)
    with pytest.raises(AssertionError, match="cannot truncate 10"):
        kv.truncate(length)
    with pytest.raises(AssertionError, match=f"cannot fork {length} of 10"):
        kv.fork(length)


def test_a_block_has_the_bytes_that_it_says() -> None:
    pool = pool_of(1)
    assert pool.block_bytes == sum(layer.nbytes for layer in pool.take().layers) == 2 * BLOCK * (2 * 4 + 1 * 6) * 4


class KvMachine(RuleBasedStateMachine):
    """Any number of sequences against plain lists; seven blocks, so that they run out."""

    sequences: Bundle[KvSequence] = Bundle("sequences")
    counts = st.one_of(st.integers(1, 20), st.integers(1, 300))

    def __init__(self) -> None:
        super().__init__()
        self.pool = pool_of(7)
        self.model: dict[int, list[float]] = {}
        self.alive: list[KvSequence] = []
        self.next_mark = 1

    def track(self, kv: KvSequence, marks: list[float]) -> KvSequence:
        self.alive.append(kv)
        self.model[id(kv)] = marks
        return kv

    @rule(target=sequences)
    def create(self) -> KvSequence:
        return self.track(self.pool.sequence(), [])

    @rule(kv=sequences, count=counts)
    def extend(self, kv: KvSequence, count: int) -> None:
        marks = numbered(count, self.next_mark)
        self.next_mark += count
        held = self.pool.live_blocks
        try:
            extend(kv, marks)
        except CapacityError:
            assert self.pool.live_blocks == held
        else:
            self.model[id(kv)] = self.model[id(kv)] + marks

    @rule(kv=sequences, share=st.floats(0, 1))
    def truncate(self, kv: KvSequence, share: float) -> None:
        length = round(kv.length * share)
        kv.truncate(length)
        self.model[id(kv)] = self.model[id(kv)][:length]

    @rule(kv=sequences)
    def truncate_to_a_block_s_edge(self, kv: KvSequence) -> None:
        length = kv.length // BLOCK * BLOCK
        kv.truncate(length)
        self.model[id(kv)] = self.model[id(kv)][:length]

    @rule(target=sequences, kv=sequences, share=st.floats(0, 1), whole=st.booleans())
    def fork(self, kv: KvSequence, share: float, whole: bool) -> object:
        if len(self.alive) > 8:
            return multiple()
        length = None if whole else round(kv.length * share)
        return self.track(kv.fork(length), self.model[id(kv)][:length])

    @rule(kv=sequences)
    def free(self, kv: KvSequence) -> None:
        kv.free()
        self.model[id(kv)] = []

    @invariant()
    def every_sequence_holds_what_was_written(self) -> None:
        for kv in self.alive:
            assert kv.length == len(self.model[id(kv)])
            assert marks_of(kv) == self.model[id(kv)]

    @invariant()
    def live_blocks_are_those_that_somebody_holds(self) -> None:
        held = [block for kv in self.alive for block in kv._blocks]
        assert len({id(block) for block in held}) == self.pool.live_blocks <= self.pool.capacity_blocks
        for block in held:
            assert block.holders == sum(block is other for other in held)

    def teardown(self) -> None:
        for kv in self.alive:
            kv.free()
        assert self.pool.live_blocks == 0


TestKvMachine = KvMachine.TestCase
TestKvMachine.settings = settings(max_examples=60, stateful_step_count=25)
