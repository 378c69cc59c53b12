"""Raw blocks in RAM over a slower link. What fits is read from the disk once; the rest comes and goes."""

import mmap
import threading
from collections.abc import Callable, Iterable, Sequence

import torch

from steerpipe.core.errors import CapacityError, ConfigError, TransferError
from steerpipe.core.geometry import SMALLEST_SLOTS
from steerpipe.core.ids import ExpertId
from steerpipe.core.units import format_bytes
from steerpipe.store.policies import Lfru
from steerpipe.store.residency import Residency, SlotTable
from steerpipe.transfer.link import BlockAddress, Link, OverLink, Piece
from steerpipe.transfer.slabs import Slab


class RamTier(OverLink):
    """Keeps verified blocks within `ram_bytes`; reading one of them is a copy in memory. Many threads at once.

    One allocation, whose pages count as used once written. Who goes is decided by LFRU over the reads that came down
    to this tier (half-life: as many reads as there are blocks), so a prompt that passes once does not wipe it.
    """

    def __init__(self, below: Link, addresses: Iterable[BlockAddress], ram_bytes: int) -> None:
        super().__init__(below)
        self._addresses = sorted(addresses, key=lambda address: address.offset)
        self._block_bytes = max(address.size_bytes for address in self._addresses)
        self.blocks = min(ram_bytes // self._block_bytes, len(self._addresses))
        if self.blocks < SMALLEST_SLOTS:
            raise ConfigError(
                f"--ram {format_bytes(ram_bytes)} holds {self.blocks} blocks of {format_bytes(self._block_bytes)}",
                fix=f"give at least {format_bytes(SMALLEST_SLOTS * self._block_bytes)}, or leave --ram out",
            )
        self._memory = _allocate(self.blocks * self._block_bytes)
        experts = [address.expert for address in self._addresses]
        policy = Lfru(len(experts), half_life_tokens=len(experts))
        self._table = SlotTable(experts, self.blocks, policy, transient_limit=1)
        self._lock = threading.Lock()
        self._reads = 0  # the policy's clock
        self._spoiled: set[ExpertId] = set()  # what is held of them is wrong

    @property
    def name(self) -> str:
        return f"RAM ({self.blocks} of {len(self._addresses)} blocks) over {self.below.name}"

    @property
    def holds_everything(self) -> bool:
        """Whether the budget is enough for the whole pack."""
        return self.blocks == len(self._addresses)

    def held(self) -> frozenset[ExpertId]:
        """Whose blocks are here and sound."""
        with self._lock:
            return frozenset(self._table.resident()) - self._spoiled

    def fill(self, fetch: Callable[[BlockAddress, Slab], None]) -> None:
        """Takes every block in the order on disk, as far as there is room. `fetch` reads one and checks it; what it
        cannot have is left out, and tried again when somebody wants it. Takes as long as the disk does.
        """
        slab = Slab.allocate(self._block_bytes)
        for address in self._addresses[: self.blocks]:
            try:
                fetch(address, slab)
            except TransferError:
                continue
            self.keep(address, slab.view)

    def read(self, pieces: Sequence[Piece]) -> None:
        missing = [piece for piece in pieces if not self._copy_out(piece)]
        if missing:
            self.below.read(missing)

    def keep(self, address: BlockAddress, block: memoryview) -> None:
        """Copies the block, in place of the one that is missed least; or does nothing while all are being copied."""
        expert = address.expert
        with self._lock:
            if self._table.state(expert) is not Residency.ABSENT:
                if expert in self._spoiled and not self._table.pins(expert):
                    copy_bytes(self._held(address, 0, address.size_bytes), block[: address.size_bytes])
                    self._spoiled.discard(expert)
                return
            placement = self._table.begin(expert, transient=False, now=self._reads)
            if placement is None:
                return
            self._spoiled.discard(expert)
        copy_bytes(self._held(address, 0, address.size_bytes), block[: address.size_bytes])
        with self._lock:
            self._table.finish(expert)

    def expect(self, address: BlockAddress, block: memoryview) -> None:
        """Keeps a block that nobody has asked for yet; it counts as a read, else it would be the next to go."""
        with self._lock:
            self._reads += 1
            self._table.touch(address.expert, self._reads)
        self.keep(address, block)

    def protect(self, experts: Iterable[ExpertId]) -> None:
        """What is wanted soon: its block goes only where no other can. Replaces what was said before."""
        with self._lock:
            self._table.protect(experts)

    def hold(self, address: BlockAddress) -> memoryview | None:
        """Its block, which stays where it is until `let_go` was called as often; None: it is not here, or not sound.
        Counts as a read."""
        expert = address.expert
        with self._lock:
            self._reads += 1
            self._table.touch(expert, self._reads)
            if not self._sound(expert):
                return None
            self._table.pin(expert)
            return self._held(address, 0, address.size_bytes)

    def let_go(self, expert: ExpertId) -> None:
        with self._lock:
            self._table.unpin(expert)

    def forget(self, address: BlockAddress) -> None:
        with self._lock:
            if self._table.state(address.expert) is Residency.READY:
                self._spoiled.add(address.expert)
        self.below.forget(address)

    def close(self) -> None:
        self._memory.release()
        super().close()

    def check_integrity(self) -> None:
        """When no read is under way: nothing is pinned, and the table is sound."""
        with self._lock:
            self._table.check_integrity()
            assert not any(self._table.pins(address.expert) for address in self._addresses), "a copy never ended"

    def _copy_out(self, piece: Piece) -> bool:
        """Fills the piece if its block is here."""
        expert = piece.address.expert
        with self._lock:
            if piece.start == 0:
                self._reads += 1
                self._table.touch(expert, self._reads)
            if not self._sound(expert):
                return False
            self._table.pin(expert)
        copy_bytes(piece.into, self._held(piece.address, piece.start, len(piece.into)))
        with self._lock:
            self._table.unpin(expert)
        return True

    def _sound(self, expert: ExpertId) -> bool:
        return self._table.state(expert) is Residency.READY and expert not in self._spoiled

    def _held(self, address: BlockAddress, start: int, length: int) -> memoryview:
        """Part of a block that has a place here and cannot lose it now."""
        begin = self._table.slot(address.expert) * self._block_bytes + start
        return self._memory[begin : begin + length]


def copy_bytes(into: memoryview, source: memoryview) -> None:
    """Both writable and equally long. By torch, which lets other threads run meanwhile."""
    torch.frombuffer(into, dtype=torch.uint8).copy_(torch.frombuffer(source, dtype=torch.uint8))


def _allocate(size_bytes: int) -> memoryview:
    try:
        return memoryview(mmap.mmap(-1, size_bytes))
    except (OSError, OverflowError):
        raise CapacityError(
            f"{format_bytes(size_bytes)} of RAM for blocks are more than can be had", fix="give a smaller --ram"
        ) from None
