"""Findings for people (floors beside medians) and for programs (one JSON object)."""

import json
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from steerpipe import __version__
from steerpipe.bench.results import Findings, Run
from steerpipe.bench.routing import SHARES, Curve
from steerpipe.core.machine import read_cores, read_memory
from steerpipe.core.whole_file import write_named

_HEADINGS = ("floor", "median", "p95", "× floor", "tok/s", "hit", "missed MB", "experts", "kernels", "of memory")


def machine(device: str) -> dict[str, Any]:
    """What the figures were measured on: parts and versions, nothing that names the machine itself."""
    found: dict[str, Any] = {
        "steerpipe": __version__, "python": platform.python_version(), "torch": torch.__version__,
        "cores": read_cores().usable, "ram_bytes": read_memory().total_bytes, "device": device,
    }  # fmt: skip
    if device == "cuda":
        of_gpu = torch.cuda.get_device_properties(0)
        found |= {
            "triton": version("triton"), "cuda": torch.version.cuda, "gpu": of_gpu.name,
            "gpu_bytes": of_gpu.total_memory, "peak_gpu_bytes": torch.cuda.max_memory_allocated(),
        }  # fmt: skip
    return found


def as_json(findings: Findings) -> dict[str, Any]:
    return findings.as_json() | {"machine": machine(findings.device)}


def write_json(file: Path | None, content: dict[str, Any]) -> None:
    """Whole or not at all. Nothing happens without a file."""
    if file is not None:
        write_named(file, json.dumps(content, indent=1).encode(), "the JSON")


def render(findings: Findings) -> Table:
    """One line per run."""
    table = Table(
        title=f"{findings.options.shape} on {findings.device}: milliseconds per step, made-up weights",
        caption="hit: routed experts that were there; missed: per step; experts: distinct ones per layer and step; "
        "kernels: the experts' alone, and their rate as a share of the memory's",
        title_justify="left",
        caption_justify="left",
    )
    for heading in ("test", "format", "resident", "batch"):
        table.add_column(heading)
    for heading in _HEADINGS:
        table.add_column(heading, justify="right")
    for run in findings.runs:
        table.add_row(*_row(run))
    return table


def _row(run: Run) -> list[str]:
    def shown(value: float | None, form: str) -> str:
        return "–" if value is None else format(value, form)

    return [
        run.test,
        run.format,
        f"{run.residency:g} %",
        str(run.batch),
        f"{run.floor_ms:.3g}",
        f"{run.times.median_ms:.3f}",
        f"{run.times.p95_ms:.3f}",
        f"{run.ratio:.2f}",
        f"{run.tokens_per_second:.1f}",
        shown(run.hit_rate, ".0%"),
        f"{run.missed_bytes / 1e6:.4g}",
        f"{run.experts_per_layer:.1f}",
        shown(run.expert_kernels_ms, ".3f"),
        shown(run.expert_rate_share, ".0%"),
    ]


def render_curves(curves: tuple[Curve, ...], name: str) -> Table:
    """Hit rates of the routing that a run used, beside what is published."""
    table = Table(title=f"hit rates of {name}, simulated, by share of experts in fast memory", title_justify="left")
    table.add_column("policy")
    for share in SHARES:
        table.add_column(f"{share:.0%}", justify="right")
    for curve in curves:
        pairs = zip(curve.rates, curve.published, strict=True)
        table.add_row(curve.policy, *(f"{r:.1%}" + (f" (published {p:.1%})" if p else "") for r, p in pairs))
    return table
