"""What the verbs share: the app, common options, errors turned into exit statuses, progress on stderr."""

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, NoReturn

import typer

from steerpipe.core.errors import SteerpipeError

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

Model = Annotated[str | None, typer.Argument(help="checkpoint folder, pack, or hub name (owner/model)")]
Json = Annotated[bool, typer.Option("--json", help="print one JSON object on stdout and nothing else")]
Predict = Annotated[
    str | None,
    typer.Option(help="move experts before they are needed: auto (by whom it pays), on, or off"),
]
Debug = Annotated[bool, typer.Option("--debug", help="show the traceback of an error")]


def guarded(run: Callable[[], None], debug: bool) -> None:
    """Runs a verb; an error becomes two lines on stderr and an exit status."""
    try:
        run()
    except SteerpipeError as error:
        if debug:
            traceback.print_exc()
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_status) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    except BrokenPipeError:  # the reader has left
        _silence_stdout()
        raise SystemExit(0) from None
    except OSError as problem:  # of files that we read there are errors of our own; this is the output
        _silence_stdout()
        _fail(f"{problem.strerror or problem}", "check where the output goes, and the room there", debug)
    except (MemoryError, RuntimeError) as problem:
        if isinstance(problem, RuntimeError) and "alloc" not in str(problem) and "out of memory" not in str(problem):
            raise
        _fail("there is not enough memory", "give the experts less (--fast-memory), or lower --max-context", debug)


def _fail(what: str, fix: str, debug: bool) -> NoReturn:
    if debug:
        traceback.print_exc()
    print(f"error: {what}\n  fix: {fix}", file=sys.stderr)
    raise SystemExit(1)


def _silence_stdout() -> None:
    """Python's own last flush must not find out again that nobody reads."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def progress_bar(what: str, *, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """Shows (done, total) bytes on stderr while the block runs; only to a terminal, and not when `quiet`."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def step_progress(*, quiet: bool) -> Iterator[Callable[[str, int, int], None]]:
    """(what, done, total) on stderr while the block runs; only to a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task("reading", total=None)
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)


def quiet_transformers() -> None:
    """Its notices and bars are about files that we have checked ourselves."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
