"""Is the simulator tied to reality? Live time per token under budgets, against `replay` with measured rates.

    python benchmarks/replay_against_live.py [--pack FOLDER | --large] [--tokens 96] [--repeats 3] [--json FILE]

One process, one torch thread. A round runs the product with every expert in a slot, at three budgets for calibration
(another prompt, another seed) and at the six points, a few tokens of each in turn, so that a slow second falls on all
alike; a step's time is its median over the rounds, a run's the median of its steps. What a miss costs is solved for on
the calibration runs (`ladder_rates`), and the points' routing is replayed on the machine that comes of it: nothing of
it was fitted on them. Without --pack a random model of nano's shape is used: its routing is degenerate, which matters
to neither side, since both see the same.
"""

import argparse
import json
import statistics
import tempfile
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ladder_rates import Compute, ComputeRates, Seen, replayed, solve_misses
from live_runs import WARMUP, Live, Run, Text, live
from transformers.utils import logging

from steerpipe.model.checkpoint import open_checkpoint
from steerpipe.store.formats import parse_expert_format
from steerpipe.store.pack import PackOptions, write_pack
from steerpipe.tiny import write_tiny
from steerpipe.transfer.machine import Machine
from steerpipe.transfer.recorded import Recording

NANO: dict[str, Any] = {
    "vocab_size": 8192, "hidden_size": 192, "num_hidden_layers": 24, "num_attention_heads": 3,
    "num_key_value_heads": 3, "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 192, "mlp_only_layers": [], "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}  # fmt: skip
LARGE = NANO | {  # blocks of 1.2 MB in int8: what a link is for; nano's are 16 KiB
    "hidden_size": 768, "num_hidden_layers": 8, "num_attention_heads": 12, "num_key_value_heads": 12,
    "num_experts": 24, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 768,
}  # fmt: skip
POINTS = (0.125, 0.25, 0.5)  # predicted
CALIBRATION = (0.05, 0.375, 0.75)  # another text: nothing else tells what a miss costs
PREDICTED, CALIBRATING = Text(5, 3), Text(77, 11)
RESIDENT = Run(CALIBRATING, 1.0, None)

Pace = str | None


class Rounds:
    """All runs again and again, and the machine that comes of those for calibration."""

    def __init__(self, pack: Path, tokens: int, paces: list[Pace]) -> None:
        self._pack, self._tokens = pack, tokens
        self._compute = Compute(pack)
        self._rates: list[ComputeRates] = []
        self.points = [Run(PREDICTED, share, pace) for pace in paces for share in POINTS]
        calibration = [Run(CALIBRATING, share, pace) for pace in paces for share in CALIBRATION]
        self.lives: dict[Run, list[Live]] = {run: [] for run in (RESIDENT, *calibration, *self.points)}

    def once(self) -> None:
        self._rates.append(self._compute.rates())
        for lives, one in zip(self.lives.values(), live(self._pack, self._tokens, list(self.lives)), strict=True):
            lives.append(one)

    def seconds(self, run: Run) -> float:
        """Per token: each step's median over the rounds, which all make the same steps, and of these the median."""
        return float(np.median(np.median([each.spent for each in self.lives[run]], axis=0)))

    def by_round(self, run: Run) -> list[float]:
        """Milliseconds of the median step."""
        return [round(float(np.median(each.spent)) * 1e3, 2) for each in self.lives[run]]

    def recording(self, run: Run) -> Recording:
        routing = self.lives[run][0].routing  # the same tokens in every round
        return Recording("live", routing, np.zeros(len(routing), dtype=np.int32), self._compute.moe.experts)

    def machine(self, pace: Pace) -> Machine:
        """Of what was measured beside the points, and of nothing else."""
        compute, layers = self._compute, len(self._compute.layers)
        expert, shared = (statistics.median(each) for each in zip(*map(astuple, self._rates), strict=True))
        runs = [Run(CALIBRATING, share, pace) for share in CALIBRATION]
        read = statistics.median(each.read_seconds for run in runs for each in self.lives[run])
        machine = Machine(
            slots=layers * compute.moe.experts,
            block_bytes=compute.block_bytes,
            link_bytes_per_second=compute.block_bytes / read,
            layer_seconds=self.seconds(RESIDENT) / layers - compute.moe.top_k * expert - shared,
            beside_seconds=shared,
            expert_seconds=expert,
        )
        seen = [Seen(self.recording(run), run.share, self.seconds(run)) for run in runs]
        return solve_misses(machine, seen, WARMUP)


