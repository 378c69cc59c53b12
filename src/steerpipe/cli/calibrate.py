"""`steerpipe calibrate`: what lossy answers to a miss cost a model."""

import json
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Annotated

import typer

from steerpipe.cli.shared import Debug, Json, app, guarded, quiet_transformers, step_progress
from steerpipe.core.errors import CapacityError, ConfigError, InputError
from steerpipe.core.quality import Dial, MissPolicy

if TYPE_CHECKING:
    from rich.table import Table

    from steerpipe.runtime.calibrating import Subject
    from steerpipe.runtime.quality_profile import Measurement, QualityProfile

_TOKENS = 1024  # of the texts, where nobody says how many
_FIX = "give --out FOLDER"


@app.command()
def calibrate(
    paths: Annotated[
        list[Path], typer.Argument(metavar="[MODEL] TEXTS", help="the model, and JSONL of texts as `train` takes it")
    ],
    out: Annotated[str | None, typer.Option(help="folder to write to; default: predictors beside the model")] = None,
    tokens: Annotated[int | None, typer.Option(help="of the texts; default: 1024, or what a bound takes")] = None,
    window: Annotated[int, typer.Option(help="most tokens of a text")] = 288,
    residency: Annotated[float, typer.Option(help="share of the experts that is there")] = 0.25,
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16")] = "auto",
    threads: Annotated[int | None, typer.Option(help="CPU threads")] = None,
    fast_memory: Annotated[str, typer.Option(help="memory for experts while measuring")] = "auto",
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure KL, perplexity and agreement of every miss policy by layer and rank, and set --quality by it."""

    def run() -> None:
        from steerpipe.core.config import load_config
        from steerpipe.runtime.calibrating import open_subject
        from steerpipe.runtime.quality_profile import FILE

        quiet_transformers()
        if len(paths) > 2:
            raise ConfigError(f"{len(paths)} paths", fix="give MODEL TEXTS, or TEXTS for the embedded model")
        if not 0 < residency < 1 or (tokens is not None and tokens < 1) or window < 1:
            raise ConfigError(
                f"--residency {residency} --tokens {tokens} --window {window}",
                fix="a share below 1, and counts above 0",
            )
        model = str(paths[0]) if len(paths) == 2 else None
        flags = {"device": "cpu", "dtype": dtype, "threads": threads, "fast_memory": fast_memory}
        folder = _folder(out, model)
        subject = open_subject(model, load_config(flags))
        try:
            texts = _texts(paths[-1], subject, tokens, window)
            profile, size_bytes = _measure(subject, texts, folder, residency, quiet=as_json)
        finally:
            subject.close()
        _show(profile, folder, size_bytes, as_json=as_json)
        if not as_json:
            print(_advice(profile, model, folder / FILE, beside=out is None))

    guarded(run, debug)


def _folder(out: str | None, model: str | None) -> Path:
    """Where the profile goes: it can be written to, which is tried before the minutes that a measurement takes."""
    from steerpipe.predict.shipped import ASSETS, FOLDER
    from steerpipe.runtime.models import find_model

    if out == "":
        raise ConfigError("--out is empty", fix=_FIX)
    folder = find_model(model) / FOLDER if out is None else Path(out)
    if out is None and folder.resolve().is_relative_to(ASSETS.resolve()):
        raise ConfigError("the embedded model lies in the installed package", fix=_FIX)
    made = not folder.exists()
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=folder).close()
        if made:
            folder.rmdir()
    return folder


def _texts(file: Path, subject: "Subject", tokens: int | None, window: int) -> list[Sequence[int]]:
    """Windows of the file's texts, one of each, until they have `tokens` tokens. InputError: too few for a bound."""
    from steerpipe.runtime.calibration import LEAST_MEASURED, LEAST_TOKENS, measured_tokens
    from steerpipe.trace.prompts import read_prompts

    found: list[Sequence[int]] = []
    most = min(max(window, LEAST_TOKENS), subject.context)
    for prompt in read_prompts(file):
        ids = prompt.encode(subject.codec, raw=False, first=most)
        if len(ids) >= LEAST_TOKENS:
            found.append(ids)
        if sum(map(len, found)) >= (tokens or _TOKENS) and (tokens or measured_tokens(found) >= LEAST_MEASURED):
            break
    measured = measured_tokens(found)
    if measured < LEAST_MEASURED:
        raise InputError(
            f"{measured} tokens would be measured, and a bound needs {LEAST_MEASURED}: {len(found)} texts have "
            f"{LEAST_TOKENS} tokens or more",
            fix="give more texts, or longer ones" + ", and no --tokens" * (tokens is not None),
        )
    return found


def _measure(
    subject: "Subject", texts: list[Sequence[int]], folder: Path, residency: float, *, quiet: bool
) -> tuple["QualityProfile", int]:
    from steerpipe.predict.files import save
    from steerpipe.predict.lookahead import RouterLookahead
    from steerpipe.predict.mark import ModelMark
    from steerpipe.predict.storage import Storage
    from steerpipe.runtime.calibrating import measure_defaults
    from steerpipe.runtime.calibration import Calibration
    from steerpipe.runtime.quality_profile import FILE, save_profile

    with step_progress(quiet=quiet) as progress:
        if subject.lookahead.defaults is None:
            defaults = measure_defaults(subject, texts, lambda done, total: progress("default vectors", done, total))
            own = subject.lookahead
            subject.rehearsal.defaults = defaults.vectors
            made = RouterLookahead(own.routers, shared=own.shared, defaults=defaults, horizons=own.horizons)
            made.mark = ModelMark.of(subject.rehearsal.geometry, subject.identity)
            with _writing(folder):
                save(made, folder / "lookahead.safetensors", Storage.FLOAT16)
        calibration = Calibration(
            subject.rehearsal, texts, subject.predictors, residency=residency,
            progress=lambda done, total: progress("policies", done, total),
        )  # fmt: skip
        profile = calibration.profile(subject.identity)
    with _writing(folder):
        return profile, save_profile(profile, folder / FILE)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        raise CapacityError(f"{folder} cannot be written to: {problem.strerror}", fix=_FIX) from None


def _show(profile: "QualityProfile", folder: Path, size_bytes: int, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"out": str(folder), "bytes": size_bytes, **profile.as_json()}))
        return
    from rich.console import Console

    console = Console()
    console.print(_by_place(profile), _by_dial(profile))
    drifting = ", ".join(map(str, profile.drifting)) or "none"
    print(f"drifting layers, exact but for fast: {drifting}")


