"""Pictures of an arena as SVG text. Needs the extra [plots]; matplotlib is imported when something is drawn."""

import io
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from steerpipe.arena.entries import Role
from steerpipe.arena.results import ArenaResult, EntryResult
from steerpipe.arena.worth import BELADY, LFRU, REUSE, MachineWorth
from steerpipe.core.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FONTS = re.compile(r"('DejaVu Sans'), [^;\"]*sans-serif")  # the first of a list, and whatever there is
_FRACTION = re.compile(r"(?<=[ \"(,LM])-?\d+\.\d{3,}")  # a hundredth of a point is not seen
_PLACE = re.compile(r'(?<= )(?:d|x|y)="[^"]*"')  # of a line or a mark: nor is a tenth
_PATH = re.compile(r'(?<= d=")[^"]*')
_ALONE = re.compile(r"<g>(<(?:use|path) [^>]*/>|<text [^>]*>[^<]*</text>)</g>")  # a group of one
_STYLE = re.compile(r' style="([^"]*)"')
_IDLE = re.compile(r'<metadata>.*?</metadata>|(?<=<g) id="([^"]*)"| transform="rotate\(-0 [^)]*\)"')  # draws nothing
_COLOURS = [f"C{number}" for number in range(10) if number != 7]  # the seventh is grey, as bounds and control are


def draw_all(result: ArenaResult) -> dict[str, str]:
    """Name → SVG. The worth of forecasts only where machines were replayed."""
    pictures = {
        "recall-by-layer": svg(_recall_by_layer(result)),
        "recall-and-cost": svg(_recall_and_cost(result)),
        "calibration": svg(_calibration(result)),
    }
    if result.worth:
        pictures["worth"] = svg(_worth(result))
    return pictures


