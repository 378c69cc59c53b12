"""What eviction by the reuse forecast is worth on a GPU at full shape, its own cost included.

    python -m benchmarks.reuse_on_gpu --forecasts FILE --format int4 --json FILE

Recorded routing; the forecast's arithmetic (rank 128, four taps, made-up weights) runs as a branch of the graph and the
host takes every answer, but the policy is told the recorded scores. "told": the same without the arithmetic.
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.predict_on_gpu import LENGTHS, Bench
from benchmarks.predict_parts import Log
from benchmarks.reuse_parts import Heard
from steerpipe.bench.forecasts import read_forecasts
from steerpipe.bench.prediction import ToldReuse
from steerpipe.bench.shapes import make_shape
from steerpipe.store.formats import parse_expert_format
from steerpipe.store.policies import Lfru, Policy, Reuse
from steerpipe.transfer.machine import slots_of_share


class ReuseBench(Bench):
    def row(self, name: str, share: float, *, served: bool) -> dict[str, Any]:
        assert self.file.reuse is not None, "the file has no reuse scores"
        policy: Policy | str = "lfru"
        if name != "LFRU":
            policy = (Heard if name == "reuse" else ToldReuse)(self.recording, self.file.reuse, LENGTHS)
        with self.open(slots_of_share(share, self.shape.all_experts), policy, served=served) as source:
            self.listen(policy)
            steps, found = self.steps(source, self.routing, self.given.warmup, self.given.tokens)
            source.check_integrity()
        if isinstance(policy, Heard):
            found["heard"] = policy.heard / (LENGTHS + self.given.warmup + self.given.tokens)
        moved = found["demand_mb"] * 1e6
        return found | {
            "row": f"{name}, {'served' if served else 'direct'}", "share": share,
            "live_ms": statistics.fmean(steps) * 1e3, "median_ms": statistics.median(steps) * 1e3,
            "link_utilisation": moved / self.link / statistics.fmean(steps),
        }  # fmt: skip

    def resident_with(self, *, branch: bool) -> float:
        """Seconds of a step in which nothing is ever missing: what the arithmetic alone costs."""
        from steerpipe.bench.residents import ResidentBlocks

        source, recording = ResidentBlocks(self.shape, self.device), self.recording
        if branch:
            assert self.file.reuse is not None
            self.listen(Heard(recording, self.file.reuse, LENGTHS))
        steps, _ = self.steps(source, self.routing, 16, self.given.tokens)
        source.close()
        self.rig.forget()
        return statistics.median(steps)

    def host(self) -> dict[str, float]:
        """Microseconds of a token that a policy takes of the host: uses of 24 layers, four forecasts."""
        assert self.file.reuse is not None
        recording, spent = self.recording, {}
        policies: dict[str, Lfru] = {
            "LFRU": Lfru(recording.all_experts), "reuse": ToldReuse(recording, self.file.reuse, 0),
            "reuse without forecasts": Reuse(recording.all_experts),
        }  # fmt: skip
        uses = recording.routing + np.arange(recording.layers)[:, None] * recording.experts
        for name, policy in policies.items():
            begin = time.perf_counter()
            for token, rows in enumerate(uses.tolist()):
                for numbers in rows:
                    policy.touch_many(numbers, float(token + 1))
            spent[name] = (time.perf_counter() - begin) * 1e6 / len(uses)
        return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forecasts", type=Path, required=True)
    parser.add_argument("--shape", default="qwen1.5-moe")
    parser.add_argument("--format", default="int4", help="bf16, int8 or int4")
    parser.add_argument("--shares", default="0.5,0.25,0.125")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--served-rounds", type=int, default=1)
    parser.add_argument("--warmup", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args()
    given.driver, given.chunk, given.window = "direct", 4608, 1
    form = parse_expert_format(given.format)
    assert form is not None, "a benchmark has no native format"
    shape = make_shape(given.shape, form, 1024)
    bench = ReuseBench(shape, read_forecasts(given.forecasts, shape.moe.experts), given)
    log = Log(given.json, format=given.format, tokens=given.tokens, warmup=given.warmup)
    log.add("host_us_per_token", bench.host())
    bench.resident()
    log.add("resident_ms", [bench.resident_with(branch=each) * 1e3 for each in (False, True, False, True)])
    for number in range(max(given.rounds, given.served_rounds)):
        for share in (float(each) for each in given.shares.split(",")):
            for served, rounds in ((False, given.rounds), (True, given.served_rounds)):
                for name in ("LFRU", "reuse", "told") if number < rounds else ():
                    log.add_line({"round": number} | bench.row(name, share, served=served))


if __name__ == "__main__":
    main()
