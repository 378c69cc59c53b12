"""Tables for a terminal."""

from collections.abc import Iterator

from rich.table import Table

from steerpipe.arena.results import ArenaResult
from steerpipe.arena.rows import TextTable, amdahl_table, cost_table, metrics_table, worth_table


def render(result: ArenaResult) -> Iterator[Table | str]:
    """What a rich Console prints, one after the other."""
    yield _table(metrics_table(result))
    yield from (f"{entry.name} is out: {entry.refused}" for entry in result.refused)
    yield _table(cost_table(result))
    yield from (_table(worth_table(each, result.worth_tokens)) for each in result.worth)
    if any(each.entries for each in result.worth):
        yield _table(amdahl_table(result))


def _table(text: TextTable) -> Table:
    table = Table(title=text.title, caption=text.caption, title_justify="left", caption_justify="left")
    first, *others = text.headings
    table.add_column(first)
    for heading in others:
        table.add_column(heading, justify="right")
    for row in text.rows:
        table.add_row(*row)
    return table
