"""What the policy `cpu` costs on a GPU: nano in bf16, int8 blocks, every miss computed from its block by the CPU.

    python -m benchmarks.quality_cpu TEXTS.jsonl OUT.json [windows]

The product that a GPU's engine uses for what lies in pinned memory (`transfer.cuda.nearby.block_ffn`), against the bf16
products of a slot; needs no GPU. Misses are those of an LFRU cache on paper that holds a quarter of the experts.
"""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.quality import Bench, texts
from benchmarks.quality_live import arguments
from steerpipe.core.config import EngineConfig
from steerpipe.core.quality import MissPolicy, QualityPlan
from steerpipe.model.checkpoint import open_checkpoint
from steerpipe.runtime.calibrating import open_subject
from steerpipe.runtime.calibration import Meter
from steerpipe.runtime.quality_rehearsal import Exact, OnPaper, Rehearsal
from steerpipe.runtime.substitutes import Substitutes
from steerpipe.store.formats import ExpertFormat
from steerpipe.store.pack import PackOptions, write_pack
from steerpipe.store.reader import Pack, open_pack
from steerpipe.store.unpack import unpack
from steerpipe.transfer.cuda.nearby import block_ffn


@dataclass
class Blocks:
    """All experts of one layer in blocks: a model.moe.Nearby."""

    pack: Pack
    layer: int
    experts: Sequence[int]

    def compute(self, expert: int, x: Tensor) -> Tensor:
        found = block_ffn(x, self.pack.read_block(self.layer, expert), self.pack.layout(self.layer).form)
        return found.to(x.dtype)

    def let_go(self) -> None:
        """Nothing is held."""


@dataclass
class Everything:
    """A runtime.substitutes.NearbyExperts whose CPU is quicker than any link."""

    pack: Pack

    def take(self, layer: int, experts: Sequence[int]) -> Blocks:
        return Blocks(self.pack, layer, sorted(experts))


def lossy(rehearsal: Rehearsal, exact: Exact, pack: Pack) -> tuple[Tensor, Substitutes]:
    spec = rehearsal.spec
    plan = QualityPlan.uniform(MissPolicy.CPU, len(spec.moe_layers), spec.moe(spec.moe_layers[0]).top_k)
    shelf = OnPaper(exact.there[exact.prompt_tokens :], rehearsal.output, spec.moe_layers, late=0)
    desk = Substitutes(plan, shelf, spec.moe_layers, None, nearby=Everything(pack), in_prompts=True)
    whole = exact.prompt.fork()
    logits = rehearsal.run(whole, exact.tokens[exact.prompt_tokens :], None, desk)
    whole.free()
    return logits.log_softmax(-1), desk


def main() -> None:
    given = arguments(__doc__, 10)
    bench, meter, uses, computed = Bench(), Meter(), 0, 0
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        unpack(bench.subject.folder, Path(folder) / "model")
        write_pack(open_checkpoint(Path(folder) / "model"), Path(folder) / "int8", PackOptions(ExpertFormat.INT8))
        pack = open_pack(Path(folder) / "int8")
        subject = open_subject(Path(folder) / "int8", EngineConfig(dtype="bfloat16", threads=1))
        cache = bench.cache()
        for text in texts(bench, given.texts, given.windows):
            exact = subject.rehearsal.exact(text, cache)
            found, desk = lossy(subject.rehearsal, exact, pack)
            meter.add_text(exact, found, desk.accounts.total)
            uses, computed = uses + desk.accounts.total.uses, computed + desk.accounts.total.computed
            subject.rehearsal.forget(exact)
        subject.close()
    loss = meter.loss()
    told = {
        "tokens": meter.tokens, "kl": loss.kl, "perplexity": loss.perplexity, "top1": loss.top1,
        "computed": computed / uses,
    }  # fmt: skip
    given.out.write_text(json.dumps(told) + "\n", encoding="utf-8")
    print(json.dumps(told))


if __name__ == "__main__":
    main()
