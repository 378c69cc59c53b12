"""Which launch configurations the expert kernels want on this GPU, and how near they come to its memory.

    python benchmarks/expert_kernels.py --json expert_kernels.json

The ceiling first (a copy from device to device). Then, for each shape and format, every candidate of
`expert_kernel_cases.py`: checked against torch, and timed in a CUDA graph whose layers use different experts, so that
nothing comes from the L2. One row; 2, 4 and 8 rows; a prompt of 512. Last, gate/up and down of one row together, with
and without overlapping launches. Candidates are compiled beforehand by several processes. TB/s counts the weights and
scales of the experts in use once. What is left when --seconds are over is not measured, and said so.
"""

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace

import torch
from expert_kernel_cases import (
    FORMATS,
    ROW_KERNELS,
    SHAPES,
    TILE_KERNELS,
    Case,
    Shape,
    compile_case,
    row_cases,
    tile_cases,
)
from expert_kernel_data import CUDA, FEW_ROWS, PROMPT_ROWS, Experts, TilePair
from kernel_timing import check, timed
from torch import Tensor
from triton.errors import TritonError

from steerpipe.kernels.configs import Launch

FEW_LAYERS, PROMPT_LAYERS = 6, 2
NEAR = 1.5e-2  # bfloat16 activations, and weights in tiles
DECODE_ROWS = FEW_ROWS[1]  # what the best tile is chosen by, beside the prompt


@dataclass(frozen=True)
class Figure:
    case: Case
    rows: int
    microseconds: float  # of one layer
    bytes: float  # of the weights and scales that one layer needs

    @property
    def rate(self) -> float:
        return self.bytes / self.microseconds / 1e6  # TB/s

    def line(self) -> str:
        case, launch = self.case, self.case.launch
        what = f"{launch.rows}x{launch.columns} w{launch.warps} s{launch.stages} {launch.hint}"
        kind = f"{case.shape.name:<11} {case.format:<8} {case.kernel:<12} R={self.rows:<3}"
        return f"{kind} {what:<26} {self.microseconds:8.2f} us {self.rate:5.2f} TB/s"

    def record(self) -> dict[str, object]:
        kind = {"kernel": self.case.kernel, "format": self.case.format, "shape": self.case.shape.name}
        measured = {"rows": self.rows, "us": round(self.microseconds, 3), "TB/s": round(self.rate, 3)}
        return kind | measured | {"launch": asdict(self.case.launch)}


def copy_rate() -> float:
    """TB/s, bytes read and written."""
    source = torch.empty(2_000_000_000, dtype=torch.uint8, device=CUDA).random_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / timed([lambda: target.copy_(source)]) / 1e6


def measure_row(data: Experts, case: Case) -> Iterator[Figure]:
    act, part = data.row_truth
    out, wanted = (data.part, part) if case.kernel == "row_down" else (data.act, act)
    data.act[: len(act)] = act
    out[: len(wanted)] = torch.nan
    data.run_row(case.kernel, data.layers[0], case.launch)
    check(out[: len(wanted)], wanted, NEAR)
    taken = timed([lambda e=e: data.run_row(case.kernel, e, case.launch) for e in data.layers])
    yield Figure(case, 1, taken, data.shape.top_k * data.bytes_of(case.kernel))


def measure_tiles(data: Experts, case: Case, work: dict[int, list[TilePair]]) -> Iterator[Figure]:
    tiles, act, part = data.tile_truth
    out, wanted = (data.part, part) if case.kernel == "tile_down" else (data.act, act)
    data.act[: len(act)] = act
    out[: len(wanted)] = torch.nan
    data.run_tiles(case.kernel, tiles, case.launch)
    check(out[: len(wanted)], wanted, NEAR)
    for rows, layers in work.items():
        taken = timed([lambda t=t: data.run_tiles(case.kernel, t, case.launch) for t in layers])
        used = sum(len(owners[owners >= 0].unique()) for owners, _ in layers) / len(layers)
        yield Figure(case, rows, taken, used * data.bytes_of(case.kernel))


def measure_pair(data: Experts, gate_up: Launch, down: Launch) -> float:
    """Microseconds of both kernels of a layer."""

    def both(experts: Tensor) -> None:
        data.run_row("row_gate_up", experts, gate_up, followed=down.overlap)
        data.run_row("row_down", experts, down)

    return timed([lambda e=e: both(e) for e in data.layers])


