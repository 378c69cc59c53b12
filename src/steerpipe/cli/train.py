"""`steerpipe train`: a predictor of routing, from a trace or from a model and prompts."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from steerpipe.cli.shared import Debug, Json, app, guarded, quiet_transformers, step_progress
from steerpipe.core.errors import ConfigError
from steerpipe.core.units import format_bytes

if TYPE_CHECKING:
    from steerpipe.predict.stored import StoredPredictor
    from steerpipe.train.catalogue import Options
    from steerpipe.train.material import Material


@app.command()
def train(
    predictor: Annotated[
        str, typer.Argument(help="head, lookahead, transformer, frequency ...; a wrong name lists all")
    ],
    paths: Annotated[
        list[Path], typer.Argument(metavar="[TRACES] OUT", help="folder of a trace, and the file to write")
    ],
    prompts: Annotated[Path | None, typer.Option(help="instead of TRACES: JSONL of prompts to trace in memory")] = None,
    model: Annotated[str | None, typer.Option(help="with --prompts: whose routing; none: the embedded model")] = None,
    horizon: Annotated[int, typer.Option(help="layers ahead; 0: before the layer's own attention")] = 1,
    steps: Annotated[int | None, typer.Option(help="of training")] = None,
    rows: Annotated[int | None, typer.Option(help="tokens of a step")] = None,
    rate: Annotated[float | None, typer.Option(help="highest learning rate")] = None,
    rank: Annotated[int | None, typer.Option(help="of a head")] = None,
    window: Annotated[str | None, typer.Option(help="of mlp, lstm and transformer: layers, tokens or both")] = None,
    target: Annotated[list[int] | None, typer.Option(help="of the same: a target layer; default: every layer")] = None,
    part: Annotated[list[Path] | None, typer.Option(help="of a blend: a trained predictor; give two or more")] = None,
    storage: Annotated[str, typer.Option(help="exact, float16, int8 or int4")] = "exact",
    held_out: Annotated[float, typer.Option(help="share of the prompts that is left for the arena")] = 0.15,
    limit: Annotated[int | None, typer.Option(help="first prompts of the file to use")] = None,
    seed: Annotated[int, typer.Option(help="of the split and of the training")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Train a predictor of routing and write it to OUT, whole or not at all; `steerpipe arena` then tests it."""

    def run() -> None:
        from steerpipe.predict.files import save
        from steerpipe.train.catalogue import TRAINERS
        from steerpipe.train.catalogue import train as train_predictor

        quiet_transformers()
        if predictor not in TRAINERS:  # before anything is traced
            raise ConfigError(f"there is no predictor called {predictor!r}", fix=f"choose one of {', '.join(TRAINERS)}")
        kept_as = _choice("--storage", storage)
        chosen = {"steps": steps, "rows": rows, "learning_rate": rate, "rank": rank, "targets": target}
        with step_progress(quiet=as_json) as progress:
            material, name, out = _material(paths, prompts, model, held_out, seed, device, limit, progress)
            options = _options(chosen, horizon, seed, window, part or [], material)
            made = train_predictor(predictor, material, options, name, progress)
        _show(made, out, save(made, out, kept_as), as_json=as_json)

    guarded(run, debug)


def _material(
    paths: list[Path], prompts: Path | None, model: str | None, held_out: float, seed: int, device: str,
    limit: int | None, progress: Callable[[str, int, int], None],
) -> tuple["Material", str, Path]:  # fmt: skip
    """(material, name of the model, file to write)."""
    from steerpipe.train.sources import material_of_prompts, material_of_traces

    if len(paths) != (2 if prompts is None else 1):
        raise ConfigError(
            f"{len(paths)} paths with{'out' if prompts is None else ''} --prompts",
            fix="give TRACES OUT, or OUT with --prompts FILE (and --model)",
        )
    if prompts is None:
        if model is not None or limit is not None:
            raise ConfigError("--model and --limit go with --prompts", fix="leave them out, or give --prompts FILE")
        material, name = material_of_traces(paths[0], held_out=held_out, seed=seed, device=device)
    else:
        material, name = material_of_prompts(
            model, prompts, held_out=held_out, seed=seed, device=device, limit=limit, progress=progress
        )
    return material, name, paths[-1]


def _options(
    chosen: dict[str, Any], horizon: int, seed: int, window: str | None, parts: list[Path], material: "Material"
) -> "Options":
    from steerpipe.predict.files import load
    from steerpipe.predict.mark import ModelMark
    from steerpipe.predict.window import Window
    from steerpipe.train.catalogue import Options

    layers = material.trace.geometry.layers
    if not 0 <= horizon <= layers:
        raise ConfigError(f"horizon {horizon} of {layers} MoE layers", fix=f"give 0 to {layers}")
    given = {key: value for key, value in chosen.items() if value is not None}
    if window is not None:
        given["window"] = _choice("--window", window, Window)
    if any(not 0 <= each < layers for each in given.get("targets", ())):
        raise ConfigError(f"targets {given['targets']} of {layers} MoE layers", fix=f"give 0 to {layers - 1}")
    here = ModelMark.of(material.trace.geometry, material.digest)
    given["parts"] = tuple(load(file, material.routers, material.trace.device, here) for file in parts)
    return Options(horizon=horizon, seed=seed, **given)


def _choice(flag: str, value: str, kinds: Any = None) -> Any:
    from steerpipe.predict.storage import Storage

    kinds = kinds or Storage
    if value not in list(kinds):
        raise ConfigError(f"{flag} {value}", fix=f"choose one of {', '.join(kinds)}")
    return kinds(value)


def _show(made: "StoredPredictor", out: Path, size_bytes: int, *, as_json: bool) -> None:
    training = made.training
    assert training is not None, "trained just now"
    if as_json:
        cost = asdict(made.cost())
        horizons = list(made.horizons)
        said = {"out": str(out), "kind": made.kind, "name": made.name, "horizons": horizons, "bytes": size_bytes}
        print(json.dumps({**said, "cost": cost, "training": asdict(training)}))
        return
    learnt = f"{training.tokens:,} tokens of {training.prompts:,} prompts, {training.seconds:.1f} s"
    print(f"{out}: {made.name}, {made.cost().parameters:,} parameters, {format_bytes(size_bytes)}; {learnt}")
    print(f"what it is worth: steerpipe arena ... --predictor {out}")
