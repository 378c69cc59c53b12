"""How often a routed expert is in fast memory: LRU, LFRU and Belady at five residencies, beside a trained pilot's.

    python benchmarks/hit_rates.py [TRACE] [--experts 60] [--tokens 4000] [--warmup 200] [--json]

TRACE is a safetensors file with an integer tensor 'routing' [tokens, MoE layers, top_k]; without one the synthetic
routing of steerpipe.transfer.synthetic is drawn. The pilot is a trained model of 24 x 60 experts with top-4 whose
routing was recorded. The last line is JSON; with --json it is the only one.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from steerpipe.transfer.machine import Machine, slots_of_share
from steerpipe.transfer.recorded import Recording, draw_recording
from steerpipe.transfer.replay import replay
from steerpipe.transfer.synthetic import SyntheticRouting
from steerpipe.transfer.trace_file import read_recording

SHARES = (0.125, 0.25, 0.4, 0.5, 0.75)
PILOT = {"lru": (29, 46, 63, 73, 92), "lfru": (34, 52, 68, 77, 93), "belady": (57, 73, 85, 90, 98)}  # percent
SHAPE = (24, 60, 4)  # of the pilot: layers, experts, top_k


def hit_percent(recording: Recording, policy: str, share: float, warmup_tokens: int) -> float:
    """On a machine without any time in it: only who lies where counts."""
    slots = slots_of_share(share, recording.all_experts)
    machine = Machine(slots, block_bytes=1, link_bytes_per_second=1.0, layer_seconds=0.0)
    return 100 * replay(recording, machine, policy, warmup_tokens=warmup_tokens).hit_rate


def previous_token_percent(recording: Recording) -> float:
    """Experts that the token before was routed to as well."""
    same = recording.routing[1:, :, :, None] == recording.routing[:-1, :, None, :]  # [tokens - 1, layers, k, k]
    return 100 * float(same.any(axis=-1).mean())


def static_percent(recording: Recording, share: float) -> float:
    """Hits if the experts that this recording uses most had been there all the time: what popularity alone gives."""
    numbers = recording.routing + np.arange(recording.layers)[:, None] * recording.experts
    uses = np.sort(np.bincount(numbers.ravel(), minlength=recording.all_experts))[::-1]
    return 100 * float(uses[: slots_of_share(share, recording.all_experts)].sum() / uses.sum())


def render(recording: Recording, rates: dict[str, list[float]], pilot_like: bool) -> Table:
    shape = f"{recording.layers} x {recording.experts} experts, top-{recording.top_k}"
    table = Table(title=f"hit % of {recording.name}: {recording.tokens} tokens, {shape}", title_justify="left")
    table.add_column("policy")
    for share in SHARES:
        table.add_column(f"{share:.1%}", justify="right")
    for policy, row in rates.items():
        table.add_row(policy, *(f"{rate:.1f}" for rate in row))
        if pilot_like and policy in PILOT:
            table.add_row("  pilot", *(f"{rate}" for rate in PILOT[policy]), style="dim")
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Hit rates of eviction policies on recorded or synthetic routing.")
    parser.add_argument("trace", nargs="?", type=Path)
    parser.add_argument("--experts", type=int, help="experts per layer; as many as the trace routes to")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--warmup", type=int, default=200, help="tokens that are not counted")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    if options.trace is None:
        recording = draw_recording(SyntheticRouting(tokens=options.tokens))
    else:
        recording = read_recording(options.trace, options.experts, options.tokens)
    rates = {"static": [static_percent(recording, share) for share in SHARES]}
    for policy in PILOT:
        rates[policy] = [hit_percent(recording, policy, share, options.warmup) for share in SHARES]
    pilot_like = (recording.layers, recording.experts, recording.top_k) == SHAPE
    apart = [abs(rate - known) for policy, row in PILOT.items() for rate, known in zip(rates[policy], row, strict=True)]
    if not options.json:
        console = Console()
        console.print(f"of the token before: {previous_token_percent(recording):.0f} % (pilot: 21 %)")
        console.print(render(recording, rates, pilot_like))
        if pilot_like:
            console.print(f"apart from the pilot: {np.mean(apart):.1f} points on average, {max(apart):.1f} at most")
    print(json.dumps({"recording": recording.name, "tokens": recording.tokens, "shares": SHARES, "hit_percent": rates}))


if __name__ == "__main__":
    main()
