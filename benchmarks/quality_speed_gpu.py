"""What lossy answers to a miss save on a GPU at full shape: ms per token beside exact ones, over recorded routing.

    python -m benchmarks.quality_speed_gpu --forecasts FILE --format int4 --json FILE

Made-up weights and default vectors; routing, and the plans of the dial, are nano's (24 layers, 60 experts, top 4). An
exact token is a captured graph (direct or served) or, as a lossy one always is, launched kernel by kernel (eager).
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch

from benchmarks.predict_on_gpu import LENGTHS, Bench
from benchmarks.predict_parts import Log
from steerpipe.bench.forecasts import read_forecasts
from steerpipe.bench.residents import ResidentBlocks
from steerpipe.bench.shapes import make_shape
from steerpipe.core.config import EngineConfig
from steerpipe.core.quality import MissPolicy
from steerpipe.runtime.models import EMBEDDED
from steerpipe.runtime.quality import Chosen, choose, identity_of
from steerpipe.runtime.substitutes import Substitutes
from steerpipe.store.formats import parse_expert_format
from steerpipe.store.reader import open_pack
from steerpipe.transfer.machine import slots_of_share

LOSSY = (MissPolicy.DROP, MissPolicy.SURROGATE, MissPolicy.PATCH, "fast", "balanced", "high")


class SpeedBench(Bench):
    """Rows with a desk beside those of the exact engine."""

    def row(self, name: str, share: float) -> dict[str, Any]:
        desk: Substitutes | None = None
        with self.open(slots_of_share(share, self.shape.all_experts), served=name != "exact, direct") as source:
            decoder: Any = self.rig.decoder
            if name == "exact, eager":
                decoder.graphs = False
            elif not name.startswith("exact"):
                decoder.misses = desk = self.desk(name, source.impatient())
            steps, found = self.steps(source, self.routing, self.given.warmup, self.given.tokens)
            source.check_integrity()
        told = {"row": name, "share": share, "live_ms": statistics.fmean(steps) * 1e3} | found
        moved = (found["demand_mb"] + found["guess_mb"]) * 1e6
        told |= {"median_ms": statistics.median(steps) * 1e3, "moved_mb": moved / 1e6}
        told["link_utilisation"] = moved / self.link / statistics.fmean(steps)
        if desk is not None:
            counts = desk.accounts.total
            told |= {"substituted": counts.share, "patched": counts.patched / max(1, counts.substituted)}
            told["expected_nats"] = counts.nats / (LENGTHS + self.given.warmup + self.given.tokens)
        return told

    def desk(self, asked: str, shelf: Any) -> Substitutes:
        pack = open_pack(EMBEDDED)
        chosen: Chosen | None = choose(EngineConfig(quality=asked), pack.spec, EMBEDDED, identity_of(pack), form="int4")
        assert chosen is not None, "a lossy way"
        spec, moe = self.shape.spec, self.shape.moe
        vectors = torch.randn(self.shape.layers, moe.experts, spec.hidden, generator=torch.Generator().manual_seed(0))
        return Substitutes(chosen.plan, shelf, spec.moe_layers, 0.1 * vectors, allowance=chosen.allowance)

    def resident_eager(self) -> float:
        """Seconds of a step with all experts there, launched kernel by kernel."""
        source = ResidentBlocks(self.shape, self.device)
        self.rig.decoder.graphs = False  # type: ignore[union-attr]
        steps, _ = self.steps(source, self.routing, 8, self.given.tokens)
        source.close()
        self.rig.forget()
        return statistics.fmean(steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forecasts", type=Path, required=True)
    parser.add_argument("--shape", default="qwen1.5-moe")
    parser.add_argument("--format", default="int4", help="bf16, int8 or int4")
    parser.add_argument("--shares", default="0.25,0.5")
    parser.add_argument("--rows", default=",".join(("exact_direct", "exact_served", "exact_eager", *LOSSY)))
    parser.add_argument("--warmup", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args()
    given.driver, given.chunk, given.window = "direct", 4608, 1
    form = parse_expert_format(given.format)
    assert form is not None, "a benchmark has no native format"
    shape = make_shape(given.shape, form, 1024)
    bench = SpeedBench(shape, read_forecasts(given.forecasts, shape.moe.experts), given)
    log = Log(
        given.json, format=given.format, tokens=given.tokens, warmup=given.warmup, block_bytes=shape.layout.block_bytes
    )
    log.add("link", bench.link)
    bench.resident()
    log.add("resident_ms", bench.resident() * 1e3)
    log.add("resident_eager_ms", bench.resident_eager() * 1e3)
    for share in (float(each) for each in given.shares.split(",")):
        for name in given.rows.split(","):
            log.add_line(bench.row(name.replace("_", ", "), share))


if __name__ == "__main__":
    main()