class Sweep:
    """Everything that was measured. Says when the time is up."""

    def __init__(self, seconds: float) -> None:
        self.until = time.monotonic() + seconds
        self.figures: list[Figure] = []
        self.pairs: list[dict[str, object]] = []
        self.failures: list[str] = []
        self.left_out = 0

    def run(self, shape: Shape, kind: str, cases: list[Case]) -> None:
        data = Experts(shape, kind)
        work = {rows: [data.tiles_of(data.draw(rows)) for _ in range(FEW_LAYERS)] for rows in FEW_ROWS}
        work[PROMPT_ROWS] = [data.tiles_of(data.draw(PROMPT_ROWS)) for _ in range(PROMPT_LAYERS)]
        for case in cases:
            if time.monotonic() > self.until:
                self.left_out += 1
                continue
            try:
                rows = case.kernel in ROW_KERNELS
                self.figures += measure_row(data, case) if rows else measure_tiles(data, case, work)
            except (AssertionError, RuntimeError, TritonError) as error:
                self.failures.append(f"{case}: {error!r:.300}")
        if time.monotonic() < self.until:
            self.overlap(data, kind)

    def overlap(self, data: Experts, kind: str) -> None:
        best = [self.best(kernel, kind, data.shape, 1) for kernel in ROW_KERNELS]
        if None in best:
            return
        gate_up, down = (figure.case.launch for figure in best if figure is not None)
        moved = data.shape.top_k * sum(data.bytes_of(kernel) for kernel in ROW_KERNELS)
        for name, early in (("none", (False, False)), ("down", (False, True)), ("both", (True, True))):
            taken = measure_pair(data, replace(gate_up, overlap=early[0]), replace(down, overlap=early[1]))
            pair = {"shape": data.shape.name, "format": kind, "overlap": name, "us": round(taken, 3)}
            self.pairs.append(pair | {"TB/s": round(moved / taken / 1e6, 3)})

    def best(self, kernel: str, kind: str, shape: Shape, rows: int) -> Figure | None:
        alike = (
            figure
            for figure in self.figures
            if (figure.case.kernel, figure.case.format, figure.case.shape, figure.rows) == (kernel, kind, shape, rows)
        )
        return min(alike, key=lambda figure: figure.microseconds, default=None)


def compile_all(cases: list[Case]) -> int:
    """Fills Triton's cache on disk; how many failed. Those fail again when they are measured, and are named there."""
    workers = max(1, min(12, (os.cpu_count() or 2) - 2))
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        return sum(result.exception() is not None for result in [pool.submit(compile_case, case) for case in cases])


def all_cases() -> list[Case]:
    pairs = [(shape, kind) for shape in SHAPES for kind in FORMATS]
    rows = [case for shape, kind in pairs for kernel in ROW_KERNELS for case in row_cases(kernel, kind, shape)]
    return rows + [case for shape, kind in pairs for kernel in TILE_KERNELS for case in tile_cases(kernel, kind, shape)]


def report(sweep: Sweep, verbose: bool) -> None:
    if verbose:
        print(*(figure.line() for figure in sweep.figures), sep="\n")
    print("best:")
    for shape in SHAPES:
        for kind in FORMATS:
            found = [sweep.best(kernel, kind, shape, 1) for kernel in ROW_KERNELS]
            for rows in (*FEW_ROWS, PROMPT_ROWS):
                found += [sweep.best(kernel, kind, shape, rows) for kernel in TILE_KERNELS]
            print(*(figure.line() for figure in found if figure is not None), sep="\n")
    print("gate/up and down of one row, overlapping launches:")
    print(*sweep.pairs, sep="\n")
    print(*(f"failed: {failure}" for failure in sweep.failures), f"left out for time: {sweep.left_out}", sep="\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write every figure there")
    parser.add_argument("--seconds", type=float, default=85.0)
    parser.add_argument("--verbose", action="store_true", help="print every candidate, not only the best")
    arguments = parser.parse_args()
    sweep = Sweep(arguments.seconds)
    ceiling = copy_rate()
    print(f"{torch.cuda.get_device_name()}: a copy moves {ceiling:.2f} TB/s", flush=True)
    cases = all_cases()
    broken = compile_all(cases)
    left = sweep.until - time.monotonic()
    print(f"{len(cases) - broken} of {len(cases)} candidates compiled, {left:.0f} s left", flush=True)
    for shape in SHAPES:
        for kind in FORMATS:
            sweep.run(shape, kind, [case for case in cases if (case.shape, case.format) == (shape, kind)])
    report(sweep, arguments.verbose)
    figures = {"figures": [figure.record() for figure in sweep.figures], "pairs": sweep.pairs}
    everything = {"device": torch.cuda.get_device_name(), "copy TB/s": round(ceiling, 3), **figures}
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(everything | {"failures": sweep.failures, "left out": sweep.left_out}, file, indent=1)


if __name__ == "__main__":
    main()
