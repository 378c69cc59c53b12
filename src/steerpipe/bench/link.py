"""What the links give: pinned memory to device by block size, through the ring, ids back, disk, and what pinning costs.

Every figure is a median over rounds. On a CPU the same code runs with copies in memory: that shows that it works.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from steerpipe.bench.copies import (
    CopyRate,
    EntryCost,
    measure_entries,
    measure_ids,
    measure_pageable,
    measure_ring,
    measure_size,
    measure_writes,
    seconds_of,
)
from steerpipe.core.machine import read_cores
from steerpipe.doctor.disk import measure_read
from steerpipe.transfer.cuda.copier import Copier
from steerpipe.transfer.cuda.pinned import PinnedArena
from steerpipe.transfer.cuda.stream import CudaCopier, copier_for

SIZES = tuple(1 << shift for shift in range(18, 27))  # 256 KiB .. 64 MiB
ENTRY_SIZES = (1 << 18, 5 << 19, 9 << 20)  # the last two: int4 and bf16 blocks of Qwen3-30B
ARENA_BYTES = 2 << 30
ROUNDS = 7
_GIB = 1 << 30
_ENCODING = 128 / 130  # of PCIe 3 to 5: bits that carry data

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class LinkReport:
    """None where a machine cannot say. Rates in bytes per second."""

    ceiling: float | None  # of the slot: lanes times their rate, before packets' headers
    pinned: tuple[CopyRate, ...]
    pageable: float  # torch's copy from memory that is not pinned
    ring: float  # from memory that is not pinned through pinned slabs
    ring_readers: int
    entries: tuple[EntryCost, ...]  # as the copier writes them
    entries_by_copy: tuple[EntryCost, ...]  # the same, copied from pinned words; empty without a GPU
    write_seconds: float  # of the host, per entry of a table
    ids_seconds: float  # a few ids from the device to the host, awaited
    disk: float | None  # direct reads of one thread
    disk_direct: bool
    fill_seconds_per_gib: float  # first touch of pages by threads
    pin_seconds_per_gib: float  # the driver's part
    threads: int
    device: str

    @property
    def best(self) -> float:
        """The quickest that was measured: what floors are computed from."""
        return max(max(each.queued, each.scattered) for each in self.pinned)

    def to_json(self) -> dict[str, Any]:
        return {"schema": 1, "benchmark": "link", "best": self.best} | asdict(self)


def measure_links(
    device: torch.device, *, folder: Path | None = None, sizes: Sequence[int] = SIZES,
    arena_bytes: int = ARENA_BYTES, rounds: int = ROUNDS, say: Say = lambda text: None,
) -> LinkReport:  # fmt: skip
    """Takes `arena_bytes` on both sides, and some ten seconds. `folder`: where a file of 64 MiB is written and read."""
    ceiling = link_ceiling(device)
    say(f"ceiling of the slot: {_shown(ceiling)}")
    copier, threads = copier_for(device), min(16, read_cores().usable)
    arena = PinnedArena(arena_bytes, copier.driver if isinstance(copier, CudaCopier) else None)
    try:
        fill = seconds_of(lambda: arena.touch(threads)) * _GIB / arena_bytes
        pin = seconds_of(arena.pin) * _GIB / arena_bytes
        say(f"pinning: {fill:.2f} s/GiB to touch with {threads} threads, {pin:.2f} s/GiB to register")
        into = torch.empty(arena_bytes, dtype=torch.uint8, device=device)
        rates = []
        for size in sizes:
            rates.append(measure_size(copier, arena, into, size, rounds))
            say(
                f"{size >> 10:>6} KiB: {_shown(rates[-1].single)} single, {_shown(rates[-1].queued)} queued, "
                f"{_shown(rates[-1].scattered)} scattered, {rates[-1].issue_seconds * 1e6:.1f} us to issue"
            )
        entries, by_copy = _both_ways(copier, arena, into, device, rounds)
        for how, costs in (("written", entries), ("copied", by_copy)):
            for cost in costs:
                say(
                    f"{cost.block_bytes >> 10:>6} KiB with entries {how}: {cost.with_entries * 1e6:.1f} us, "
                    f"alone {cost.alone * 1e6:.1f} us"
                )
        through, readers = measure_ring(copier, into, min(arena_bytes, 1 << 29))
        disk = measure_read(folder) if folder is not None else None
        return LinkReport(
            ceiling=ceiling,
            pinned=tuple(rates),
            pageable=measure_pageable(into, min(arena_bytes, 1 << 28), rounds),
            ring=through,
            ring_readers=readers,
            entries=entries,
            entries_by_copy=by_copy,
            write_seconds=measure_writes(copier, device),
            ids_seconds=measure_ids(device),
            disk=disk.gb_per_second * 1e9 if disk is not None else None,
            disk_direct=disk is not None and disk.direct,
            fill_seconds_per_gib=fill,
            pin_seconds_per_gib=pin,
            threads=threads,
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        )
    finally:
        copier.drain()
        arena.close()
        copier.close()


def _both_ways(
    copier: Copier, arena: PinnedArena, into: torch.Tensor, device: torch.device, rounds: int
) -> tuple[tuple[EntryCost, ...], tuple[EntryCost, ...]]:
    """Blocks with entries of the table, as the copier writes them, and copied from words."""
    sizes = [size for size in ENTRY_SIZES if size <= arena.size_bytes]
    own = tuple(measure_entries(copier, arena, into, size, rounds) for size in sizes)
    if device.type != "cuda":
        return own, ()
    other = CudaCopier(device, copied_words=True)
    try:
        return own, tuple(measure_entries(other, arena, into, size, rounds) for size in sizes)
    finally:
        other.close()


def link_ceiling(device: torch.device, root: Path = Path("/")) -> float | None:
    """Bytes per second of the GPU's slot as it is set up now; None where the system does not say."""
    if device.type != "cuda":
        return None
    found = torch.cuda.get_device_properties(device)
    place = [getattr(found, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]  # not in every torch
    domain, bus, slot = (-1 if each is None else int(each) for each in place)
    name = f"{domain:04x}:{bus:02x}:{slot:02x}.0"
    return slot_rate(root / "sys/bus/pci/devices" / name)


def slot_rate(folder: Path) -> float | None:
    """From `current_link_speed` ("32.0 GT/s PCIe") and `current_link_width` ("16")."""
    try:
        speed = float((folder / "current_link_speed").read_text().split()[0])
        width = int((folder / "current_link_width").read_text())
    except (OSError, ValueError, IndexError):
        return None
    return speed * 1e9 * width * _ENCODING / 8 or None


def _shown(rate: float | None) -> str:
    return "unknown" if rate is None else f"{rate / 1e9:.1f} GB/s"
