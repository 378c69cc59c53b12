"""`steerpipe train`: a predictor of routing, from a trace or from a model and prompts."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from steerpipe.cli.shared import Debug, Json, app, guarded, quiet_transformers, step_progress
from steerpipe.core.errors import ConfigError
from steerpipe.core.units import format_bytes

if TYPE_CHECKING:
    from steerpipe.predict.protocol import Cost
    from steerpipe.predict.stored import Training
    from steerpipe.train.catalogue import Options
    from steerpipe.train.material import Material

REUSE = "reuse"  # says when an expert is used next: for eviction, and in a file of its own kind
_REUSE_FLAGS = frozenset({"steps", "rows", "rate", "rank"})
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class _Made:
    """What is told of a file that was written; the fields are those of --json, but for `worth`."""

    out: Path
    kind: str
    name: str
    horizons: list[int]
    bytes: int
    cost: "Cost"
    training: "Training"
    worth: str  # how to find out, in words


@app.command()
def train(
    predictor: Annotated[str, typer.Argument(help="head, lookahead, transformer, reuse ...; a wrong name lists all")],
    paths: Annotated[
        list[Path], typer.Argument(metavar="[TRACES] OUT", help="folder of a trace, and the file to write")
    ],
    prompts: Annotated[Path | None, typer.Option(help="instead of TRACES: JSONL of prompts to trace in memory")] = None,
    model: Annotated[str | None, typer.Option(help="with --prompts: whose routing; none: the embedded model")] = None,
    horizon: Annotated[int | None, typer.Option(help="layers ahead, 1 if not given; 0: before its attention")] = None,
    steps: Annotated[int | None, typer.Option(help="of training")] = None,
    rows: Annotated[int | None, typer.Option(help="tokens of a step")] = None,
    rate: Annotated[float | None, typer.Option(help="highest learning rate")] = None,
    rank: Annotated[int | None, typer.Option(help="of a head or a reuse forecast")] = None,
    window: Annotated[str | None, typer.Option(help="of mlp, lstm and transformer: layers, tokens or both")] = None,
    target: Annotated[list[int] | None, typer.Option(help="of the same: a target layer; default: every layer")] = None,
    loss: Annotated[str | None, typer.Option(help="of preattention: ranking or weighted")] = None,
    part: Annotated[list[Path] | None, typer.Option(help="of a blend: a trained predictor; give two or more")] = None,
    storage: Annotated[str | None, typer.Option(help="exact, float16, int8 or int4; reuse: always float16")] = None,
    held_out: Annotated[float, typer.Option(help="share of the prompts that is left for the arena")] = 0.15,
    limit: Annotated[int | None, typer.Option(help="first prompts of the file to use")] = None,
    seed: Annotated[int, typer.Option(help="of the split and of the training")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Train a predictor of routing, or of reuse, and write it to OUT, whole or not at all."""

    def run() -> None:
        quiet_transformers()
        flags = {
            "horizon": horizon, "steps": steps, "rows": rows, "rate": rate, "rank": rank, "window": window,
            "target": target, "loss": loss, "part": part, "storage": storage,
        }  # fmt: skip
        chosen = {flag: value for flag, value in flags.items() if value is not None and value != []}
        _check_flags(predictor, chosen)  # before anything is traced
        choices = {flag: _choice(flag, value) for flag, value in chosen.items()}
        with step_progress(quiet=as_json) as progress:
            material, name, out = _material(paths, prompts, model, held_out, seed, device, limit, progress)
            make = _make_reuse if predictor == REUSE else partial(_make_predictor, predictor)
            made = make(material, {**choices, "seed": seed}, name, out, progress)
        _show(made, as_json=as_json)

    guarded(run, debug)


def _check_flags(predictor: str, chosen: Mapping[str, Any]) -> None:
    from steerpipe.train.catalogue import CHOICES

    known = {**{name: flags | {"storage"} for name, flags in CHOICES.items()}, REUSE: _REUSE_FLAGS}
    if predictor not in known:
        raise ConfigError(f"there is no predictor called {predictor!r}", fix=f"choose one of {', '.join(known)}")
    deaf = sorted(chosen.keys() - known[predictor])
    if deaf:
        listens = ", ".join(f"--{flag}" for flag in sorted(known[predictor]))
        raise ConfigError(f"{predictor} has no use for --{', --'.join(deaf)}", fix=f"leave it out; it takes {listens}")
    for flag in ("steps", "rows", "rank"):
        if chosen.get(flag, 1) < 1:
            raise ConfigError(f"--{flag} {chosen[flag]}", fix="give 1 or more")
    if not 0 < chosen.get("rate", 1.0) < math.inf:
        raise ConfigError(f"--rate {chosen['rate']}", fix="give a learning rate above 0, such as 0.003")


