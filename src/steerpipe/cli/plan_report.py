"""A plan for a terminal."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from steerpipe.core.units import format_bytes

if TYPE_CHECKING:
    from steerpipe.runtime.planner import Cover, Floor
    from steerpipe.runtime.plans import ModelPlan


def show(plan: "ModelPlan") -> None:
    """What lies where, floors, covers."""
    placement, console = plan.placement, Console(highlight=False)
    geometry = placement.geometry
    console.print(
        f"{placement.folder}: {geometry.layers} layers of {geometry.experts} experts, {geometry.top_k} per token; "
        f"a block is {format_bytes(geometry.block_bytes)}; on {placement.device}"
    )
    table = _table("", "where", "bytes", "")
    for row in placement.memory:
        table.add_row(row.what, row.where, format_bytes(row.size_bytes), row.why)
    console.print(table)
    rate = f"weights read once at {plan.memory_rate / 1e9:.1f} GB/s, missing blocks at the links' full rates"
    _show_floors(console, f"time per token at least ({rate})", plan.tokens)
    _show_floors(
        console, "time to the first token at least (16 tokens: the rest was computed while it was typed)", plan.prompts
    )
    if not plan.typing:
        console.print("every expert is resident: there is nothing to cover")
        return
    show_covers(geometry.block_bytes, plan.typing_tokens_per_second, plan.typing)
    console.print(
        "  in tokens generated: " + ", ".join(f"{_tokens(each.tokens)} from {each.link}" for each in plan.generating)
    )
    show_covers(plan.missing_bytes, plan.typing_tokens_per_second, plan.typing_missing, "all experts that have no slot")


def show_covers(
    amount_bytes: int, tokens_per_second: float, covers: "Sequence[Cover]", what: str = "one block"
) -> None:
    """Per link: the transfer of so many bytes, and the tokens of typing that cover it."""
    amount = f"{amount_bytes / 1e9:.3g} GB" if amount_bytes >= 10**8 else format_bytes(amount_bytes)
    table = _table("from", "GB/s", "takes", "tokens typed", "in whole ones")
    for each in covers:
        table.add_row(
            each.link, f"{each.bytes_per_second / 1e9:.1f}", _time(each.seconds), _tokens(each.tokens),
            f"{each.least} to {each.most}",
        )  # fmt: skip
    console = Console(highlight=False)
    console.print(f"[bold]{what}, {amount}, while somebody types {tokens_per_second:.3g} tokens per second[/bold]")
    console.print(table)


def _show_floors(console: Console, title: str, floors: "Sequence[Floor]") -> None:
    shared = [floor.shared_seconds for floor in floors]
    table = _table("", "hits", "every miss waited for", "all misses hidden", *(["with CPU"] if any(shared) else []))
    for floor, split in zip(floors, shared, strict=True):
        times = (floor.demand_seconds, floor.hidden_seconds, *(() if split is None else (split,)))
        table.add_row(floor.what, f"{floor.hit_rate:.0%}", *map(_time, times))
    console.print(f"[bold]{title}[/bold]")
    console.print(table)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if column in ("", "from", "where") or not number else "right")
    return table


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e3:.3f} ms"


def _tokens(tokens: float) -> str:
    return f"{tokens:.1f}" if tokens >= 0.1 else f"{tokens:.2g}"
