"""`quality_live` on a GPU: nano in bf16 through the engine's own kernels, slots and desk, token by token.

    python -m benchmarks.quality_live_gpu TEXTS.jsonl OUT.json [windows]

Lossy against exact, which decodes the same way with everything resident. Over the machine's own link, and over one
that brings a block in about four layers, as the slow link of `quality_live` does.
"""

import json
import time
from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from benchmarks.quality_live import WINDOW, arguments
from steerpipe.core.config import EngineConfig
from steerpipe.core.ids import SequenceId
from steerpipe.core.quality import KL_BOUNDS, Dial, MissPolicy
from steerpipe.engine.tokenizer import TextCodec
from steerpipe.model.gpu.decoder import GpuDecoder
from steerpipe.model.kv_cache import KvPool
from steerpipe.model.step import decode_rows, prefill_rows
from steerpipe.model.weights import build_weights
from steerpipe.runtime.calibration import Meter
from steerpipe.runtime.models import EMBEDDED
from steerpipe.runtime.quality import choose, identity_of, open_quality
from steerpipe.runtime.quality_rehearsal import PROMPT_TOKENS
from steerpipe.runtime.taps import Taps
from steerpipe.store.reader import open_pack
from steerpipe.transfer.cuda.source import CudaSource

CPU, ID, SHARE = torch.device("cpu"), SequenceId(0), 0.25
SLOW = 14e6  # bytes per second: a block of 16 KiB takes 1.2 ms, an eager layer 0.3
ASKED: tuple[tuple[str, float | None, int], ...] = (  # what, pace, texts (0: all)
    *((dial, None, 0) for dial in KL_BOUNDS),
    *((each, None, 0) for each in (MissPolicy.PATCH, MissPolicy.SURROGATE, MissPolicy.DROP, MissPolicy.COMMIT_TRUE)),
    *((dial, SLOW, 1) for dial in KL_BOUNDS),
)


class Nano:
    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.pack, self.device = open_pack(EMBEDDED), device
        spec = self.spec = self.pack.spec
        self.weights = build_weights(spec, self.pack.family.names, self.pack.dense(dtype), dtype, device)
        self.pool = KvPool(spec, dtype, device, 64)
        self.count = sum(spec.moe(layer).experts for layer in spec.moe_layers)

    def source(self, slots: int, pace: float | None = None) -> CudaSource:
        size = self.count * self.pack.layout(self.spec.moe_layers[0]).block_bytes
        return CudaSource.open(
            self.pack, slots=slots, device=self.device, pinned_bytes=size, pace=pace, direct=False
        )  # fmt: skip

    def decode(self, decoder: GpuDecoder, source: CudaSource, tokens: Sequence[int]) -> Tensor:
        """Log probabilities [M, vocab] behind an exact prompt."""
        kv = self.pool.sequence()
        decoder.forward(prefill_rows(ID, kv, tokens[:PROMPT_TOKENS], CPU), source, [0])
        rows = [
            decoder.forward(decode_rows([ID], [kv], [token], CPU, cell=1), source, [0])[0].cpu()
            for token in tokens[PROMPT_TOKENS:]
        ]
        kv.free()
        return torch.stack(rows).log_softmax(-1)

    def run(
        self, asked: str, pace: float | None, texts: Sequence[Sequence[int]], exact: Sequence[Tensor]
    ) -> dict[str, Any]:
        config, meter = EngineConfig(quality=asked), Meter()
        chosen = choose(config, self.spec, EMBEDDED, identity_of(self.pack), form="int4")
        begin = time.perf_counter()
        with self.source(round(SHARE * self.count), pace) as source:
            quality = open_quality(chosen, config, self.spec, self.weights, EMBEDDED, source)
            assert quality is not None, "a lossy way"
            decoder = GpuDecoder(
                self.spec, self.weights, self.pool, self.device, max_batch=1, tap=Taps(*quality.taps),
                misses=quality.desk,
            )  # fmt: skip
            for tokens, truth in zip(texts, exact, strict=True):
                lossy = self.decode(decoder, source, tokens)
                following = torch.tensor(tokens[PROMPT_TOKENS + 1 :])
                meter.add(truth[:-1], lossy[:-1], following, quality.desk.accounts.take(ID))
            source.check_integrity()
        loss, counts = meter.loss(), meter.counts
        return {
            "asked": asked, "pace": pace, "bound": KL_BOUNDS[Dial(asked)] if asked in list(Dial) else None,
            "kl": loss.kl, "expected": counts.nats / meter.tokens, "perplexity": loss.perplexity, "top1": loss.top1,
            "substituted": counts.share, "patched": counts.patched / max(1, counts.substituted),
            "tokens": meter.tokens, "ms_per_token": (time.perf_counter() - begin) * 1e3 / meter.tokens,
        }  # fmt: skip


def main() -> None:
    given = arguments(__doc__, 3)
    lines = given.texts.read_text(encoding="utf-8").splitlines()
    cuda = torch.cuda.is_available()  # without: Triton's interpreter, for a trial
    nano = Nano(torch.device("cuda" if cuda else "cpu"), torch.bfloat16 if cuda else torch.float32)
    codec = TextCodec.load(EMBEDDED)
    encoded = (codec.encode(json.loads(line)["text"], False)[:WINDOW] for line in lines)
    texts = list(islice((tokens for tokens in encoded if len(tokens) == WINDOW), given.windows))
    with nano.source(nano.count) as resident:
        exact = GpuDecoder(nano.spec, nano.weights, nano.pool, nano.device, max_batch=1)
        truth = [nano.decode(exact, resident, tokens) for tokens in texts]
        own = Meter()
        for tokens, told in zip(texts, truth, strict=True):
            own.add(told[:-1], told[:-1], torch.tensor(tokens[PROMPT_TOKENS + 1 :]), own.counts)
    print(f"exact: perplexity {own.loss().perplexity:.3f} of {own.tokens} tokens", flush=True)
    rows: list[dict[str, Any]] = []
    for asked, pace, most in ASKED:
        row = nano.run(str(asked), pace, texts[: most or None], truth[: most or None])
        rows.append(row)
        given.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        print({key: round(each, 4) if isinstance(each, float) else each for key, each in row.items()}, flush=True)


if __name__ == "__main__":
    main()
