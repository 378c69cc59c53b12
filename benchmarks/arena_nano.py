"""The arena on nano: trained predictors on held-out prompts, on all stated machines. Tables, pictures, page and JSON.

    python benchmarks/arena_nano.py --documents heldout.jsonl.gz --chats chats.json --predictors FOLDER --out FOLDER

The text and the split are those of train_predictors.py, so what is tested here was never trained on. The folder of
predictors is what that run left behind; those in a folder `shipped` are taken from the package instead. --timings: its
results.json, whose microseconds (a GPU and a quiet CPU) then stand in the tables instead of this machine's.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks.predictor_material import CONTEXT, load_nano, read_text
from steerpipe.arena.contest import Options, run_arena
from steerpipe.arena.entries import Entry, Role
from steerpipe.arena.lineup import saved_entries, shipped_reuse, usual_entries
from steerpipe.arena.machines import stated_machines
from steerpipe.arena.metrics import Metrics
from steerpipe.arena.page import write_page
from steerpipe.arena.plots import draw_all
from steerpipe.arena.results import ArenaResult, EntryResult
from steerpipe.arena.rows import TextTable, amdahl_table, cost_table, metrics_table, summary_table, worth_table
from steerpipe.arena.timing import Timing
from steerpipe.predict.records import TracedSequence, pack_traces
from steerpipe.predict.trajectory import Trajectory
from steerpipe.runtime.models import find_model
from steerpipe.trace.live import TokenSequence, read_geometry, trace_texts
from steerpipe.train.material import Material
from steerpipe.train.models import routers_of_model
from steerpipe.transfer.replay_report import ReplayReport

HORIZONS = (0, 1, 2, 3)
TEXT_TOKENS = 1_600_000  # as train_predictors reads them
LONGEST = 160
PICTURED = {
    "head", "head, pre-attention", "lookahead", "lookahead + defaults + shared", "estimator", "hybrid", "blend",
    "affinity", "transition", "previous", "frequency", "lstm (layers)",
    "mlp (both), layer 12 alone", "transformer (both), layer 12 alone",
}  # fmt: skip


def traced(model: PreTrainedModel, sequences: list[TokenSequence], tokens: int) -> list[TracedSequence]:
    """The first `tokens` tokens, each text cut to LONGEST: more prompts say more than long ones."""
    kept, total = [], 0
    for sequence in sequences:
        if total >= tokens:
            break
        part = TokenSequence(sequence.prompt, sequence.tokens[:LONGEST], min(sequence.prompt_tokens, LONGEST))
        kept.append(part)
        total += len(part.tokens)
    order = {each.prompt: number for number, each in enumerate(kept)}
    done = trace_texts(model, kept, states=True, state_dtype=torch.float32, max_tokens=CONTEXT)
    return sorted(done, key=lambda each: order[each.prompt])  # documents and chats mixed, as they were drawn


def with_timings(result: ArenaResult, entries: list[Entry], results: dict[str, Any]) -> ArenaResult:
    """The microseconds of train_predictors' machine, by the file that each entry's shortest horizon came from."""
    timed = []
    for entry, found in zip(entries, result.entries, strict=True):
        file = entry.files.get(min(entry.by_horizon))
        cell = results["timings"].get(file.stem, {}) if file is not None else {}
        cpu, gpu = (Timing(**cell[device]) if device in cell else None for device in ("cpu", "cuda"))
        timed.append(replace(found, cpu=cpu, gpu=gpu))
    machine = f"{results['run']['device']} and one core of its host"
    return replace(result, setting=replace(result.setting, machine=machine), entries=tuple(timed))


def brief(result: ArenaResult) -> dict[str, Any]:
    """What tables and docs are made of, in three digits, without what can be computed from the rest."""
    return {
        "setting": asdict(result.setting),
        "overall_columns": list(OVERALL),
        "entries": [_brief_entry(entry) for entry in result.entries],
        "worth_tokens": result.worth_tokens,
        "worth_columns": list(WORTH),
        "worth": {
            each.machine.name: {
                run.name: [read(run) for read in WORTH.values()]
                for run in (*each.baselines, *each.entries, *each.with_reuse)
            }
            for each in result.worth
        },
    }


OVERALL = [each.name for each in fields(Metrics) if each.name not in ("decisions", "missed")]
WORTH: dict[str, Callable[[ReplayReport], float]] = {
    "tpot_ms": lambda run: round(1e3 * run.tpot_mean_seconds, 2),
    "p95_ms": lambda run: round(1e3 * run.tpot_p95_seconds, 2),
    "stall_ms": lambda run: round(1e3 * run.stall_seconds_per_token, 2),
    "hit": lambda run: _short(run.hits / (run.hits + run.late + run.misses)),
    "late": lambda run: _short(run.late / (run.hits + run.late + run.misses)),
    "megabytes": lambda run: _short((run.demand_bytes_per_token + run.guess_bytes_per_token) / 1e6),
    "used": lambda run: _short(run.guess_precision),
}


def _brief_entry(entry: EntryResult) -> dict[str, Any]:
    said = {key: getattr(entry, key) for key in ("name", "origin", "parameters", "multiply_adds", "refused")}
    training = entry.training
    horizons = {
        each.horizon: {
            "overall": [_short(getattr(each.overall, key)) for key in OVERALL],
            "recall_by_layer": [None if layer is None else _short(layer.recall) for layer in each.layers],
        }
        for each in entry.horizons
    }
    return said | {
        "role": entry.role.value,
        "train": None if training is None else [training.tokens, training.seconds, training.device],
        "cpu_us": None if entry.cpu is None else round(entry.cpu.eager_microseconds),
        "gpu_us": None if entry.gpu is None else round(entry.gpu.graph_microseconds or entry.gpu.eager_microseconds),
        "horizons": horizons,
    }


def _short(value: Any) -> Any:
    if isinstance(value, list):
        return [_short(each) for each in value]
    return float(f"{value:.3g}") if isinstance(value, float) else value


def tables(result: ArenaResult) -> str:
    """For docs/arena.md."""
    quarter = [each for each in result.worth if each.machine.residency == 0.25]
    made = [metrics_table(result), cost_table(result)]
    if quarter:
        made += [summary_table(quarter), *(worth_table(each, result.worth_tokens) for each in quarter[1:2])]
        made.append(amdahl_table(result))
    return "\n".join(_markdown(table) for table in made)


def _markdown(table: TextTable) -> str:
    ruler = "|---|" + "---:|" * (len(table.headings) - 1)
    rows = [f"| {' | '.join(row)} |" for row in (table.headings, *table.rows)]
    return "\n".join([f"{table.title}. {table.caption}.", "", rows[0], ruler, *rows[1:], ""])


def shown(result: ArenaResult) -> ArenaResult:
    """With the entries that a picture has room for."""
    names = {entry.name for entry in result.entries if entry.name in PICTURED or entry.role is not Role.CONTESTANT}
    worth = [replace(each, entries=tuple(run for run in each.entries if run.name in names)) for each in result.worth]
    entries = tuple(entry for entry in result.entries if entry.name in names)
    return replace(result, entries=entries, worth=tuple(worth))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=Path, required=True)
    parser.add_argument("--chats", type=Path, required=True)
    parser.add_argument("--predictors", type=Path, required=True)
    parser.add_argument("--timings", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--test-tokens", type=int, default=8_000)
    parser.add_argument(
        "--control-tokens", type=int, default=8_000, help="training text that the control is counted on"
    )
    parser.add_argument("--replay-tokens", type=int, default=450)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    start = time.monotonic()

    def log(what: str) -> None:
        print(f"{time.monotonic() - start:6.1f} s  {what}", flush=True)

    model, folder = load_nano("cpu")
    text = read_text(options.documents, options.chats, folder, TEXT_TOKENS)
    train, test = traced(model, text.train, options.control_tokens), traced(model, text.test, options.test_tokens)
    log(f"traced {sum(len(each.tokens) for each in (*train, *test)):,} tokens")
    geometry, routers = read_geometry(model), routers_of_model(model)
    material = Material(pack_traces(train, geometry), len(train), int(model.config.vocab_size))
    pack = find_model(None)
    files = [file for file in sorted(options.predictors.rglob("*.safetensors")) if file.parent.name != "shipped"]
    entries = [_named(each) for each in saved_entries(files, pack, routers, HORIZONS, "cpu", test)]
    entries += [_bound_at_one(each) for each in usual_entries(material, HORIZONS, "nano") if not _competes(each)]
    machines = stated_machines() if options.replay_tokens else []
    measured = Options(
        machines=machines, worth_tokens=options.replay_tokens, jobs=options.jobs,
        timings=options.timings is None, reuse=shipped_reuse(pack),
    )  # fmt: skip
    result = run_arena("nano as shipped", geometry, train, test, entries, measured, progress=log)
    if options.timings is not None:
        results = json.loads(options.timings.read_text(encoding="utf-8"))
        result = with_timings(result, entries, results)
    write(result, options.out)
    log("done")


def _named(entry: Entry) -> Entry:
    """A history network that was trained for one layer says so."""
    targets = {d.target for each in entry.predictors if isinstance(each, Trajectory) for d in each.decisions}
    if len(targets) != 1:
        return entry
    return replace(entry, name=f"{entry.predictors[0].name}, layer {targets.pop()} alone")


def _competes(entry: Entry) -> bool:
    return entry.role is Role.CONTESTANT


def _bound_at_one(entry: Entry) -> Entry:
    """Bounds score the same at every horizon: once is enough."""
    return replace(entry, by_horizon={1: entry.by_horizon[1]}) if entry.role is Role.BOUND else entry


def write(result: ArenaResult, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    pictures = draw_all(shown(result))
    for name, svg in pictures.items():
        (out / f"arena-{name}.svg").write_text(svg, encoding="utf-8")
    (out / "nano.json").write_text(json.dumps(brief(result), separators=(",", ":")) + "\n", encoding="utf-8")
    (out / "tables.md").write_text(tables(result), encoding="utf-8")
    (out / "arena.html").write_text(write_page(result, pictures), encoding="utf-8")


if __name__ == "__main__":
    main()
