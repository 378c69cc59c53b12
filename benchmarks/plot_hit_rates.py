"""Draws docs/pictures/ladder.svg: hit rates and time per token over the share of experts in fast memory, simulated.

    python benchmarks/plot_hit_rates.py [TRACE] [--tokens 2000]

Needs the extra [plots]. The picture in docs/ is drawn from benchmarks/traces/nano-chat.safetensors. Without a trace
the routing is synthetic: fitted to the published curves of a trained model of 24 layers, 60 experts, top-4 (see
transfer/synthetic.py), so the left picture repeats them rather than proving them.
"""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from steerpipe.arena.plots import subplots, svg
from steerpipe.cli.shared import guarded
from steerpipe.transfer.machine import Machine, slots_of_share
from steerpipe.transfer.recorded import draw_recording
from steerpipe.transfer.replay import Keep, replay
from steerpipe.transfer.synthetic import SyntheticRouting
from steerpipe.transfer.trace_file import read_recording

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHARES = (0.125, 0.25, 0.4, 0.5, 0.75)
POLICIES = {"lru": "LRU", "lfru": "LFRU", "belady": "Belady (knows the future)"}
OUT = Path(__file__).parent.parent / "docs" / "pictures"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", nargs="?", type=Path)
    parser.add_argument("--tokens", type=int, default=2000)
    given = parser.parse_args()
    figure, axes = subplots(1, 2, 9, 3.2)
    drawn = SyntheticRouting(tokens=given.tokens)
    recording = read_recording(given.trace, tokens=given.tokens) if given.trace else draw_recording(drawn)
    curves: dict[str, dict[str, list[float]]] = {}
    resident = demand = 0.0
    for share in SHARES:
        machine = Machine(slots_of_share(share, recording.all_experts), 17_300_000, 25e9, 0.1e-3)
        for policy in POLICIES:
            run = replay(recording, machine, policy, warmup_tokens=given.tokens // 10)
            curve = curves.setdefault(policy, {"hit": [], "tpot_ms": []})
            curve["hit"].append(run.hit_rate)
            curve["tpot_ms"].append(run.tpot_mean_seconds * 1e3)
        demand = replay(recording, machine, "lru", keep=Keep.NOTHING).tpot_mean_seconds * 1e3
        resident = replay(recording, machine, "lru", keep=Keep.ALL).tpot_mean_seconds * 1e3
    draw(axes, curves, demand, resident, recording.name)
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "ladder.svg").write_text(svg(figure), encoding="utf-8")
    figures = {"recording": recording.name, "shares": SHARES, "on_demand_ms": demand, "resident_ms": resident}
    (OUT / "ladder.json").write_text(json.dumps({**figures, "curves": curves}, indent=1) + "\n")


def draw(
    axes: "list[Axes]", curves: dict[str, dict[str, list[float]]], demand: float, resident: float, name: str
) -> None:
    left, right = axes
    percent = [100 * share for share in SHARES]
    for policy, label in POLICIES.items():
        left.plot(percent, [100 * hit for hit in curves[policy]["hit"]], marker="o", label=label)
        right.plot(percent, curves[policy]["tpot_ms"], marker="o", label=label)
    right.axhline(demand, color="grey", linestyle=":", label="on demand, nothing kept")
    right.axhline(resident, color="grey", linestyle="--", label="all resident")
    left.set(xlabel="% of the experts in fast memory", ylabel="hit rate, %", ylim=(0, 100))
    right.set(xlabel="% of the experts in fast memory", ylabel="ms per token (simulated)", ylim=(0, None))
    right.set_title("Qwen1.5-MoE blocks in bf16 over 25 GB/s", fontsize=9)
    left.set_title(name, fontsize=9)
    right.legend(frameon=False, fontsize=8, loc="upper right", bbox_to_anchor=(1.0, 0.93))


if __name__ == "__main__":
    guarded(main, debug=False)
