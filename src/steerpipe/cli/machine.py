"""Verbs that show the engine and the machine: `demo`, `doctor`."""

import json

from steerpipe.cli.shared import Debug, Json, app, guarded, quiet_transformers


@app.command()
def demo(as_json: Json = False, debug: Debug = False) -> None:
    """Show one answer five ways, and tiny models of every family against transformers. Status 1 if any differs."""

    def run() -> None:
        from rich.console import Console

        from steerpipe.demo import run_demo

        quiet_transformers()
        report = run_demo(Console(quiet=as_json))
        if as_json:
            print(json.dumps(report.as_json()))
        if report.differing:
            raise SystemExit(1)

    guarded(run, debug)


@app.command()
def doctor(as_json: Json = False, debug: Debug = False) -> None:
    """Measure this machine: CPU traps, memory, pinning, GPU, disk; say what is wrong and what to do."""

    def run() -> None:
        from rich.console import Console

        from steerpipe.doctor import render, run_doctor

        report = run_doctor()
        if as_json:
            print(json.dumps(report.as_json()))
        else:
            Console().print(render(report))

    guarded(run, debug)
