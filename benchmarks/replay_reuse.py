"""Eviction by the shipped reuse forecast in the product's own policy and table, on held-out text, on stated machines.

    python benchmarks/replay_reuse.py --documents heldout.jsonl.gz --out reuse-replay.json [--tokens 2000]

The text is of the prompts that train_reuse.py holds out. Machines have blocks of Qwen1.5-MoE and one link; LFRU has the
half-life that was best on training prompts. `+ recall`: guesses of .90 / .82 / .76 recall, 1 to 3 layers ahead.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from benchmarks.predictor_material import CONTEXT, load_nano, read_text
from steerpipe.arena.foresee import foresee_reuse, recording_of
from steerpipe.predict.reuse_file import load_reuse
from steerpipe.predict.shipped import for_model
from steerpipe.runtime.models import find_model
from steerpipe.trace.live import TokenSequence
from steerpipe.train.material import collect
from steerpipe.transfer.forecasts import RecallPredictor
from steerpipe.transfer.machine import Machine, slots_of_share
from steerpipe.transfer.replay import replay

SHARES = (0.25, 0.4)
BLOCKS = {"bf16 at 55 GB/s": (17_300_000, 55e9), "int4 at 25 GB/s": (4_600_000, 25e9)}
LAYER_SECONDS = 100e-6
LFRU_TOKENS = 64.0
RECALLS = (0.90, 0.82, 0.76)
WARMUP_TOKENS = 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=2000)
    options = parser.parse_args()
    model, folder = load_nano("cpu")
    text = read_text(options.documents, None, folder, 10**9)
    trace = collect(model, _first(text.test, options.tokens), max_tokens=CONTEXT)
    recording = recording_of(trace, "held-out text")
    shipped = for_model(find_model(None))
    assert shipped is not None, "the package has no predictors"
    scores = foresee_reuse(load_reuse(shipped.files["reuse"]), trace)
    rows = []
    for machine_name, (block_bytes, rate) in BLOCKS.items():
        for share in SHARES:
            machine = Machine(slots_of_share(share, recording.all_experts), block_bytes, rate, LAYER_SECONDS)
            for guesses in (None, RecallPredictor(recording.routing, recording.experts, RECALLS)):
                for policy in ("lfru", "reuse", "belady"):
                    said = replay(
                        recording, machine, policy, predictor=guesses, warmup_tokens=WARMUP_TOKENS,
                        reuse=scores if policy == "reuse" else None, name=policy + (" + recall" if guesses else ""),
                        half_life_tokens=LFRU_TOKENS if policy == "lfru" else 32.0,
                    )  # fmt: skip
                    rows.append({"machine": machine_name, "residency": share, **asdict(said)})
                    tpot = 1e3 * said.tpot_mean_seconds
                    print(
                        f"{machine_name:16} {share:5.1%} {said.name:16} {said.hit_rate:7.2%} {tpot:7.2f} ms", flush=True
                    )
    options.out.write_text(json.dumps(rows, indent=1), encoding="utf-8")


def _first(sequences: list[TokenSequence], tokens: int) -> list[TokenSequence]:
    """The first window of each, as many tokens in all."""
    kept: list[TokenSequence] = []
    total = 0
    for sequence in sequences:
        if total >= tokens:
            break
        kept.append(TokenSequence(sequence.prompt, sequence.tokens[: min(CONTEXT, tokens - total)], 0))
        total += len(kept[-1].tokens)
    return kept


if __name__ == "__main__":
    main()
