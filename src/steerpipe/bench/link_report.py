"""The links for people."""

from rich.table import Table

from steerpipe.bench.link import LinkReport
from steerpipe.core.units import format_bytes


def render_links(report: LinkReport) -> Table:
    """Pinned memory by block size; what else was measured stands below it."""
    table = Table(title=f"host memory to {report.device}, GB/s", title_justify="left", caption_justify="left")
    table.add_column("block")
    for heading in ("one copy", "queued", "scattered", "us to issue"):
        table.add_column(heading, justify="right")
    for each in report.pinned:
        rates = (each.single, each.queued, each.scattered)
        issue = f"{each.issue_seconds * 1e6:.1f}"
        table.add_row(format_bytes(each.block_bytes), *(f"{rate / 1e9:.1f}" for rate in rates), issue)
    ceiling = f"ceiling of the slot {report.ceiling / 1e9:.1f} · " if report.ceiling else ""
    disk = f" · disk {report.disk / 1e9:.2f}" if report.disk else ""
    table.caption = (
        f"{ceiling}pageable {report.pageable / 1e9:.1f} · through the ring {report.ring / 1e9:.1f}{disk} · ids back "
        f"{report.ids_seconds * 1e6:.1f} us · pinning: {report.fill_seconds_per_gib:.2f} s/GiB to touch, "
        f"{report.pin_seconds_per_gib:.2f} to register"
    )
    return table