def _advice(profile: "QualityProfile", model: str | None, file: Path, *, beside: bool) -> str:
    """A command that uses what was written; a miss policy has no bound."""
    dials = [dial for dial in (Dial.BALANCED, *Dial) if dial in profile.settings]
    words = ["steerpipe", "generate", *([model] if model else []), "-p", "Do you like dogs?", "--fast-memory"]
    words += [f"{profile.residency * 100:g}%", "--quality", *(dials or [MissPolicy.PATCH])[:1]]
    words += [] if beside else ["--quality-profile", str(file)]
    return f"written to {file.parent}; to use it:\n  {shlex.join(words)}"


def _by_place(profile: "QualityProfile") -> "Table":
    """KL by policy and layers; of a rank's policies the first rank, and the others together."""
    from rich.table import Table

    title = f"KL per token in nats, first rank / others: {profile.tokens:,} tokens, {profile.residency:.0%} resident"
    table = Table("layers", title=title)
    policies = list(dict.fromkeys(each.policy for each in profile.measurements))
    for policy in policies:
        table.add_column(policy, justify="right")
    for span in dict.fromkeys(each.layers for each in profile.measurements):
        here = [each for each in profile.measurements if each.layers == span]
        name = str(span[0]) if span[0] == span[1] else f"{span[0]}-{span[1]}"
        table.add_row(name, *(_cell([each for each in here if each.policy == policy]) for policy in policies))
    return table


def _cell(found: "Sequence[Measurement]") -> str:
    first = [each.loss.kl for each in found if not each.rank]
    others = [each.loss.kl for each in found if each.rank]
    return " / ".join(f"{sum(part):.4f}" for part in (first, others) if part)


def _by_dial(profile: "QualityProfile") -> "Table":
    from rich.table import Table

    from steerpipe.core.quality import KL_BOUNDS

    table = Table("--quality", title=f"the dial; the exact model's perplexity is {profile.exact_perplexity:.2f}")
    for name in ("bound", "KL", "perplexity", "same top-1", "substituted", "KL if nothing comes in time"):
        table.add_column(name, justify="right")
    for dial, bound in KL_BOUNDS.items():
        found = profile.settings.get(dial)
        if found is None:
            table.add_row(dial, f"{bound}", "costs more than its bound")
            continue
        loss = found.loss
        table.add_row(
            dial, f"{bound}", f"{loss.kl:.4f}", f"{loss.perplexity:.2f}", f"{loss.top1:.1%}", f"{loss.share:.1%}",
            f"{found.unmended.kl:.4f}",
        )  # fmt: skip
    return table
