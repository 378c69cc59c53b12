"""Is the simulator tied to reality? Live time per token under budgets, against `replay` with measured rates.

    python benchmarks/replay_against_live.py [--pack FOLDER] [--tokens 160]

One process, one torch thread. Measured first: a step with every expert resident, one expert's product, and, with two
slots and an unpaced link, what a miss costs: the stall (read, check, decode, wake-up) and the engine thread's own work
beside it. That work runs while a paced link sleeps, but not while the reader computes (they share the interpreter's
lock), so a block takes the stall plus the longer of pace and own work. Then each of six points runs live with its
routing recorded, and the recording is replayed on a machine made of those figures. Without --pack a random model of
nano's shape is used: its routing is degenerate, which matters to neither side, since both see the same.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.utils import logging

from steerpipe import Pipeline
from steerpipe.core.events import RoutingRecord
from steerpipe.model.checkpoint import open_checkpoint
from steerpipe.model.moe import expert_ffn
from steerpipe.store.formats import parse_expert_format
from steerpipe.store.pack import PackOptions, write_pack
from steerpipe.store.reader import open_pack
from steerpipe.tiny import write_tiny
from steerpipe.transfer.machine import Machine
from steerpipe.transfer.recorded import Recording
from steerpipe.transfer.replay import replay

NANO: dict[str, Any] = {
    "vocab_size": 8192, "hidden_size": 192, "num_hidden_layers": 24, "num_attention_heads": 3,
    "num_key_value_heads": 3, "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 192, "mlp_only_layers": [], "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}  # fmt: skip
POINTS = [("12.5%", "40MB"), ("25%", "40MB"), ("50%", "40MB"), ("25%", "150MB"), ("12.5%", None), ("25%", None)]
WARMUP = 48  # tokens after which a step is measured, live and replayed


class Recorder:
    """Keeps the routing of decode steps: [layers, top_k] per token."""

    def __init__(self) -> None:
        self.rows: list[list[np.ndarray[Any, Any]]] = []

    def observe(self, record: RoutingRecord) -> None:
        if len(record.positions) == 1:
            if record.layer == 0:
                self.rows.append([])
            self.rows[-1].append(record.experts[0])


def live(pack: Path, tokens: int, **budget: Any) -> tuple[float, Recorder, Any]:
    """Median seconds per token after the warm-up, the routing, and what the ladder did meanwhile."""
    recorder = Recorder()
    with Pipeline(pack, dtype="float32", threads=1, profile=False, sink=recorder, **budget) as pipe:
        prompt = [5 + 31 * i % 8000 for i in range(8)]
        stamps, before = [], None
        for event in pipe.stream(prompt, temperature=1.0, seed=3, max_tokens=tokens, ignore_eos=True):
            stamps.append(time.perf_counter())
            if len(stamps) == WARMUP:
                before = pipe.counters()
            assert event is not None
        after = pipe.counters()
    spent = (stamps[-1] - stamps[WARMUP - 1]) / (len(stamps) - WARMUP)
    return spent, recorder, None if after is None or before is None else after - before


def expert_seconds(pack: Path) -> float:
    """One expert's product on one row: median."""
    opened = open_pack(pack)
    weights = [opened.decode_block(0, opened.read_block(0, e), torch.float32) for e in range(32)]
    x = torch.randn(1, opened.spec.hidden)
    times = []
    for _ in range(50):
        begun = time.perf_counter()
        for each in weights:
            expert_ffn(x, each)
        times.append((time.perf_counter() - begun) / len(weights))
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pack", type=Path)
    parser.add_argument("--tokens", type=int, default=160)
    given = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        pack = given.pack or Path(scratch) / "pack"
        if given.pack is None:
            write_tiny("qwen2_moe", Path(scratch) / "model", **NANO)
            write_pack(open_checkpoint(Path(scratch) / "model"), pack, PackOptions(parse_expert_format("int4")))
        print(json.dumps(measure(pack, given.tokens)))


def measure(pack: Path, tokens: int) -> dict[str, Any]:
    opened = open_pack(pack)
    layers, moe = opened.spec.moe_layers, opened.spec.moe(opened.spec.moe_layers[0])
    block = opened.layout(layers[0]).block_bytes
    resident, _, _ = live(pack, tokens)
    one_expert = expert_seconds(pack)
    squeezed, _, misses = live(pack, tokens, fast_memory="0.01%")
    miss = misses.stall_seconds / misses.misses
    handling = (squeezed - resident) * (tokens - WARMUP) / misses.misses - miss  # the engine thread's own, per miss
    layer = resident / len(layers) - moe.top_k * one_expert
    missed = f"{miss * 1e6:.0f} + {handling * 1e6:.0f} us"
    print(f"resident {resident * 1e3:.2f} ms · one expert {one_expert * 1e6:.0f} us · one miss {missed}")
    rows = []
    for share, pace in POINTS:
        spent, recorder, counted = live(pack, tokens, fast_memory=share, pace=pace)
        routing = np.array(recorder.rows, dtype=np.int64)  # [tokens, layers, top_k]
        recording = Recording("live", routing, np.zeros(len(routing), dtype=np.int32), moe.experts)
        machine = Machine(
            slots=int(float(share[:-1]) / 100 * len(layers) * moe.experts), block_bytes=block,
            link_bytes_per_second=block / max(block / (float(pace[:-2]) * 1e6) if pace else 0.0, handling),
            layer_seconds=layer,
            expert_seconds=one_expert, latency_seconds=miss,
        )  # fmt: skip
        predicted = replay(recording, machine, "lfru", warmup_tokens=WARMUP).tpot_mean_seconds
        hit = counted.hits / counted.leased
        rows.append({"share": share, "pace": pace, "live_ms": spent * 1e3, "replay_ms": predicted * 1e3, "hit": hit})
        error = predicted / spent - 1
        print(
            f"{share:>6} {pace or 'unpaced':>8}  live {spent * 1e3:7.2f}  replay {predicted * 1e3:7.2f}  {error:+.1%}"
        )
    return {
        "resident_ms": resident * 1e3,
        "expert_us": one_expert * 1e6,
        "miss_us": miss * 1e6,
        "handling_us": handling * 1e6,
        "points": rows,
    }


if __name__ == "__main__":
    main()
