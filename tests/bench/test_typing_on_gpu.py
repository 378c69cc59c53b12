"""`benchmarks/typing_on_gpu.py`: what its table is made of."""

import json
from pathlib import Path

import pytest

from benchmarks.typing_on_gpu import summary

NOTES = Path(__file__).parents[2] / "benchmarks" / "notes"


def test_a_stall_is_what_the_decoded_steps_took_beyond_the_least_hit_step() -> None:
    line = {"arm": "x", "first_token_ms": 1.0, "misses": 0}
    whole, begun = line | {"ahead": 0, "decode_ms": 100.0}, line | {"ahead": 8, "decode_ms": 100.0}
    assert summary([whole], 2.0)[0]["stall_ms"] == pytest.approx(100 - 16 * 2)
    assert summary([begun], 2.0)[0]["stall_ms"] == pytest.approx(100 - 9 * 2)


def test_the_notes_stalls_come_from_the_lines_that_were_kept() -> None:
    kept = json.loads((NOTES / "2026-11-15-typing-gpu.json").read_text())
    stalls = {row["arm"]: round(row["stall_ms"]) for row in summary(kept["lines"], kept["hit_step_ms"])}
    note = (NOTES / "2026-11-15-typing-parts.md").read_text()
    assert f"| nothing | 434 | 0 | {stalls['nothing']} |" in note
    assert f"| affinity (forecast without it) | 381 | 0 | {stalls['affinity']} (-10 %) |" in note
    assert f"| all | 231 | 2 | {stalls['all']} (-29 %) |" in note
