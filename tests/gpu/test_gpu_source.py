"""Leases and serving on a GPU: kernels read through the table what was packed, while copies go on beside them.

Blocks are made up and differ in every byte; slots are poisoned first. The computing stream is held back by kernels that
only take time, so that a copy that does not wait for its readers would be seen.
"""

import gc
from collections.abc import Callable, Collection, Sequence
from random import Random

import pytest
import torch
from torch import Tensor

from steerpipe.core.errors import TransferError
from steerpipe.core.ids import ExpertId
from steerpipe.transfer.cuda.backing import PinnedBacking
from steerpipe.transfer.cuda.pinned import PinnedArena
from steerpipe.transfer.cuda.ring import Ring
from steerpipe.transfer.cuda.source import CudaSource
from steerpipe.transfer.cuda.stream import CudaCopier
from steerpipe.transfer.faulty import ALWAYS, Faults, FaultyLink
from steerpipe.transfer.slabs import Slab
from tests.transfer.cuda.blocks import NAMES, made_up
from tests.transfer.packs import EXPERTS as PACKED
from tests.transfer.packs import LAYERS, tiny_pack

triton = pytest.importorskip("triton")
tl = triton.language

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

EXPERTS = 20  # of each of three layers
PAGES = 75  # of a block: an odd 300 KiB
POLLS = 3_000_000  # at most: some seconds, then a kernel gives up and the test fails
POISON = 0xA5


@triton.jit
def _wait_and_read(table, experts, out, gave_up, polls, SIZE: tl.constexpr, BLOCK: tl.constexpr):  # noqa: N803
    """One program per expert: waits for its entry, copies its block. What an expert kernel does, without arithmetic."""
    program = tl.program_id(0)
    expert = tl.load(experts + program)
    entry = tl.load(table + expert, volatile=True)
    polled = 0
    while (entry == 0) & (polled < polls):
        entry = tl.load(table + expert, volatile=True)
        polled += 1
    if entry == 0:
        tl.store(gave_up + program, 1)
    else:
        source = entry.to(tl.pointer_type(tl.uint8))
        for start in range(0, SIZE, BLOCK):
            places = start + tl.arange(0, BLOCK)
            inside = places < SIZE
            tl.store(out + program.to(tl.int64) * SIZE + places, tl.load(source + places, mask=inside), mask=inside)


