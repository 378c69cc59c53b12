"""Draws docs/pictures/prediction-gpu.svg: time per token on a GPU from on demand to all resident, by who decides.

    PYTHONPATH=src:. python benchmarks/plot_prediction.py

Reads the two newest grids of benchmarks/notes/2026-11-15-prediction-gpu.md. Needs the extra [plots].
"""

from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot
from matplotlib.axes import Axes

from benchmarks.predict_rows import AGAIN, LFRU, read_found
from benchmarks.predict_shares import by_tokens
from steerpipe.arena.plots import slim

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
    mpl.rcParams.update({"svg.hashsalt": "steerpipe", "svg.fonttype": "none", "font.size": 9})
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for axes, note, rows in ((left, "direct", DIRECT), (right, "served-bf16", SERVED)):
        draw(axes, read_found(HERE / "notes" / f"2026-11-16-prediction-{note}.json"), rows)
    left.set_ylabel("ms per token")
    right.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(OUT, metadata={"Date": None})
    OUT.write_text(slim(OUT.read_text(encoding="utf-8")), encoding="utf-8")


def draw(axes: Axes, found: dict[str, Any], rows: dict[str, tuple[str, ...]]) -> None:
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
    main()
