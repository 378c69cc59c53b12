"""The benchmark as a command: what is printed, and where the JSON goes. Without the packages of the command line, so
that `python -m steerpipe.bench` runs where only torch, Triton and rich are installed.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from steerpipe.bench.decode import run_decode
from steerpipe.bench.options import DEVICES, DRIVERS, DecodeOptions, parse_options
from steerpipe.bench.report import as_json, machine, render, render_curves, write_json
from steerpipe.bench.shapes import SHAPES
from steerpipe.core.errors import InputError, SteerpipeError

_PIPE_COLUMNS = 160  # where nobody says how wide a line may be


def decode(options: DecodeOptions, json_file: Path | None) -> None:
    """Floors, figures as they come, the table, and one JSON line last; everything in `json_file` as it grows."""
    _check_folder(json_file)
    console = _console()

    def say(text: str) -> None:
        console.print(text, soft_wrap=True)

    findings = run_decode(options, say, lambda found: write_json(json_file, as_json(found)))
    if findings.curves:
        console.print(render_curves(findings.curves, findings.runs[0].routing))
    console.print(render(findings))
    print(json.dumps(as_json(findings)))


def link(json_file: Path | None, folder: Path | None = None) -> None:
    """Rates as they are measured, the table, and one JSON line last. `folder`: on a disk that is measured too."""
    from steerpipe.bench.link import measure_links  # the CUDA driver
    from steerpipe.bench.link_report import render_links

    _check_folder(json_file)
    if folder is not None and not folder.is_dir():
        raise InputError(f"{folder} is no folder", fix="give --disk a folder on the disk that is to be measured")
    console = _console()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    report = measure_links(device, folder=folder, say=lambda text: console.print(text, soft_wrap=True))
    content = report.to_json() | {"machine": machine(device.type)}
    console.print(render_links(report))
    write_json(json_file, content)
    print(json.dumps(content))


def _check_folder(json_file: Path | None) -> None:
    if json_file is not None and not json_file.parent.is_dir():
        raise InputError(f"{json_file.parent} is no folder", fix="give --json a file in a folder that exists")


def _console() -> Console:
    plain = Console(highlight=False)
    return plain if plain.is_terminal else Console(highlight=False, width=_PIPE_COLUMNS)


def main(words: Sequence[str] | None = None) -> int:
    given = vars(_parser().parse_args(words))
    command = given.pop("command")
    file = given.pop("json")
    try:
        if command == "link":
            link(file, given["disk"])
        else:
            decode(parse_options(**given), file)
    except SteerpipeError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m steerpipe.bench", description="Benchmarks with made-up weights.")
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("decode", help="steps of decode, and prompts, of a shape")
    standard = DecodeOptions()
    one.add_argument("--shape", choices=SHAPES, default=standard.shape)
    one.add_argument("--format", dest="formats", default="bf16", help="bf16,int8,int4")
    one.add_argument("--residency", default="100", help="percent of all experts that have slots: 100,50,25,0")
    one.add_argument("--context", default="128", help="tokens: 128,4k,32k")
    one.add_argument("--batch", default="1", help="sequences: 1,2,4,8")
    one.add_argument("--routing", default=standard.routing, help="a file, generator, model, or auto")
    for name in ("tokens", "warmup", "prefill", "seed"):
        one.add_argument(f"--{name}", type=int, default=getattr(standard, name))
    one.add_argument("--repeat", dest="repeats", type=int, default=standard.repeats)
    one.add_argument("--policy", default=standard.policy, help="lfru or lru")
    one.add_argument("--driver", choices=DRIVERS, default=standard.driver, help="who brings what one row misses")
    one.add_argument(
        "--predict", default=standard.predict, help="whose recorded forecasts: heads, lookahead, perfect …"
    )
    one.add_argument("--horizon", type=int, default=standard.horizon, help="layers that they look ahead: 1, 2 or 3")
    one.add_argument("--device", choices=DEVICES, default=standard.device)
    one.add_argument("--dtype", default=standard.dtype, help="of dense weights: auto, bfloat16 or float32")
    other = commands.add_parser("link", help="the link between host memory and the GPU")
    other.add_argument("--disk", type=Path, help="a folder on the disk that is measured too")
    for each in (one, other):
        each.add_argument("--json", type=Path, help="write everything to this file")
    return parser