def _material(
    paths: list[Path], prompts: Path | None, model: str | None, held_out: float, seed: int, device: str,
    limit: int | None, progress: Progress,
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


def _make_predictor(
    predictor: str, material: "Material", choices: dict[str, Any], model: str, out: Path, progress: Progress
) -> "_Made":
    from steerpipe.predict.files import save
    from steerpipe.predict.storage import Storage
    from steerpipe.train.catalogue import train as train_predictor

    storage = choices.pop("storage", Storage.EXACT)
    made = train_predictor(predictor, material, _options(choices, material), model, progress)
    assert made.training is not None, "trained just now"
    worth = f"steerpipe arena ... --predictor {out}"
    return _Made(
        out, made.kind, made.name, list(made.horizons), save(made, out, storage), made.cost(), made.training, worth
    )


def _make_reuse(material: "Material", choices: dict[str, Any], model: str, out: Path, progress: Progress) -> "_Made":
    from steerpipe.predict.mark import ModelMark
    from steerpipe.predict.reuse_file import NAME, save_reuse
    from steerpipe.train.reuse_recipe import ReuseRecipe, make_reuse

    forecast, training = make_reuse(material, ReuseRecipe(**_renamed(choices)), model, progress)
    weights = ModelMark.of(material.trace.geometry, material.digest).weights
    size_bytes = save_reuse(forecast, out, training, weights)
    worth = f"put it beside the model's pack as predictors/{NAME}, then steerpipe arena"
    return _Made(out, REUSE, REUSE, [], size_bytes, forecast.cost(), training, worth)


def _options(choices: dict[str, Any], material: "Material") -> "Options":
    from steerpipe.predict.files import load
    from steerpipe.predict.mark import ModelMark
    from steerpipe.train.catalogue import Options

    layers = material.trace.geometry.layers
    horizon, targets = choices.get("horizon", 1), choices.get("target", [])
    if not 0 <= horizon <= layers:
        raise ConfigError(f"horizon {horizon} of {layers} MoE layers", fix=f"give 0 to {layers}")
    if any(not 0 <= each < layers for each in targets):
        raise ConfigError(f"targets {targets} of {layers} MoE layers", fix=f"give 0 to {layers - 1}")
    here = ModelMark.of(material.trace.geometry, material.digest)
    files = choices.pop("part", [])
    parts = tuple(load(file, material.routers, material.trace.device, here) for file in files)
    return Options(parts=parts, **_renamed(choices))


def _renamed(choices: Mapping[str, Any]) -> dict[str, Any]:
    """By the names of the fields, which are whole words."""
    fields = {"rate": "learning_rate", "target": "targets"}
    return {fields.get(flag, flag): value for flag, value in choices.items()}


def _choice(flag: str, value: Any) -> Any:
    """As what it stands for, where the flag has a list of words."""
    from steerpipe.predict.storage import Storage
    from steerpipe.predict.window import Window
    from steerpipe.train.losses import PreAttentionLoss

    words: dict[str, type[StrEnum]] = {"storage": Storage, "window": Window, "loss": PreAttentionLoss}
    kinds = words.get(flag)
    if kinds is None:
        return value
    if value not in list(kinds):
        raise ConfigError(f"--{flag} {value}", fix=f"choose one of {', '.join(kinds)}")
    return kinds(value)


def _show(made: "_Made", *, as_json: bool) -> None:
    if as_json:
        print(
            json.dumps({key: value for key, value in asdict(made).items() if key != "worth"} | {"out": str(made.out)})
        )
        return
    training = made.training
    prompts = f"{training.prompts:,} prompt{'' if training.prompts == 1 else 's'}"
    learnt = f"{training.tokens:,} tokens of {prompts}, {training.seconds:.1f} s"
    print(f"{made.out}: {made.name}, {made.cost.parameters:,} parameters, {format_bytes(made.bytes)}; {learnt}")
    print(f"what it is worth: {made.worth}")
