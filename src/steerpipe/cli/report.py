"""`steerpipe report`: one file for a bug report."""

import json
from pathlib import Path
from typing import Annotated

import typer

from steerpipe.cli import options
from steerpipe.cli.shared import Debug, Json, Model, Predict, app, guarded, quiet_transformers
from steerpipe.core.whole_file import check_place


@app.command()
def report(
    model: Model = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="the file to write")] = Path("steerpipe-report.zip"),
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="what to answer; it is not in the file")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="tokens of the answer")] = 64,
    dtype: options.Dtype = None,
    device: options.Device = None,
    threads: options.Threads = None,
    fast_memory: options.FastMemory = None,
    ram: options.Ram = None,
    pace: options.Pace = None,
    policy: options.Policy = None,
    predict: Predict = None,
    cache_dir: options.CacheDir = None,
    config: options.Config = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Write doctor, config, counters, timeline and a replayable trace into one file. No text of a prompt is in it."""
    flags = {
        "dtype": dtype, "device": device, "threads": threads, "fast_memory": fast_memory, "ram": ram, "pace": pace,
        "policy": policy, "predict": predict, "cache_dir": cache_dir, "profile": False,
    }  # fmt: skip

    def run() -> None:
        from steerpipe.core.config import load_config
        from steerpipe.doctor import run_doctor
        from steerpipe.runtime.report import NEUTRAL_PROMPT, ROUTING, report_run, write_report

        check_place(out, "the report")
        quiet_transformers()
        done = report_run(model, load_config(flags, file=config), prompt or NEUTRAL_PROMPT, max_tokens)
        parts = write_report(out, run_doctor().as_json(), done)
        error = done.facts.get("error")
        if as_json:
            print(json.dumps({"file": str(out), "parts": parts, "error": error}))
            return
        print(f"{out}: {', '.join(parts)}; no text of a prompt or an answer is in it")
        if error:
            print(f"the run failed, and the report says how: {error['kind']}")
        if ROUTING in parts:
            print(f"unzip it, then: steerpipe replay {ROUTING} --warmup 8")

    guarded(run, debug)
