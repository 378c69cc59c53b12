"""One HTML file with everything: tables, pictures, the JSON. No script, no style sheet, no font from elsewhere."""

import html
import json
from collections.abc import Mapping

from steerpipe.arena.results import ArenaResult
from steerpipe.arena.rows import TextTable, amdahl_table, cost_table, metrics_table, summary_table, worth_table

_STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 80rem; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; font-size: 13px; display: block; overflow-x: auto }
th, td { padding: .15rem .6rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap }
th:first-child, td:first-child { text-align: left }
figure { margin: 1.5rem 0; overflow-x: auto } figcaption, p.note { color: #666; font-size: 12px; max-width: 60rem }
svg { max-width: 100%; height: auto }
"""


def write_page(result: ArenaResult, pictures: Mapping[str, str]) -> str:
    """The whole file. `pictures`: name → SVG, as `plots.draw_all` gives them; none is fine."""
    parts = [
        "<!doctype html>", '<html lang="en">', "<head>", '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width">', "<title>steerpipe arena</title>",
        f"<style>{_STYLE}</style>", "</head>", "<body>", "<h1>steerpipe arena</h1>",
        _table(metrics_table(result)),
    ]  # fmt: skip
    parts += [f"<p><b>{_text(each.name)}</b> is out: {_text(each.refused or '')}</p>" for each in result.refused]
    parts += [_picture(name, pictures[name]) for name in ("recall-by-layer", "calibration") if name in pictures]
    parts.append(_table(cost_table(result)))
    parts += [_picture(name, pictures[name]) for name in ("recall-and-cost", "worth") if name in pictures]
    if result.worth:
        parts.append(_table(summary_table(result.worth)))
    if any(each.entries for each in result.worth):
        parts.append(_table(amdahl_table(result)))
    for each in result.worth:
        parts.append(f"<details><summary>{_text(each.machine.name)}</summary>")
        parts.append(_table(worth_table(each, result.worth_tokens)) + "</details>")
    figures = json.dumps(result.as_json()).replace("</", "<\\/")
    parts.append(f'<script type="application/json" id="arena">{figures}</script>')
    return "\n".join([*parts, "</body>", "</html>", ""])


def _table(table: TextTable) -> str:
    head = "".join(f"<th>{_text(each)}</th>" for each in table.headings)
    rows = "\n".join("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in table.rows)
    return (
        f"<h2>{_text(table.title)}</h2>\n<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table>\n"
        f'<p class="note">{_text(table.caption)}</p>'
    )


def _picture(name: str, svg: str) -> str:
    """Inline: from the <svg> on, for a document type inside a page is not allowed."""
    return f"<figure>{svg[svg.index('<svg') :]}<figcaption>{_text(name.replace('-', ' '))}</figcaption></figure>"


def _text(words: str) -> str:
    return html.escape(words)
