"""Parts of predict_on_gpu.py: what a step is made of, by the profiler and by events; and the rate of `fetch`."""

import json
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from steerpipe.core.blocks import GUESSES
from steerpipe.kernels.fetch import MULTIPROCESSORS, PROGRAMS, Fetched, fetch
from steerpipe.model.gpu.apart import Apart

COPY, LEAST_BLOCK = "a block", 1 << 20  # bytes: less is a step's integers


@dataclass(frozen=True)
class Kernel:
    """One that ran, or a block that was copied (COPY); seconds of the device's clock."""

    name: str
    begin: float
    end: float


def kernels_of(run: Callable[[], object]) -> list[Kernel]:
    """What ran on the device meanwhile, in the order of their starts."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        found.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    kinds = [each for each in events if each.get("cat") in ("kernel", "gpu_memcpy")]
    names = {"gpu_memcpy": lambda each: COPY if each["args"]["bytes"] >= LEAST_BLOCK else "words"}
    times = [(names.get(each["cat"], _name)(each), each["ts"] / 1e6, each["dur"] / 1e6) for each in kinds]
    return sorted((Kernel(name, at, at + lasts) for name, at, lasts in times), key=lambda each: each.begin)


def _name(event: dict[str, Any]) -> str:
    return str(event["name"])


def median_after(kernels: list[Kernel], first: str, then: str, *, begins: bool = False) -> float:
    """Seconds from the end of each `first` to the end of the `then` that ends next, before another `first` does.

    `begins`: to the beginning of the one that begins next.
    """
    begun = [each.end for each in kernels if each.name == first]
    times = sorted(each.begin if begins else each.end for each in kernels if each.name == then)
    found = []
    for at, until in zip(begun, [*begun[1:], float("inf")], strict=True):
        found += [each - at for each in times if at < each < until][:1]
    return statistics.median(found)


def end_of_step(kernels: list[Kernel], layers: int) -> float:
    """Seconds from the end of the last layer to the end of what was captured with it: the logits."""
    combined = [each.end for each in kernels if each.name == "_combine"]
    found = []
    for at in combined[layers - 1 :: layers]:
        found += [each.end - at for each in kernels if each.name == "_row_linear" and at < each.end][:1]
    return statistics.median(found)


def median_step(kernels: list[Kernel], layers: int) -> float:
    """Seconds of a step's graph: from the end of its first router to that of its last, a layer more, and its logits."""
    routed = [each.end for each in kernels if each.name == "_route"]
    found = [last - first for first, last in zip(routed[::layers], routed[layers - 1 :: layers], strict=False)]
    return statistics.median(found) * layers / (layers - 1) + end_of_step(kernels, layers)


@contextmanager
def timed_replays() -> Iterator[list[tuple[torch.cuda.Event, torch.cuda.Event]]]:
    """Events around every replay of a step's graph. A question to who predicts beside it is none: it comes at every
    layer, and events around it would take as long as itself."""
    plain, ask, found = torch.cuda.CUDAGraph.replay, Apart.ask, list[tuple[torch.cuda.Event, torch.cuda.Event]]()
    asked = False

    def asks(apart: Apart, *given: Any) -> bool:
        nonlocal asked
        asked = True
        try:
            return ask(apart, *given)
        finally:
            asked = False

    def replay(graph: torch.cuda.CUDAGraph) -> None:
        if asked:
            plain(graph)
            return
        pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        pair[0].record()
        plain(graph)
        pair[1].record()
        found.append(pair)

    torch.cuda.CUDAGraph.replay, Apart.ask = replay, asks  # type: ignore[method-assign,assignment]
    try:
        yield found
    finally:
        torch.cuda.CUDAGraph.replay, Apart.ask = plain, ask  # type: ignore[method-assign]


def fetch_rate(sources: Sequence[int], size_bytes: int, chunk_bytes: int, count: int = 20) -> float:
    """Bytes per second of `fetch`, alone, from the blocks of pinned memory at `sources`."""
    device = torch.device("cuda")

    def words(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    slots = torch.empty(GUESSES, size_bytes, dtype=torch.uint8, device=device)
    given = Fetched(
        words(*(1 << 32 | place << 16 | place for place in range(GUESSES))),
        torch.zeros(GUESSES, PROGRAMS, dtype=torch.int64, device=device), words(0),
        words(*sources),
    )  # fmt: skip
    ring, stamp, arrived = words(*(slot.data_ptr() for slot in slots)), words(1), words(0)
    mail = torch.zeros(GUESSES, dtype=torch.int64, pin_memory=True)
    running = torch.zeros(MULTIPROCESSORS, dtype=torch.int32, device=device)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for number in range(1 + count):  # the first compiles; the others are queued before they run
        if number == 1:
            torch.cuda.synchronize()
            begin.record()
        fetch(
            given, ring=ring, stamp=stamp, size_bytes=size_bytes, chunk_bytes=chunk_bytes, arrived=arrived, mail=mail,
            running=running,
        )  # fmt: skip
    end.record()
    end.synchronize()
    return count * GUESSES * size_bytes / begin.elapsed_time(end) * 1e3
