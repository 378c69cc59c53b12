"""`steerpipe plan`: what would lie where, how fast it could be at best, and how much typing covers a transfer."""

import json
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer

from steerpipe.cli import options
from steerpipe.cli.shared import Debug, Json, Model, app, guarded, quiet_transformers
from steerpipe.core.errors import ConfigError, InputError
from steerpipe.core.quality import MissPolicy, check_cpu
from steerpipe.core.units import parse_bytes

if TYPE_CHECKING:
    from steerpipe.runtime.plans import Placement

FAST = "fast memory"
PLACES = (FAST, "page-locked RAM", "RAM", "disk", "CPU")


@app.command()
def plan(
    model: Model = None,
    block: Annotated[str | None, typer.Option(help="plan for a block of this size instead of a model: 2GB")] = None,
    tier: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=RATE per second, such as PCIe=31.5GB; for a model it replaces a measured rate, and CPU=RATE "
            "lets the CPU compute what is missing"
        ),
    ] = None,
    typing: Annotated[float | None, typer.Option(help="tokens that a person types per second")] = None,
    keystrokes: Annotated[Path | None, typer.Option(help="keystroke log to take that from")] = None,
    prompt_tokens: Annotated[
        int, typer.Option(min=1, help="length of the prompt for the time to the first token")
    ] = 64,
    fast_memory: options.FastMemory = None,
    ram: options.Ram = None,
    pin: options.Pin = None,
    pace: options.Pace = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    max_context: options.MaxContext = None,
    config: options.Config = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Plan without loading: what lies where, floors per token, and the tokens of typing that cover a transfer."""
    flags = {
        "fast_memory": fast_memory, "ram": ram, "pin": pin, "pace": pace, "device": device, "dtype": dtype,
        "max_context": max_context,
    }  # fmt: skip

    def run() -> None:
        from steerpipe.cli import plan_report
        from steerpipe.core.config import load_config
        from steerpipe.runtime.models import find_model
        from steerpipe.runtime.plans import place_model, plan_placement

        rates = _rates(tier or [])
        speed = _typing_speed(typing, keystrokes)
        if block is not None:
            _refuse(model, {**flags, "config": config})
            _show_block(parse_bytes(block), rates, speed, as_json)
            return
        quiet_transformers()
        placement = place_model(find_model(model), load_config(flags, file=config))
        known = _measured(placement, rates)
        found = plan_placement(placement, known.pop(FAST), known, speed, prompt_tokens)
        print(json.dumps(found.as_json())) if as_json else plan_report.show(found)

    guarded(run, debug)


def _rates(given: list[str]) -> dict[str, float]:
    rates: dict[str, float] = {}
    for text in given:
        name, separator, rate = text.rpartition("=")
        if not separator or not name.strip() or parse_bytes(rate) <= 0:
            raise ConfigError(f"--tier is {text!r}", fix="write NAME=RATE with bytes per second: --tier PCIe=31.5GB")
        rates[name.strip()] = float(parse_bytes(rate))
    return rates


def _typing_speed(given: float | None, log: Path | None) -> float:
    """Tokens per second: as given, else the median of a log's sessions, else what is usual."""
    from steerpipe.intake.keystrokes import read_sessions
    from steerpipe.intake.pauses import USUAL_CHARACTERS_PER_TOKEN, USUAL_TOKENS_PER_SECOND, TypingPace

    if given is not None and log is not None:
        raise ConfigError("both --typing and --keystrokes are given", fix="give one of them")
    if given is not None:
        if not 0 < given < float("inf"):
            raise ConfigError(f"--typing is {given}", fix="give tokens per second, more than 0")
        return given
    if log is None:
        return USUAL_TOKENS_PER_SECOND
    paces = [TypingPace.of(session.edits) for session in read_sessions(log)]
    speeds = [speed for pace in paces if (speed := pace.tokens_per_second(USUAL_CHARACTERS_PER_TOKEN)) is not None]
    if not speeds:
        raise InputError(f"nobody types in {log}", fix="give a log with at least two keys")
    return median(speeds)


def _refuse(model: str | None, settings: dict[str, object]) -> None:
    """A block has no model and no budget: what would be ignored is refused."""
    given = ["a model"] * (model is not None) + [name for name, value in settings.items() if value is not None]
    if given:
        raise ConfigError(f"--block and {', '.join(given)} are given", fix="plan for a block, or for a model")


def _show_block(block_bytes: int, rates: dict[str, float], tokens_per_second: float, as_json: bool) -> None:
    from steerpipe.cli.plan_report import show_covers
    from steerpipe.runtime.planner import Link, cover
    from steerpipe.runtime.plans import cover_json

    if not rates or not block_bytes:
        raise ConfigError("--block without --tier, or of no bytes", fix="name the links: --tier PCIe=31.5GB")
    covers = [cover(block_bytes, Link(name, rate), tokens_per_second) for name, rate in rates.items()]
    if as_json:
        found = {"block_bytes": block_bytes, "typing_tokens_per_second": tokens_per_second}
        print(json.dumps(found | {"typing": [cover_json(each) for each in covers]}))
    else:
        show_covers(block_bytes, tokens_per_second, covers)


def _measured(placement: "Placement", given: dict[str, float]) -> dict[str, float]:
    """The rate of the fast memory and of every place behind it that holds experts: as given, or measured now."""
    import torch

    from steerpipe.bench.rates import memory_rates
    from steerpipe.cli.plan_links import copy_rates, disk_rate

    if unknown := given.keys() - set(PLACES):
        raise ConfigError(f"--tier {', '.join(sorted(unknown))}", fix=f"the places are {', '.join(PLACES)}")
    if "CPU" in given:
        check_cpu([MissPolicy.CPU], placement.form)
    known = dict(given)
    if FAST not in known or (placement.device == "cpu" and "RAM" not in known):
        found = memory_rates(torch.device(placement.device))
        known.setdefault(FAST, max(found.values()))
        if placement.device == "cpu":
            known.setdefault("RAM", found["copy"] / 2)  # a copy counts what it reads and what it writes
    if placement.budget.resident:
        return known
    if placement.device == "cuda" and not {"RAM", "page-locked RAM"} <= known.keys():
        known = copy_rates() | known
    if "disk" not in known:
        known["disk"] = disk_rate(placement.folder)
    return known
