"""Draws docs/pictures/history-learning.svg: recall of the seed's networks over training tokens and over steps.

    python benchmarks/plot_history.py

Reads benchmarks/notes/2026-11-15-predictors-long.json. Needs the extra [plots].
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
OUT = HERE.parent / "docs" / "pictures" / "history-learning.svg"
SHARES = ("1/8", "1/4", "1/2", "1")
LINES = {
    "transformer, layer 12, window both": "ExpertTransformer, layers and tokens",
    "mlp, layer 12, window both": "MLP, layers and tokens",
    "mlp, layer 12, window layers": "MLP, layers",
}
ALONE = {
    "transformer, layer 12, window layers": "ExpertTransformer, layers",
    "lstm, layer 12, window layers": "LSTM, layers",
}


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    measured = json.loads((HERE / "notes" / "2026-11-15-predictors-long.json").read_text(encoding="utf-8"))
    figure, (left, right) = subplots(1, 2, 9, 3.2, share_y=True)
    draw_tokens(left, measured["predictors"])
    draw_steps(right, measured["predictors"])
    OUT.write_text(svg(figure), encoding="utf-8")


def draw_tokens(axes: "Axes", found: dict[str, Any]) -> None:
    for key, label in LINES.items():
        entries = [found[f"{key}, {share} of the tokens"] for share in SHARES]
        named = f"{label}, {entries[0]['steps']:,} steps"
        axes.plot([each["training"]["tokens"] for each in entries], [*map(recall, entries)], marker="o", label=named)
    axes.set_xscale("log")
    axes.set(xlabel="training tokens", ylabel="recall@4, layer 12, two ahead", title="over data")
    finish(axes)


def draw_steps(axes: "Axes", found: dict[str, Any]) -> None:
    for key, label in LINES.items():
        entries = [found[f"{key}, 1 of the tokens"], found[key]]
        axes.plot([each["steps"] for each in entries], [*map(recall, entries)], marker="o", label=label)
    for key, label in ALONE.items():
        axes.plot([found[key]["steps"]], [recall(found[key])], marker="s", linestyle="", label=label)
    axes.set_xscale("log")
    axes.set(xlabel="steps of 4,096 decisions, all tokens", title="over steps")
    finish(axes)


def finish(axes: "Axes") -> None:
    axes.axhline(0.7, color="grey", linestyle=":")
    axes.legend(frameon=False, fontsize=7, loc="lower right")


def recall(entry: dict[str, Any]) -> float:
    return float(entry["decisions"]["layer 12, 2 ahead"]["recall"])


if __name__ == "__main__":
    guarded(main, debug=False)