class Rig:
    """A source of made-up blocks, and kernels that read them. Results are compared when the device has finished."""

    def __init__(self, seed: int, slots: int, in_ring: Collection[int] = ()) -> None:
        device = torch.device("cuda")
        self.layers = made_up(EXPERTS, dict.fromkeys(NAMES, PAGES))
        self.size = self.layers[NAMES[0]].block_bytes
        count = EXPERTS * len(NAMES)
        self.blocks = torch.randint(
            0, 256, (count, self.size), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
        )
        self.copier = CudaCopier(device)
        self.failing: set[int] = set()
        self.source = CudaSource(self.layers, self._backing(in_ring), slots=slots, device=device, copier=self.copier)
        memory = self.source._memory._blocks
        if not self.source.resident:
            memory[: slots * self.source._memory.slot_bytes].fill_(POISON)
        torch.cuda.synchronize()
        self.random = Random(seed)
        self._read: list[tuple[int, Tensor, Tensor]] = []  # number of the first expert of the layer, experts, bytes
        self._gave_up: list[Tensor] = []

    def _backing(self, in_ring: Collection[int]) -> PinnedBacking:
        numbers = [number for number in range(len(self.blocks)) if number not in in_ring]
        arena = PinnedArena(max(1, len(numbers)) * self.size, self.copier.driver)
        for position, number in enumerate(numbers):
            arena.tensor[position * self.size : (position + 1) * self.size] = self.blocks[number]
        arena.pin()
        if not in_ring:
            return PinnedBacking(arena, numbers, self.size)
        space = PinnedArena(3 * self.size, self.copier.driver)
        space.pin()
        ring = Ring(self._fetch, space.slabs(self.size), self.copier, readers=2)
        return PinnedBacking(arena, numbers, self.size, ring=ring, slabs=space)

    def _fetch(self, number: int, slab: Slab) -> None:
        if number in self.failing:
            raise TransferError("a fault was planted", fix="none")
        slab.tensor.copy_(self.blocks[number])

    def prepare(self, layer: int, experts: Sequence[int], *, waits: bool) -> Callable[[], None]:
        """A kernel that reads those experts through the table. Launching it takes no memory and waits for nothing."""
        which = torch.tensor(list(experts), dtype=torch.int32).pin_memory().to("cuda", non_blocking=True)
        out = torch.full((len(experts), self.size), POISON, dtype=torch.uint8, device="cuda")
        gave_up = torch.zeros(len(experts), dtype=torch.int32, device="cuda")
        self._read.append((self.source._shelf.base[layer], which, out))
        self._gave_up.append(gave_up)
        table, polls = self.source.table(layer), POLLS if waits else 0

        def launch() -> None:
            _wait_and_read[(len(experts),)](table, which, out, gave_up, polls, self.size, 4096)

        return launch

    def lease(self, layer: int, routed: Sequence[int], keep: Collection[int] | None = None) -> list[int]:
        came: list[int] = []
        with self.source.lease(layer, routed, keep) as lease:
            for wave in lease.waves():
                launch = self.prepare(layer, wave, waits=False)
                torch.cuda._sleep(self.random.randrange(1, 2_000_000))  # the readers lag behind
                launch()
                came += wave
        return came

    def serve(self, routed: Sequence[Sequence[int]]) -> None:
        """All layers are queued at once and wait; each is served when the one before it has run."""
        steps = [self.prepare(layer, chosen, waits=True) for layer, chosen in zip(NAMES, routed, strict=True)]
        reached = [torch.cuda.Event() for _ in NAMES]
        self.source.begin()
        for launch, event in zip(steps, reached, strict=True):  # from here on nothing may wait for the last of them
            event.record()
            launch()
        try:
            for layer, chosen, event in zip(NAMES, routed, reached, strict=True):
                event.synchronize()  # what a router's message says: all before it has run
                self.source.serve(layer, chosen)
        except TransferError:
            self.source.release()
            raise

    def compare(self) -> int:
        """Every byte that was read, with what was packed; how many blocks."""
        torch.cuda.synchronize()
        assert not any(bool(each.any()) for each in self._gave_up), "a kernel found no address"
        count = 0
        for base, which, out in self._read:
            truth = self.blocks[base + which.cpu().long()]
            assert torch.equal(out.cpu(), truth), f"a kernel read something else than experts {which.tolist()}"
            count += len(which)
        self._read.clear()
        self._gave_up.clear()
        return count


@pytest.fixture(autouse=True)
def compiled() -> None:
    """Kernels are compiled before anything waits: loading a module may wait for the device."""
    word = torch.zeros(1, dtype=torch.int64, device="cuda")
    small = torch.zeros(1, dtype=torch.int32, device="cuda")
    out = torch.zeros(PAGES * 4096, dtype=torch.uint8, device="cuda")
    for polls in (0, POLLS):
        word.fill_(out.data_ptr())
        _wait_and_read[(1,)](word, small, out, small, polls, PAGES * 4096, 4096)
    torch.cuda._sleep(1000)
    torch.cuda.synchronize()


@pytest.mark.parametrize("slots", [2, 3, 7, 31])
@pytest.mark.parametrize("in_ring", [(), range(10, 45)], ids=["pinned", "ring"])
def test_leases_give_what_was_packed(slots: int, in_ring: Collection[int]) -> None:
    rig = Rig(slots, slots, in_ring)
    with rig.source as source:
        for _ in range(3):
            for layer in NAMES:
                routed = rig.random.sample(range(EXPERTS), rig.random.choice((1, 5, EXPERTS)))
                keep = rig.random.choice((None, [], rig.random.sample(range(EXPERTS), 4)))
                assert sorted(rig.lease(layer, routed, keep)) == sorted(routed)
        assert rig.compare() > 0
        source.check_integrity()


@pytest.mark.parametrize("in_ring", [(), range(10, 45)], ids=["pinned", "ring"])
def test_kernels_that_wait_in_the_table_get_what_was_packed(in_ring: Collection[int]) -> None:
    rig = Rig(5, 13, in_ring)
    with rig.source as source:
        for _ in range(12):
            rig.serve([rig.random.sample(range(EXPERTS), rig.random.randint(1, 8)) for _ in NAMES])
        assert rig.compare() > 0
        source.check_integrity()
        assert source.counters().evictions > 0


def test_leases_and_serving_take_turns() -> None:
    rig = Rig(6, 12)
    with rig.source as source:
        for _ in range(6):
            rig.serve([rig.random.sample(range(EXPERTS), 6) for _ in NAMES])
            for layer in NAMES:
                rig.lease(layer, range(EXPERTS), keep=[1, 2])
        assert rig.compare() > 0
        source.check_integrity()


