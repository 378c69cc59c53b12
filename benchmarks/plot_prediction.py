"""Draws docs/pictures/prediction-gpu.svg: time per token on a GPU from on demand to all resident, by who decides.

    PYTHONPATH=src:. python benchmarks/plot_prediction.py

Reads the two newest grids of benchmarks/notes/2026-11-15-prediction-gpu.md. Needs the extra [plots].
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.predict_rows import AGAIN, LFRU, read_found
from benchmarks.predict_shares import by_tokens
from steerpipe.arena.plots import subplots, svg
from steerpipe.cli.shared import guarded

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HERE = Path(__file__).parent
OUT = HERE.parent / "docs" / "pictures" / "prediction-gpu.svg"
HOW = {"direct": "the device fetches by itself", "served": "the host serves"}
SHARES = (0.125, 0.25, 0.5)
DIRECT = {
    "LRU": ("LRU",), "LFRU": (LFRU, AGAIN), "LFRU + heads": ("LFRU + heads, 1 ahead",),
    "reuse eviction": ("reuse eviction",), "reuse + heads": ("reuse eviction + heads, 1 ahead",), "Belady": ("Belady",),
}  # fmt: skip
MARKERS = dict(zip(DIRECT, ".ovsDx", strict=True))
SERVED = DIRECT | {
    "LFRU + heads": ("LFRU + heads, 1 and 2 ahead, served",), "reuse eviction": ("reuse eviction, served",),
    "reuse + heads": ("reuse eviction + heads, 1 and 2 ahead, served",),
}  # fmt: skip


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    figure, (left, right) = subplots(1, 2, 9, 3.4)
    for axes, note, rows in ((left, "direct", DIRECT), (right, "served-bf16", SERVED)):
        draw(axes, read_found(HERE / "notes" / f"2026-11-20-prediction-{note}.json"), rows)
    left.set_ylabel("ms per token")
    right.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    OUT.write_text(svg(figure), encoding="utf-8")


def draw(axes: "Axes", found: dict[str, Any], rows: dict[str, tuple[str, ...]]) -> None:
    bounds = (("on demand", found["no_cache"]["on demand"], ":"), ("all resident", found["resident_ms"], "--"))
    for label, spent_ms, style in bounds:
        axes.axhline(spent_ms, color="grey", linestyle=style, label=label)
    for label, names in rows.items():
        strong = label == "reuse + heads"
        spent = [by_tokens(found, share, names) for share in SHARES]
        axes.plot(SHARES, spent, marker=MARKERS[label], markersize=4, linewidth=2.4 if strong else 1.2, label=label)
    axes.set_xscale("log", base=2)
    axes.set_xticks(SHARES, [f"{share:.1%}".replace(".0", "") for share in SHARES])
    title = f"{found['format']}: {HOW[found['driver']]}"
    axes.set(xlabel="experts in fast memory", ylim=(0, None), title=title)


if __name__ == "__main__":
    guarded(main, debug=False)
