"""Draws docs/pictures/reuse.svg from what train_reuse.py measured: misses over residency, and what sight is worth.

    python benchmarks/plot_reuse.py

Reads benchmarks/notes/reuse/documents.json. Needs the extra [plots].
"""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steerpipe.arena.plots import subplots, svg
from steerpipe.cli.shared import guarded

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HERE = Path(__file__).parent
OUT = HERE.parent / "docs" / "pictures" / "reuse.svg"
CURVE = {"1/64 of the tokens": 1 / 64, "1/16 of the tokens": 1 / 16, "1/4 of the tokens": 1 / 4, "two taps": 1.0}
SHOWN = {1: "25 % resident", 2: "40 % resident"}  # columns


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    measured = json.loads((HERE / "notes" / "reuse" / "documents.json").read_text(encoding="utf-8"))
    figure, (left, middle, right) = subplots(1, 3, 11, 3.2)
    draw_misses(left, measured)
    draw_sight(middle, measured["documents"])
    draw_learning(right, measured)
    OUT.write_text(svg(figure), encoding="utf-8")


def draw_misses(axes: "Axes", measured: dict[str, Any]) -> None:
    percent = [100 * share for share in measured["residencies"]]
    found = measured["documents"]
    rows = {
        "LRU": found["miss_rates"]["lru"], "LFRU, tuned": found["lfru"],
        "reuse forecast": found["miss_rates"]["shipped"], "Belady": found["miss_rates"]["belady"],
    }  # fmt: skip
    for label, rates in rows.items():
        axes.plot(percent, [100 * rate for rate in rates], marker="o", label=label)
    axes.set(xlabel="% of the experts in fast memory", ylabel="misses, %", ylim=(0, 80), title="held-out documents")
    axes.legend(frameon=False, fontsize=8)


def draw_sight(axes: "Axes", found: dict[str, Any]) -> None:
    sights = {int(name.split()[1]): row for name, row in found["closed"].items() if name.startswith("sees ")}
    for column, label in SHOWN.items():
        (line,) = axes.plot(list(sights), [row[column] for row in sights.values()], marker="o", label=label)
        axes.axhline(found["closed"]["shipped"][column], color=line.get_color(), linestyle="--")
    axes.set(
        xlabel="tokens ahead that are known exactly", ylabel="share of the gap closed", ylim=(0, 1),
        title="dashed: the forecast",
    )  # fmt: skip
    axes.legend(frameon=False, fontsize=8)


def draw_learning(axes: "Axes", measured: dict[str, Any]) -> None:
    found = measured["documents"]["closed"]
    tokens = [measured["variants"][name]["tokens"] for name in CURVE]
    for column, label in SHOWN.items():
        axes.plot(tokens, [found[name][column] for name in CURVE], marker="o", label=label)
    axes.axhline(0.2, color="grey", linestyle=":")
    axes.set_xscale("log")
    axes.set(
        xlabel="training tokens (two taps)", ylabel="share of the gap closed", ylim=(0, 0.4), title="learning curve"
    )
    axes.legend(frameon=False, fontsize=8, loc="lower right")


if __name__ == "__main__":
    guarded(main, debug=False)
