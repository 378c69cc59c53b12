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


@pytest.mark.parametrize("form", ["bf16", "int4"])
def test_the_notes_figures_come_from_the_lines_that_were_kept(form: str) -> None:
    kept = json.loads((NOTES / "2026-11-15-typing-gpu.json").read_text())
    lines = [dict(zip(kept["columns"], line, strict=True)) for line in kept[form]["lines"]]
    found = {row["arm"]: row for row in summary(lines, kept[form]["hit_step_ms"])}
    note = (NOTES / "2026-11-15-typing-parts.md").read_text()
    for arm, row in found.items():
        less = f"{row['stall_ms'] / found['nothing']['stall_ms'] - 1:.0%}".replace("%", " %")
        saved = "" if arm == "nothing" else f" ({less})"
        begun = f"{row['begun']} of {row['prompts']}"
        cells = f"{row['first_token_ms']:.0f} | {begun} | {row['stall_ms']:.0f}{saved} | {row['misses']:,.0f} |"
        assert f"| {form} | {arm} | {cells}" in note