def test_release_ends_kernels_that_wait_and_leaves_a_true_table() -> None:
    rig = Rig(7, 12, in_ring=range(60))
    with rig.source as source:
        rig.failing = {EXPERTS + 3}
        with pytest.raises(TransferError, match="planted"):
            rig.serve([[0, 1, 2], [3, 4], [5, 6, 7]])
        torch.cuda.synchronize()
        assert not any(bool(each.any()) for each in rig._gave_up), "a kernel gave up instead of being released"
        _, _, out = rig._read[-1]
        assert not out.any(), "a released kernel reads zeros"
        source.check_integrity()
        rig._read.clear()
        rig.failing = set()
        rig.serve([[0, 1, 2], [3, 4], [5, 6, 7]])
        rig.compare()
        source.check_integrity()


def test_everything_resident_needs_nobody() -> None:
    rig = Rig(8, 3 * EXPERTS, in_ring=range(0, 60, 3))
    with rig.source as source:
        assert source.resident and source.pinned_bytes == 0
        for layer in NAMES:
            rig.prepare(layer, range(EXPERTS), waits=False)()
        assert rig.compare() == 3 * EXPERTS


@pytest.mark.parametrize("pinned", [0, 7])
def test_a_pack_with_faults_below(pinned: int) -> None:
    pack, faults = tiny_pack(), Faults(fail_share=0.3)
    size = pack.layout(0).block_bytes
    device = torch.device("cuda")
    with CudaSource.open(
        pack, slots=5, device=device, pinned_bytes=pinned * size, wrap=lambda link: FaultyLink(link, faults, 3)
    ) as source:
        blocks = source._memory._blocks
        for layer in range(LAYERS):
            with source.lease(layer, range(PACKED)) as lease:
                for wave in lease.waves():
                    for expert in wave:
                        start = int(source.table(layer)[expert]) - blocks.data_ptr()
                        assert torch.equal(blocks[start : start + size].cpu(), pack.read_block(layer, expert))
        source.check_integrity()
    broken = Faults(fails={ExpertId(0, 2): ALWAYS})
    with CudaSource.open(pack, slots=5, device=device, wrap=lambda link: FaultyLink(link, broken)) as source:
        with pytest.raises(TransferError, match="expert 2 of layer 0"), source.lease(0, range(PACKED)) as lease:
            list(lease.waves())
        source.check_integrity()


@pytest.mark.parametrize("together", [1, 2, 7, 200])
@pytest.mark.parametrize("copied_words", [False, True], ids=["driver", "copied words"])
def test_words_are_written_in_the_order_of_the_copies(copied_words: bool, together: int) -> None:
    copier = CudaCopier(torch.device("cuda"), copied_words=copied_words)
    assert (copier._words is not None) == copied_words, "this driver writes no words by itself"
    words = torch.zeros(9001, dtype=torch.int64, device="cuda")
    arena = PinnedArena(words.nbytes, copier.driver)
    arena.tensor.view(torch.int64).copy_(torch.arange(9001) + 5)
    arena.pin()
    torch.cuda.synchronize()
    copier.copy(arena.address, words.data_ptr(), words.nbytes)
    written = [(words.data_ptr() + 8 * index, (1 << 40) + index) for index in range(0, 9001, 2)]
    for first in range(0, len(written), together):
        copier.write(written[first][0], 3)  # an older word does not come after a newer one
        copier.write_many(written[first : first + together])
    copier.join(copier.copied())
    found = words.clone().cpu()
    truth = torch.arange(9001) + 5
    truth[::2] = torch.arange(0, 9001, 2) + (1 << 40)
    assert torch.equal(found, truth)
    copier.drain()
    arena.close()
    copier.close()


def test_closing_gives_everything_back() -> None:
    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.memory_allocated()
    for _ in range(2):
        rig = Rig(9, 10, in_ring=range(5))
        rig.lease(NAMES[0], range(EXPERTS))
        rig.compare()
        address, size = rig.source._shelf.backing._arenas[0].address, rig.source._shelf.backing._arenas[0].size_bytes  # type: ignore[attr-defined]
        tensor = rig.source._shelf.backing._arenas[0].tensor  # type: ignore[attr-defined]
        driver = rig.copier.driver
        rig.source.close()
        rig.source.close()
        driver.register(address, size)  # was unpinned: else the driver would refuse
        driver.unregister(address)
        del rig, tensor
        gc.collect()
    assert torch.cuda.memory_allocated() == before
