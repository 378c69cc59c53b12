"""A picture of both streams of recorded steps: what was computed above what was copied, on one axis.

    python benchmarks/plot_timeline.py "LFRU=lfru.json" "LFRU + heads=heads.json" --out FILE.svg [--ms 2.5] [--align]

Files are Chrome traces as core/timeline.py writes them. Below each picture stands for how long copies ran while the
device computed attention and routers: on demand they cannot. --align: for recordings whose two clocks were not laid
over each other well: copies are moved back by the least that lets no experts end before a block that they waited for.
"""

import argparse
import json
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from steerpipe.core.timeline import Span, overlap_seconds

WIDTH, LEFT, ROW, GAP = 1100, 120, 34, 6
COLOURS = {"attention": "#4c78a8", "experts": "#b8cbe0", "block": "#f58518", "part": "#54a24b"}
LEGEND = {
    "attention": "attention and router", "experts": "experts, and their wait", "block": "a whole block, on demand",
    "part": "a part: a guess, or its rest",
}  # fmt: skip


def read_spans(file: Path) -> dict[str, list[Span]]:
    """By lane, in seconds from the first span."""
    events: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    lanes = {each["tid"]: each["args"]["name"] for each in events if each["ph"] == "M"}
    found: dict[str, list[Span]] = {name: [] for name in lanes.values()}
    for each in events:
        if each["ph"] == "X":
            lane, begin = lanes[each["tid"]], each["ts"] / 1e6
            found[lane].append(Span(lane, each["name"], begin, begin + each["dur"] / 1e6))
    return found


def aligned(lanes: dict[str, list[Span]]) -> dict[str, list[Span]]:
    compute, copies = lanes["stream 0: compute"], lanes["stream 1: copies"]
    ends = {span.name.split(":")[0]: span.end for span in compute if "experts" in span.name}
    waited = [span for span in copies if kind(span) == "block"]  # a whole block was demanded
    shift = max(span.end - ends[" ".join(span.name.split()[:2])] for span in waited)
    print(f"copies are moved by {shift * 1e6:.0f} us")
    moved = [Span(span.lane, span.name, span.begin - shift, span.end - shift) for span in copies]
    return {"stream 0: compute": compute, "stream 1: copies": moved}


def kind(span: Span) -> str:
    if span.lane.startswith("stream 0"):
        return "attention" if "attention" in span.name else "experts"
    return "part" if "bytes" in span.name else "block"


def draw(steps: dict[str, dict[str, list[Span]]], seconds: float) -> str:
    scale, y, parts = (WIDTH - LEFT - 10) / seconds, 20, []
    for title, lanes in steps.items():
        parts.append(f'<text x="{LEFT}" y="{y}" class="t">{escape(title)}</text>')
        y += 8
        for lane in sorted(lanes):
            parts.append(f'<text x="4" y="{y + ROW / 2 + 4:.0f}">{escape(lane)}</text>')
            for span in lanes[lane]:
                if span.begin < seconds:
                    width = (min(span.end, seconds) - span.begin) * scale
                    parts.append(
                        f'<rect x="{LEFT + span.begin * scale:.1f}" y="{y}" width="{max(width, 0.4):.1f}" '
                        f'height="{ROW}" fill="{COLOURS[kind(span)]}"/>'
                    )
            y += ROW + GAP
        computing = [span for span in lanes["stream 0: compute"] if kind(span) == "attention"]
        under, whole = overlap_seconds(lanes["stream 1: copies"], computing), sum(span.seconds for span in computing)
        parts.append(
            f'<text x="{LEFT}" y="{y + 10}">copies run during {under * 1e3:.2f} ms of {whole * 1e3:.2f} ms of attention'
            " and routers, in the whole step</text>"
        )
        y += 40
    for number in range(int(seconds * 2000) + 1):
        x = LEFT + number / 2000 * scale
        parts.append(f'<text x="{x:.0f}" y="{y}" text-anchor="middle">{number / 2:g} ms</text>')
    y += 24
    for number, (name, words) in enumerate(LEGEND.items()):
        x = LEFT + number * 245
        parts.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{COLOURS[name]}"/>')
        parts.append(f'<text x="{x + 16}" y="{y}">{escape(words)}</text>')
    style = "text{font:11px sans-serif;fill:#333}.t{font-weight:bold;font-size:13px}"
    size = f'width="{WIDTH}" height="{y + 14}" viewBox="0 0 {WIDTH} {y + 14}"'
    ground = '<rect width="100%" height="100%" fill="#fff"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{style}</style>{ground}{"".join(parts)}</svg>\n'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="+", help="TITLE=FILE")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ms", type=float, default=2.5, help="how much of the step is drawn")
    parser.add_argument("--align", action="store_true")
    given = parser.parse_args()
    steps = {title: read_spans(Path(file)) for title, file in (each.split("=", 1) for each in given.steps)}
    if given.align:
        steps = {title: aligned(lanes) for title, lanes in steps.items()}
    given.out.write_text(draw(steps, given.ms / 1e3), encoding="utf-8")


if __name__ == "__main__":
    main()
