"""Verbs on expert packs: `pack`, `verify`, `unpack`."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from steerpipe.cli.shared import Debug, Json, app, guarded, progress_bar
from steerpipe.core.units import format_bytes

if TYPE_CHECKING:
    from steerpipe.store.pack import PackReport

Pack = Annotated[Path, typer.Argument(help="folder of a pack")]


@app.command()
def pack(
    model: Annotated[str, typer.Argument(help="checkpoint folder or hub name (owner/model)")],
    out: Annotated[Path, typer.Argument(help="folder to write; it appears whole or not at all")],
    experts: Annotated[str, typer.Option(help="native, float32, bf16, float16, int8 or int4")] = "native",
    dense: Annotated[str, typer.Option(help="native or int8")] = "native",
    group: Annotated[int | None, typer.Option(help="int4: inputs that share a scale")] = None,
    order: Annotated[Path | None, typer.Option(help="routing trace: experts that fire together lie together")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Turn a checkpoint into an expert pack. Killed and started again, it goes on where it stood."""

    def run() -> None:
        from steerpipe.model.checkpoint import open_checkpoint
        from steerpipe.model.hub import locate
        from steerpipe.store.formats import parse_dense_format, parse_expert_format
        from steerpipe.store.pack import PackOptions, write_pack

        options = PackOptions(parse_expert_format(experts), parse_dense_format(dense), group, order)
        with progress_bar("packing", quiet=as_json) as progress:
            report = write_pack(open_checkpoint(locate(model)), out, options, progress)
        print(json.dumps(asdict(report))) if as_json else _show_pack(report)

    guarded(run, debug)


@app.command()
def verify(folder: Pack, as_json: Json = False, debug: Debug = False) -> None:
    """Read every byte of a pack and say whether it is what was written. Exit status 1 if it is not."""

    def run() -> None:
        from steerpipe.store.verify import verify as verify_pack

        with progress_bar("verifying", quiet=as_json) as progress:
            report = verify_pack(folder, progress)
        if as_json:
            print(json.dumps(asdict(report)))
        else:
            checked = f"{report.experts} experts and {report.dense_tensors} dense tensors"
            print(f"{checked}, {format_bytes(report.checked_bytes)} read: {'good' if report.good else 'damaged'}")
            for problem in report.problems:
                print(f"  {problem}")
        if not report.good:
            raise SystemExit(1)

    guarded(run, debug)


@app.command()
def unpack(
    folder: Pack,
    out: Annotated[Path, typer.Argument(help="folder to write, in Hugging Face form")],
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Turn a pack back into a checkpoint folder that transformers loads."""

    def run() -> None:
        from steerpipe.store.unpack import unpack as unpack_pack

        with progress_bar("unpacking", quiet=as_json) as progress:
            report = unpack_pack(folder, out, progress)
        if as_json:
            print(json.dumps(asdict(report)))
        else:
            print(f"{report.folder}: {report.tensors} tensors as {report.dtype}, {format_bytes(report.total_bytes)}")

    guarded(run, debug)


def _show_pack(report: "PackReport") -> None:
    from rich.console import Console
    from rich.table import Table

    state = "was already there" if report.already_there else f"resumed at {report.resumed_experts} experts"
    state = state if report.already_there or report.resumed_experts else "written"
    table = Table(title=f"{report.folder}: {format_bytes(report.total_bytes)}, {state}", title_justify="left")
    for name in ("part", "format", "bytes", "bits per weight", "relative RMS error"):
        table.add_column(name, justify="left" if name in ("part", "format") else "right")
    errors = report.loss.relative_rms
    expert_error = max(errors[kind] for kind in ("gate", "up", "down"))
    rows = (
        (f"{report.experts} experts", report.expert_format, report.expert_file_bytes,
         report.loss.expert_bits_per_weight, expert_error),
        ("dense", report.dense_format, report.dense_file_bytes, report.loss.dense_bits_per_weight, errors["dense"]),
    )  # fmt: skip
    for part, form, size, bits, error in rows:
        table.add_row(part, form, format_bytes(size), f"{bits:.2f}", f"{error:.4f}" if error else "0")
    Console().print(table)
