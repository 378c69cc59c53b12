"""Times of CUDA launches in a graph, and a table that prints them; shared by the kernel benchmarks."""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from triton.errors import TritonError

from steerpipe.kernels import dense_configs

Launch = Callable[[], object]


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype) * scale


def poisoned(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.full(shape, torch.nan, device="cuda", dtype=dtype)


@contextmanager
def overlapping(on: bool) -> Iterator[None]:
    """Dense kernels are launched so inside."""
    before, dense_configs.OVERLAP = dense_configs.OVERLAP, on
    try:
        yield
    finally:
        dense_configs.OVERLAP = before


def timed(launches: Sequence[Launch], rounds: int = 1) -> float:
    """Microseconds per launch: median of 9 replays of a graph that holds all of them, `rounds` times."""
    launches[0]()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for launch in launches:
                launch()
    times = []
    for _ in range(12):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) * 1000 / (len(launches) * rounds))
    return statistics.median(times[3:])


def attempted(table: "Table", what: str, variant: str, measure: Callable[[], float], moved_bytes: float = 0.0) -> float:
    """Adds a candidate's time to the table, or why it has none; then it is infinite."""
    try:
        took = measure()
    except (AssertionError, RuntimeError, TritonError) as error:
        table.rows.append({"what": what, "variant": variant, "failed": str(error)})
        print(f"{what:28s} {variant:16s}    failed: {str(error)[:200]}", flush=True)
        return math.inf
    table.add(what, variant, took, moved_bytes)
    return took


def check(found: Tensor, expected: Tensor, limit: float = 8e-3) -> None:
    error = ((found.double() - expected.double()).norm() / expected.double().norm()).item()
    assert error < limit, f"wrong by {error:.1e}"  # NaN is not less


@dataclass(slots=True)
class Table:
    """Prints a line per result and keeps them all; says when the time is up."""

    until: float  # time.monotonic()
    rows: list[dict[str, object]] = field(default_factory=list)

    def add(self, what: str, variant: str, microseconds: float, moved_bytes: float = 0.0) -> None:
        rate = moved_bytes / microseconds / 1e6  # TB/s
        self.rows.append({"what": what, "variant": variant, "us": round(microseconds, 2), "TB/s": round(rate, 2)})
        print(f"{what:28s} {variant:16s} {microseconds:9.2f} us {f'{rate:6.2f} TB/s' if rate else ''}", flush=True)

    @property
    def late(self) -> bool:
        return time.monotonic() > self.until