def _recall_by_layer(result: ArenaResult) -> "Figure":
    horizons = sorted({each.horizon for entry in result.entries for each in entry.horizons})
    layers = result.setting.geometry.layers
    figure, axes = subplots(1, len(horizons), 3.4 * len(horizons) + 1.6, 3.6)
    for axis, horizon in zip(axes, horizons, strict=True):
        for entry, style in _styled(result):
            if at := entry.at(horizon):
                shown = [(layer, 100 * each.recall) for layer, each in enumerate(at.layers) if each is not None]
                mark = "o" if len(shown) == 1 else ""
                axis.plot(*zip(*shown, strict=True), label=entry.name, linewidth=1, marker=mark, markersize=3, **style)
        axis.axhline(100 * result.setting.chance, color="grey", linestyle=":", linewidth=0.8)
        axis.set(title=_ahead(horizon), xlabel="layer", ylim=(0, 101), xticks=range(0, layers, max(1, layers // 6)))
    axes[0].set_ylabel(f"recall@{result.setting.geometry.top_k}, %")
    _legend(figure, axes)
    return figure


def _recall_and_cost(result: ArenaResult) -> "Figure":
    figure, axes = subplots(1, 2, 9.0, 3.6)
    for entry, style in _styled(result):
        points = [(each.overall.recall, each.overall.recall_on_misses) for each in entry.horizons]
        if not points or entry.cpu is None:
            continue
        best = 100 * max(recall for recall, _ in points)
        marked = {"color": style["color"], "linestyle": "none", "marker": "o", "fillstyle": _fill(style)}
        axes[0].plot([max(entry.cpu.eager_microseconds, 1.0)], [best], label=entry.name, **marked)
        axes[1].plot([entry.parameters or 1], [best], **marked)
    axes[0].set(xscale="log", xlabel="microseconds per token, CPU", ylabel="recall at its best horizon, %")
    axes[1].set(xscale="log", xlabel="parameters (1: none)")
    _legend(figure, axes)
    return figure


def _calibration(result: ArenaResult) -> "Figure":
    figure, axes = subplots(1, 1, 5.6, 3.6)
    axes[0].plot([0, 1], [0, 1], color="grey", linestyle=":", linewidth=0.8)
    for entry, style in _styled(result):
        if entry.role is Role.CONTESTANT and entry.horizons:
            bins = entry.horizons[0].calibration
            axes[0].plot([each.said for each in bins], [each.happened for each in bins], label=entry.name, **style)
    axes[0].set(xlabel="probability as said", ylabel="share that was so", xlim=(0, 1), ylim=(0, 1))
    axes[0].set_title("each at its shortest horizon", fontsize=9)
    _legend(figure, axes)
    return figure


def _worth(result: ArenaResult) -> "Figure":
    """What forecasts save over LFRU, in percent of its TPOT, beside both oracles."""
    names = [run.name for run in (*result.worth[0].entries, *result.worth[0].with_reuse)]
    oracles = [BELADY, *(run.name for run in result.worth[0].baselines if run.name.startswith("perfect"))]
    figure, axes = subplots(1, 1, 2.2 + 0.62 * len(result.worth) * max(1.0, len(names) / 8), 4.2)
    styles = dict(_names_styled(result))
    for number, name in enumerate([*names, *oracles]):
        saved = [100 * _saved(each, name) for each in result.worth]
        shift = (number - len(names) / 2) * 0.8 / (len(names) + len(oracles))
        places = [machine + shift for machine in range(len(saved))]
        axes[0].plot(places, saved, linestyle="none", markersize=4, label=name, **_mark(name, styles))
    axes[0].axhline(0, color="grey", linewidth=0.8)
    axes[0].set_xticks(
        range(len(result.worth)), [each.machine.name for each in result.worth], rotation=60, ha="right", fontsize=7
    )
    axes[0].set(ylabel="TPOT saved over LFRU, % (simulated)")
    _legend(figure, axes)
    return figure


def _saved(worth: MachineWorth, name: str) -> float:
    run = next(each for each in (*worth.baselines, *worth.entries, *worth.with_reuse) if each.name == name)
    return 1 - run.tpot_mean_seconds / worth.baseline(LFRU).tpot_mean_seconds


def _mark(name: str, styles: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Oracles are black; an entry has its colour, and another shape where eviction is by the reuse forecast."""
    entry = name.removesuffix(f" + {REUSE}")
    if entry in styles:
        style = styles[entry]
        return {"color": style["color"], "marker": "o" if entry == name else "^", "fillstyle": _fill(style)}
    return {"color": "black", "marker": {BELADY: "x", REUSE: "+"}.get(name, "_")}


def _fill(style: Mapping[str, Any]) -> str:
    """Of a marker: colours come again, with dashes, which a marker has none of."""
    return "full" if style["linestyle"] == "-" else "none"


def _names_styled(result: ArenaResult) -> Iterator[tuple[str, dict[str, Any]]]:
    yield from ((entry.name, style) for entry, style in _styled(result))


def _styled(result: ArenaResult) -> Iterator[tuple[EntryResult, dict[str, Any]]]:
    """Each entry in the same colour in every picture; bounds and control are grey."""
    number = 0
    for entry in result.entries:
        if entry.role is Role.CONTESTANT:
            colour = _COLOURS[number % len(_COLOURS)]
            yield entry, {"color": colour, "linestyle": ("-", "--", "-.")[number // len(_COLOURS) % 3]}
            number += 1
        else:
            yield entry, {"color": "grey", "linestyle": "--"}


def _ahead(horizon: int) -> str:
    if horizon == 0:
        return "before the attention"
    return f"{horizon} layer{'s' if horizon > 1 else ''} ahead"


def subplots(
    rows: int, columns: int, width: float, height: float, *, share_y: bool = False
) -> "tuple[Figure, list[Axes]]":
    """A figure that is the same file each time it is drawn; inches. ConfigError where matplotlib is not installed."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("pictures need matplotlib", fix="pip install 'steerpipe[plots]'") from None
    mpl.rcParams.update({"svg.hashsalt": "steerpipe", "font.size": 9, "svg.fonttype": "none"})
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(rows, columns, sharey=share_y, squeeze=False)
    return figure, list(axes.flat)


def _legend(figure: "Figure", axes: "list[Axes]") -> None:
    lines = {label: line for axis in axes for line, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(list(lines.values()), list(lines), loc="outside right upper", frameon=False, fontsize=7)


def svg(figure: "Figure") -> str:
    """As it is kept: slim, and without a date."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    return slim(text.getvalue())


def slim(picture: str) -> str:
    """The same picture in fewer bytes: short numbers and names, one line, styles that come often written once, nothing
    that draws nothing."""
    rounded = _FRACTION.sub(lambda number: f"{float(number[0]):.2f}", picture)
    rounded = _PLACE.sub(lambda place: re.sub(r"\d+\.\d+", lambda at: f"{float(at[0]):.1f}", place[0]), rounded)
    line = " ".join(re.sub(r">\s+<", "><", _FONTS.sub(r"\1, sans-serif", rounded)).split())
    line = line.replace("xlink:href=", "href=").replace(' xmlns:xlink="http://www.w3.org/1999/xlink"', "")
    line = _PATH.sub(lambda path: re.sub(" ?([A-Za-z]) ?", r"\1", path[0]), line)
    line = _IDLE.sub(lambda found: found[0] if found[1] and f"#{found[1]}" in line else "", line)
    while (fewer := _ALONE.sub(r"\1", line)) != line:
        line = fewer
    often = [style for style, count in Counter(_STYLE.findall(line)).items() if count > 2]
    own = f"p{zlib.crc32(line.encode()) & 0xFF:x}"  # pictures of one page hardly ever share their classes
    for number, name in enumerate(dict.fromkeys(re.findall(r'id="([mp][0-9a-f]{10})"', line))):
        line = line.replace(name, f"{own}{number}")
    names = {style: f"{own}-{number}" for number, style in enumerate(often)}
    line = _STYLE.sub(lambda found: f' class="{names[found[1]]}"' if found[1] in names else found[0], line)
    rules = "".join(f".{name}{{{style}}}" for style, name in names.items())
    return (re.sub(r"(<svg [^>]*>)", rf"\1<style>{rules}</style>", line, count=1) if rules else line) + "\n"
