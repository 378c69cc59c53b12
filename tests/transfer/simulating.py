"""Machines and recordings by hand, for tests of the simulator."""

import numpy as np

from steerpipe.transfer.machine import Decoding, Disk, Looking, Machine
from steerpipe.transfer.recorded import Recording
from steerpipe.transfer.replay import replay

BLOCK = 1000


def machine(
    slots: int = 24, tc: float = 0.5, tx: float = 1.0, **rest: float | Decoding | Disk | Looking | None
) -> Machine:
    """Seconds as given; chunks of a tenth of a block."""
    figures = {"chunk_bytes": BLOCK // 10} | rest
    return Machine(slots, BLOCK, BLOCK / tx, tc, **figures)  # type: ignore[arg-type]


def recording(rows: list[list[list[int]]], sequence: list[int] | None = None, experts: int = 8) -> Recording:
    labels = np.array(sequence or [0] * len(rows), dtype=np.int32)
    return Recording("by hand", np.array(rows, dtype=np.int64), labels, experts)


def one_text(source: Recording) -> Recording:
    return Recording(source.name, source.routing, np.zeros_like(source.sequence), source.experts)


class AlwaysSeven:
    """Expects expert 7, which nobody is routed to."""

    horizon = 1

    def predict(self, token: int, layer: int, ahead: int) -> list[int]:
        return [7]


def total_seconds(source: Recording, *arguments: object, **named: object) -> float:
    report = replay(source, *arguments, **named)  # type: ignore[arg-type]
    return report.tpot_mean_seconds * report.tokens
