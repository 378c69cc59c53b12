"""What the machine can do at best: its memory's rate and the link's. Measured in the run whose floors they are."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from steerpipe.transfer.cuda.copier import Copier

_ROUNDS = 7
_LINK_BYTES = 2 << 30  # per round: long enough that the first copy's latency does not count


def timed(run: Callable[[], object], device: torch.device, rounds: int = _ROUNDS) -> list[float]:
    """Seconds of each round, after one that is not counted. On a GPU by its own clock."""
    run()
    found = []
    for _ in range(rounds):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            end.synchronize()
            found.append(begin.elapsed_time(end) / 1e3)
        else:
            started = time.perf_counter()
            run()
            found.append(time.perf_counter() - started)
    return found


def memory_rates(device: torch.device) -> dict[str, float]:
    """Bytes per second of the device's memory, by three ways to use it; the best of them is what a floor takes.

    A matrix times a vector and a sum read; a copy reads and writes, and both count.
    """
    rows, columns = (1 << 17, 8192) if device.type == "cuda" else (1 << 13, 2048)  # 2 GiB, 64 MiB
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    matrix = torch.ones(rows, columns, dtype=dtype, device=device)
    vector = torch.ones(columns, dtype=dtype, device=device)
    out = torch.empty_like(matrix)
    size = matrix.numel() * dtype.itemsize
    ways: dict[str, tuple[int, Callable[[], object]]] = {
        "matrix times vector": (size, lambda: torch.mv(matrix, vector)),
        "sum": (size, lambda: matrix.view(torch.float32).sum()),
        "copy": (2 * size, lambda: out.copy_(matrix)),
    }
    return {name: used / statistics.median(timed(run, device)) for name, (used, run) in ways.items()}


def link_rate(
    copier: "Copier", sources: Sequence[int], block_bytes: int, device: torch.device, rounds: int = 5
) -> float:
    """Bytes per second of whole blocks from `sources` (addresses, in their order) into the device's memory.

    Queued back to back, as a layer's misses are; the median of `rounds`, each from the first copy's call to the end.
    """
    count = max(4, min(len(sources), _LINK_BYTES // block_bytes)) if device.type == "cuda" else 4
    targets = torch.empty(min(16, count), block_bytes, dtype=torch.uint8, device=device)
    into = [row.data_ptr() for row in targets]
    copier.drain()
    seconds = []
    for round_ in range(rounds + 1):
        begin = time.perf_counter()
        for index in range(count):
            copier.copy(sources[(round_ * count + index) % len(sources)], into[index % len(into)], block_bytes)
        copier.drain()
        seconds.append(time.perf_counter() - begin)
    return count * block_bytes / statistics.median(seconds[1:])
