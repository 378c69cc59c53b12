"""`steerpipe trace`: how a model routes a file of prompts, kept in a folder."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from steerpipe.cli import options
from steerpipe.cli.shared import Debug, Json, app, guarded, quiet_transformers
from steerpipe.core.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from steerpipe.trace.collect import Stand
    from steerpipe.trace.tracing import Tracer

EMBEDDED = "embedded"


@app.command()
def trace(
    model: Annotated[str, typer.Argument(help=f"checkpoint folder, pack, hub name, or '{EMBEDDED}'")],
    prompts: Annotated[Path, typer.Argument(help="JSONL (.gz too): prompt, text, messages or turns, and perhaps id")],
    out: Annotated[Path, typer.Argument(help="folder of the trace; an unfinished one is gone on with")],
    generate: Annotated[int, typer.Option(help="most tokens of an answer to each prompt; 0: prompts alone")] = 0,
    batch: Annotated[int, typer.Option(help="prompts that are answered together (with steerpipe)")] = 1,
    engine: Annotated[str, typer.Option(help="steerpipe, or transformers for any MoE model it knows")] = "steerpipe",
    weights: Annotated[bool, typer.Option("--weights", help="keep the routing weights too, as float16")] = False,
    states: Annotated[bool, typer.Option("--states", help="keep hidden states too (with transformers)")] = False,
    limit: Annotated[int | None, typer.Option(help="only the first prompts of the file")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="prompts as they are, without the chat template")] = False,
    window: Annotated[int | None, typer.Option(help="most tokens of a sequence; default: the context")] = None,
    seed: Annotated[int, typer.Option(help="of the answers")] = 0,
    device: options.Device = None,
    dtype: options.Dtype = None,
    threads: options.Threads = None,
    batch_tokens: Annotated[int | None, typer.Option(help="of one pass over prompts (with transformers)")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Record which experts each token is routed to. Stopped at any moment, it goes on when it is started again."""

    def run() -> None:
        from steerpipe.trace.collect import collect_trace, trace_options
        from steerpipe.trace.prompts import read_prompts

        if batch_tokens is not None and batch_tokens < 1:
            raise ConfigError(f"--batch-tokens {batch_tokens}", fix="give 1 or more; without it the device decides")
        listed = read_prompts(prompts, limit)
        settings = {"device": device, "dtype": dtype, "threads": threads, "max_batch": max(batch, 1)}
        with (
            _open_tracer(engine, None if model == EMBEDDED else model, settings, batch_tokens) as tracer,
            _progress(out, quiet=as_json) as report,
        ):
            options = trace_options(
                tracer.model,
                window=window,
                generate=generate,
                weights=weights,
                states=states,
                raw=raw,
                seed=seed,
                batch=batch,
            )
            began = time.perf_counter()
            stand = collect_trace(tracer, listed, out, options, report)
            seconds = time.perf_counter() - began
        if as_json:
            print(json.dumps(_as_json(stand, out, tracer, seconds)))

    guarded(run, debug)


@contextmanager
def _open_tracer(
    engine: str, model: str | None, settings: dict[str, Any], batch_tokens: int | None
) -> "Iterator[Tracer]":
    quiet_transformers()
    if engine == "steerpipe":
        from steerpipe.core.config import load_config
        from steerpipe.trace.engine import EngineTracer

        if batch_tokens is not None:
            raise ConfigError("--batch-tokens is for transformers", fix="leave it out, or add --engine transformers")
        with EngineTracer(model, load_config(settings)) as tracer:
            yield tracer
    elif engine == "transformers":
        from steerpipe.trace.hooked import open_hooked

        yield open_hooked(model, settings["device"], settings["dtype"], settings["threads"], batch_tokens)
    else:
        raise ConfigError(f"--engine is {engine!r}", fix="choose steerpipe or transformers")


@contextmanager
def _progress(out: Path, *, quiet: bool) -> "Iterator[Callable[[Stand], None]]":
    """A bar on stderr, to a terminal; what was found, left out and reached is said in any case, unless `quiet`."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True, highlight=False, soft_wrap=True, quiet=quiet)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    latest: list[Stand] = []
    began = time.perf_counter()
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task("tracing", total=None)

        def report(stand: "Stand") -> None:
            if not latest:
                _say_start(console, stand, out)
            latest[:] = [stand]
            rate = stand.new_tokens / (time.perf_counter() - began)
            told = f"{stand.tokens:,} tokens, {rate:,.0f}/s"
            bar.update(task, description=told, completed=stand.finished, total=stand.prompts)

        try:
            yield report
        except BaseException:
            if latest and latest[0].finished:
                console.print(f"{latest[0].finished} prompts are kept in {out}: the same command goes on with them")
            raise
    if latest:
        _say_end(console, latest[0], time.perf_counter() - began, out)


def _say_start(console: "Console", stand: "Stand", out: Path) -> None:
    if stand.resumed:
        torn = f"; {stand.lost_bytes} bytes of an unfinished one were cut off" if stand.lost_bytes else ""
        console.print(f"{out} has {stand.resumed} of {stand.prompts} prompts already ({stand.tokens:,} tokens){torn}")
    if stand.too_long:
        console.print(
            f"{len(stand.too_long)} prompts leave no room for an answer and are left out: {stand.too_long[0]}"
        )


def _say_end(console: "Console", stand: "Stand", seconds: float, out: Path) -> None:
    console.print(
        f"{stand.finished} prompts, {stand.tokens:,} tokens in {out}; {stand.new_tokens:,} new ones in {seconds:.1f} s "
        f"({stand.new_tokens / seconds:,.0f} per second)"
    )


def _as_json(stand: "Stand", out: Path, tracer: "Tracer", seconds: float) -> dict[str, Any]:
    return {
        "folder": str(out),
        "model": asdict(tracer.model),
        **asdict(stand),
        "seconds": seconds,
        "tokens_per_second": stand.new_tokens / seconds,
        "bytes": sum(file.stat().st_size for file in out.iterdir() if file.is_file()),
    }
