"""`steerpipe arena`: every predictor on the same held-out prompts."""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from steerpipe.cli.shared import Debug, Json, app, guarded, quiet_transformers
from steerpipe.core.errors import ConfigError

if TYPE_CHECKING:
    from steerpipe.arena.entries import Entry
    from steerpipe.arena.machines import StatedMachine
    from steerpipe.arena.results import ArenaResult
    from steerpipe.arena.sources import Split, Texts

_LEAST_WIDTH = 124  # twelve columns of figures: in less they would be cut in the middle


@app.command()
def arena(
    traces: Annotated[Path | None, typer.Argument(help="folder that `steerpipe trace` wrote")] = None,
    test: Annotated[
        Path | None, typer.Option(help="other traces to test on; else prompts of TRACES are held out")
    ] = None,
    model: Annotated[str | None, typer.Option(help="with --prompts: trace this model; none: the embedded one")] = None,
    prompts: Annotated[Path | None, typer.Option(help="JSONL of prompts to trace on the fly, with states")] = None,
    limit: Annotated[int | None, typer.Option(help="first prompts of the file to use")] = None,
    held_out: Annotated[float, typer.Option(help="share of the prompts to test on")] = 0.15,
    seed: Annotated[int, typer.Option(help="of the split")] = 0,
    predictor: Annotated[list[Path] | None, typer.Option(help="a saved predictor; may be given often")] = None,
    plugin: Annotated[
        list[str] | None, typer.Option(help="your own: module:Class or file.py; may be given often")
    ] = None,
    horizons: Annotated[str, typer.Option(help="layers ahead; 0: before the layer's own attention")] = "0,1,2,3",
    machines: Annotated[str, typer.Option(help="to replay on: none, few (a quarter resident) or all")] = "few",
    replay_tokens: Annotated[int, typer.Option(help="held-out tokens to replay on each machine")] = 600,
    jobs: Annotated[int | None, typer.Option(help="processes that replay; default: one per core")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda: where predictors are run")] = "cpu",
    out: Annotated[Path | None, typer.Option(help="folder for arena.html, arena.json and the pictures")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Compare predictors of routing: what they recall, what they cost, and what they are worth on stated machines."""

    def run() -> None:
        from steerpipe.arena.contest import Options, run_arena
        from steerpipe.arena.lineup import shipped_reuse
        from steerpipe.arena.sources import Split
        from steerpipe.predict.mark import ModelMark

        quiet_transformers()
        asked, split = _horizons(horizons), Split(held_out, seed)
        texts = _texts(traces, test, model, prompts, split, limit, device)
        steps = _within(asked, texts.geometry.layers)
        options = Options(
            machines=_machines(machines), worth_tokens=replay_tokens, jobs=jobs or len(os.sched_getaffinity(0)),
            reuse=shipped_reuse(texts.folder, ModelMark.of(texts.geometry)),
        )  # fmt: skip
        entries = _entries(texts, steps, predictor or [], plugin or [], device)
        result = run_arena(
            texts.name, texts.geometry, texts.train, texts.test, entries, options, device=device, progress=_say
        )
        pictures = _write(result, out) if out is not None else {}
        _show(result, texts, as_json=as_json, pictures=len(pictures), out=out)
        if any(each.refused and each.refused.startswith("PeekError") for each in result.refused):
            raise SystemExit(2)

    guarded(run, debug)


def _texts(
    traces: Path | None, test: Path | None, model: str | None, prompts: Path | None, split: "Split", limit: int | None,
    device: str,
) -> "Texts":  # fmt: skip
    from steerpipe.arena.sources import read_both, read_traces, trace_prompts

    if (traces is None) == (prompts is None):
        raise ConfigError(
            "nothing to compare on" if traces is None else "traces and prompts were both given",
            fix="give a trace folder, or --prompts FILE (with --model MODEL)",
        )
    if prompts is not None:
        if test is not None:
            raise ConfigError("--test goes with trace folders", fix="leave it out: prompts are held out by --held-out")
        return trace_prompts(model, prompts, split, limit=limit, device=device)
    assert traces is not None, "one of the two was given"
    if model is not None or limit is not None:
        raise ConfigError("--model and --limit go with --prompts", fix="leave them out, or give --prompts instead")
    return read_both(traces, test) if test is not None else read_traces(traces, split)


def _entries(texts: "Texts", horizons: list[int], files: list[Path], plugins: list[str], device: str) -> "list[Entry]":
    from steerpipe.arena.entries import entries_of
    from steerpipe.arena.lineup import saved_entries, usual_entries
    from steerpipe.arena.plugins import load_plugin
    from steerpipe.predict.mark import ModelMark

    material = texts.material(device)
    _say("counting")
    entries = usual_entries(material, horizons, texts.name)
    taken = {each.name for each in entries}
    here = ModelMark.of(texts.geometry)
    entries += saved_entries(files, texts.folder, material.routers, horizons, device, texts.test, taken, here)
    own = entries_of((load_plugin(each, material), each) for each in plugins)
    return entries + [each.asked(horizons) for each in own]


def _horizons(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() for part in parts):
        raise ConfigError(f"--horizons is {text!r}", fix="give layers ahead, such as 0,1,2,3")
    return sorted({int(part) for part in parts})


def _within(horizons: list[int], layers: int) -> list[int]:
    """Those at which a layer is decided within its own token; the others are said to be left out."""
    kept = [each for each in horizons if each < layers]
    left_out = ", ".join(str(each) for each in horizons if each >= layers)
    if not kept:
        raise ConfigError(
            f"--horizons is {left_out}, and the model has {layers} MoE layers", fix=f"give horizons below {layers}"
        )
    if left_out:
        _say(f"horizons left out: {left_out} (the model has {layers} MoE layers)")
    return kept


def _machines(which: str) -> "list[StatedMachine]":
    from steerpipe.arena.machines import stated_machines

    every = stated_machines()
    chosen = {"none": [], "few": [each for each in every if each.residency == 0.25], "all": every}.get(which)
    if chosen is None:
        raise ConfigError(f"--machines is {which!r}", fix="give none, few or all")
    return chosen


def _write(result: "ArenaResult", out: Path) -> Mapping[str, str]:
    """Everything into `out`; without matplotlib the page has no pictures, and that is said."""
    from steerpipe.arena.page import write_page
    from steerpipe.arena.plots import draw_all

    try:
        pictures = draw_all(result)
    except ConfigError as problem:
        _say(str(problem))
        pictures = {}
    out.mkdir(parents=True, exist_ok=True)
    for name, svg in pictures.items():
        (out / f"{name}.svg").write_text(svg, encoding="utf-8")
    (out / "arena.json").write_text(json.dumps(result.as_json()) + "\n", encoding="utf-8")
    (out / "arena.html").write_text(write_page(result, pictures), encoding="utf-8")
    return pictures


def _show(result: "ArenaResult", texts: "Texts", *, as_json: bool, pictures: int, out: Path | None) -> None:
    from rich.console import Console

    from steerpipe.arena.render import render

    if texts.repeats:
        _say(f"{texts.repeats} held-out texts left out: the training prompts have them, token for token")
    if as_json:
        print(json.dumps(result.as_json()))
    else:
        console = Console(width=max(_LEAST_WIDTH, Console().width))
        for part in render(result):
            console.print(part)
    if out is not None:
        _say(f"{out / 'arena.html'}, arena.json and {pictures} pictures are written")


def _say(what: str) -> None:
    print(what, file=sys.stderr)
