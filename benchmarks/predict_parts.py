"""Parts of predict_on_gpu.py: routings of known misses, the order of runs, and a log that may be left at any time."""

import json
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.predict_rows import ROWS, Row
from steerpipe.bench.routing import Routing
from steerpipe.bench.shapes import Shape


def missing(shape: Shape, new: int, tokens: int) -> Routing:
    """The last `new` of each layer's experts go round all that are not always chosen; the others stay."""
    kept = shape.moe.top_k - new
    round_ = np.arange(tokens)[:, None, None] * new + 7 * np.arange(shape.layers)[None, :, None] + np.arange(new)
    moving = kept + round_ % (shape.moe.experts - kept)  # [T, L, new]
    staying = np.broadcast_to(np.arange(kept), (tokens, shape.layers, kept))
    return Routing(f"{new} new", np.concatenate([staying, moving], axis=2))


def runs_of(given: Namespace) -> Iterator[tuple[Row, float, int]]:
    """Rows with their shares and rounds: all once, which is round 0, then some against each other."""
    for share in shares_of(given.shares):
        for row in rows_of(given.rows):
            yield row, share, 0
    rows = rows_of(given.round_rows)
    for number in range(given.rounds):
        first = number * len(rows) // given.rounds  # a host's speed drifts: nobody comes at the same place every time
        for share in shares_of(given.round_shares):
            for row in rows[first:] + rows[:first]:
                yield row, share, 1 + number


def rows_of(numbers: str) -> list[Row]:
    return [ROWS[int(number)] for number in numbers.split(",") if number]


def shares_of(given: str) -> list[float]:
    return [float(each) for each in given.split(",") if each]


class Log:
    """What is known so far, on the screen and in the file after each part: a run may be ended at any time."""

    def __init__(self, file: Path, **found: Any) -> None:
        self._file, self._begun, self.found = file, time.perf_counter(), found

    def add(self, name: str, value: Any) -> Any:
        self.found[name] = value
        self.keep(f"{name} {json.dumps(value)}")
        return value

    def add_line(self, line: dict[str, Any]) -> None:
        self.found.setdefault("lines", []).append(line)
        self.keep(
            f"{line['share']:5.1%} {line['row']:40} {line['live_ms']:7.3f} ms, link {line['link_utilisation']:.2f}, "
            f"misses {line['misses']:.1f}, late {line['late']:.1f}, cut {line['cut_mb']:.1f} MB"
        )

    def seconds(self) -> float:
        """Since it was begun."""
        return time.perf_counter() - self._begun

    def keep(self, said: str) -> None:
        print(f"{self.seconds():6.1f} s  {said}", flush=True)
        half = self._file.with_suffix(".part")
        half.write_text(json.dumps(self.found, indent=1) + "\n")
        half.replace(self._file)
