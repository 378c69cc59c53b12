"""`steerpipe bench serve`: what is printed, and where the JSON goes."""

import json
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from rich.console import Console

from steerpipe.bench.report import machine, write_json
from steerpipe.bench.serve import ServeOptions, ratio, render_serve, run_serve
from steerpipe.bench.serve_client import Target, own_server
from steerpipe.core.errors import InputError


def parse_clients(text: str) -> tuple[int, ...]:
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        counts = ()
    if not counts or min(counts) < 1:
        raise InputError(f"--clients is {text!r}", fix="give numbers, fewest first: 1,8")
    return counts


def serve(
    options: ServeOptions, *, url: str | None, key: str | None, arguments: Sequence[str], json_file: Path | None
) -> None:
    """Figures as they come, the table, and one JSON line last. `arguments` go to a server of its own."""
    console = Console(highlight=False)
    with nullcontext(Target.of(url, key)) if url else own_server(arguments) as target:
        runs = run_serve(target, options, lambda text: console.print(text))
        with target.request("GET", "/props") as answer:
            props = json.loads(answer.read())
    content = {
        "model": props["model"], "settings": props["settings"], "max_batch": props["max_batch"],
        "runs": [run.as_json() for run in runs], "ratio": ratio(runs), "machine": machine(props["settings"]["device"]),
    }  # fmt: skip
    console.print(render_serve(runs, props["model"]))
    write_json(json_file, content)
    print(json.dumps(content))