def compare(rounds: Rounds) -> dict[str, Any]:
    """Prints the tables; returns what they were made of."""
    machines = {pace: rounds.machine(pace) for pace in dict.fromkeys(run.pace for run in rounds.points)}
    rates = {pace or "unpaced": _rates(machine) for pace, machine in machines.items()}
    print(f"all experts in slots: {rounds.seconds(RESIDENT) * 1e3:.2f} ms per token; microseconds of the machine:")
    for name, figures in rates.items():
        print(f"{name:>8}: " + ", ".join(f"{what} {figure:.0f}" for what, figure in figures.items()))
    rows = [_row(rounds, run, machines[run.pace]) for run in rounds.lives if run is not RESIDENT]
    for pace in machines:
        _add_line(rounds.seconds(RESIDENT) * 1e3, [row for row in rows if row["pace"] == pace])
    for row in rows:
        print(_line(row))
    worst = max(abs(row["error"]) for row in rows if not row["calibration"])
    print(f"the worst point is {worst:.1%} off")
    resident = {"live_ms": round(rounds.seconds(RESIDENT) * 1e3, 2), "live_rounds_ms": rounds.by_round(RESIDENT)}
    return {"worst": worst, "resident": resident, "machine_us": rates, "runs": rows}


def _rates(machine: Machine) -> dict[str, float]:
    assert machine.decoding is not None, "it was solved for"
    seconds = {
        "ask": machine.ask_seconds, "read": machine.block_seconds, "decode": machine.decoding.seconds,
        "layer": machine.layer_seconds, "expert": machine.expert_seconds, "shared": machine.beside_seconds,
    }  # fmt: skip
    return {name: round(each * 1e6, 1) for name, each in seconds.items()}


def _row(rounds: Rounds, run: Run, machine: Machine) -> dict[str, Any]:
    report = replayed(machine, rounds.recording(run), run.share, WARMUP)
    measured = rounds.seconds(run)
    return {
        "calibration": run.text is CALIBRATING,
        "share": run.share,
        "pace": run.pace,
        "live_ms": round(measured * 1e3, 2),
        "live_rounds_ms": rounds.by_round(run),
        "replay_ms": round(report.tpot_median_seconds * 1e3, 2),
        "error": round(report.tpot_median_seconds / measured - 1, 4),
        "live_hit": round(rounds.lives[run][0].hit_rate, 4),
        "replay_hit": round(report.hit_rate, 4),
        "replay_misses": round(report.misses / report.tokens, 2),
    }


def _add_line(resident_ms: float, rows: list[dict[str, Any]]) -> None:
    """What no simulator would say: a line of time over misses, through the resident and the calibration runs."""
    known = [row for row in rows if row["calibration"]]
    misses = [0.0, *(row["replay_misses"] for row in known)]
    slope, start = np.polyfit(misses, [resident_ms, *(row["live_ms"] for row in known)], 1)
    for row in rows:
        row["line_error"] = round((start + slope * row["replay_misses"]) / row["live_ms"] - 1, 4)


def _line(row: dict[str, Any]) -> str:
    kind, spent = "calibration" if row["calibration"] else "point", row["live_rounds_ms"]
    return (
        f"{kind:>11} {row['share']:>6.1%} {row['pace'] or 'unpaced':>8}  "
        f"hit {row['live_hit']:.0%} ({row['replay_hit']:.0%})  live {row['live_ms']:6.2f} "
        f"({min(spent):.2f} to {max(spent):.2f})  replay {row['replay_ms']:6.2f}  {row['error']:+.1%}  "
        f"(a line {row['line_error']:+.1%})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pack", type=Path)
    parser.add_argument("--large", action="store_true", help="a random model with blocks of 1.2 MB")
    parser.add_argument("--pace", help="of the paced points; default: 40MB, with --large 400MB")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        pack = given.pack or random_pack(Path(scratch), large=given.large)
        rounds = Rounds(pack, given.tokens, [given.pace or ("400MB" if given.large else "40MB"), None])
        for _ in range(given.repeats):
            rounds.once()
        found = compare(rounds)
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


def random_pack(scratch: Path, *, large: bool) -> Path:
    write_tiny("qwen2_moe", scratch / "model", **(LARGE if large else NANO))
    options = PackOptions(parse_expert_format("int8" if large else "int4"))
    write_pack(open_checkpoint(scratch / "model"), scratch / "pack", options)
    return scratch / "pack"


if __name__ == "__main__":
    main()
