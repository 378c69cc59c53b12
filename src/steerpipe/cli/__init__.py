"""The command line. Each verb parses its options, calls one function, and shows the result.

Results go to stdout, everything else (progress, choices, errors) to stderr. Bad input exits with status 2 and no
traceback unless --debug is given.
"""

import io
import os
import sys
from typing import Annotated

import typer

from steerpipe import __version__
from steerpipe.cli import (
    arena,
    bench,
    calibrate,
    chat,
    generate,
    machine,
    packs,
    plan,
    replay,
    report,
    serve,
    trace,
    train,
)
from steerpipe.cli.shared import app

__all__ = [
    "app", "arena", "bench", "calibrate", "chat", "generate", "machine", "main", "packs", "plan", "replay", "report",
    "serve", "trace", "train",
]  # fmt: skip


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"steerpipe {__version__}")
        raise typer.Exit


@app.callback()
def steerpipe(
    version: Annotated[
        bool, typer.Option("--version", help="show the version", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Run Mixture-of-Experts language models that are larger than the fast memory they run on."""


def main() -> None:
    if sys.stdout is None:  # closed by whoever started us: there is nobody to tell
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  stays open as long as we do
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character shows another
    app()
