"""Is the dial's bound kept by the running engine, on texts that were not used for its calibration?

    python -m benchmarks.quality_live TEXTS.jsonl OUT.json [windows]

The engine's own ladder and desk decode a text token by token behind an exact prompt; every distribution is compared
with the exact one. Over a link as quick as the disk, and over one so slow that hardly anything comes in time.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from steerpipe.core.config import EngineConfig
from steerpipe.core.ids import SequenceId
from steerpipe.core.quality import KL_BOUNDS, Dial
from steerpipe.model.decoder import Decoder
from steerpipe.model.kv_cache import KvPool
from steerpipe.model.step import decode_rows, prefill_rows
from steerpipe.runtime.calibrating import Subject, open_subject
from steerpipe.runtime.calibration import Meter
from steerpipe.runtime.quality import choose, identity_of, open_quality
from steerpipe.runtime.quality_rehearsal import CPU, PROMPT_TOKENS, CacheOnPaper, Exact
from steerpipe.runtime.taps import Taps
from steerpipe.store.reader import open_pack
from steerpipe.transfer.source import LadderSource

WINDOW = 128
LINKS = {"disk": None, "slow": 4e6}  # bytes per second; a layer computes about 1 ms, a block is 16 KiB
SHARES = (0.25, 0.125)
ID = SequenceId(0)


def run(subject: Subject, dial: Dial, share: float, pace: float | None, texts: list[Exact]) -> dict[str, Any]:
    spec, pack = subject.rehearsal.spec, open_pack(subject.folder)
    meter, waited = Meter(), 0.0
    slots = round(share * len(spec.moe_layers) * spec.moe(spec.moe_layers[0]).experts)
    with LadderSource.open(pack, slots=slots, dtype=torch.float32, pace=pace) as source:
        config = EngineConfig(quality=dial)
        chosen = choose(config, spec, subject.folder, identity_of(pack), form=pack.manifest.expert_format.value)
        quality = open_quality(chosen, config, spec, subject.weights, subject.folder, source)
        assert quality is not None, "a lossy dial"
        decoder = Decoder(spec, subject.weights, CPU, Taps(*quality.taps), quality.desk)
        pool = KvPool(spec, torch.float32, CPU, 64)
        for exact in texts:
            kv = pool.sequence()
            decoder.forward(prefill_rows(ID, kv, exact.tokens[:PROMPT_TOKENS], CPU), source, [0])
            before = source.waited_seconds
            rows = [
                decoder.forward(decode_rows([ID], [kv], [token], CPU, cell=1), source, [0])[0]
                for token in exact.tokens[PROMPT_TOKENS:]
            ]
            waited += source.waited_seconds - before
            meter.add_text(exact, torch.stack(rows).log_softmax(-1), quality.desk.accounts.take(ID))
            kv.free()
    loss, counts = meter.loss(), meter.counts
    return {
        "bound": KL_BOUNDS[dial], "kl": loss.kl, "expected": counts.nats / meter.tokens, "perplexity": loss.perplexity,
        "top1": loss.top1, "substituted": counts.share, "patched": counts.patched / max(1, counts.substituted),
        "waited_ms_per_token": waited * 1e3 / meter.tokens,
    }  # fmt: skip


def arguments(description: str | None, windows: int) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("windows", nargs="?", type=int, default=windows, help=f"texts: {windows}")
    return parser.parse_args()


def main() -> None:
    given = arguments(__doc__, 4)
    lines = given.texts.read_text(encoding="utf-8").splitlines()
    subject = open_subject(None, EngineConfig(dtype="float32", threads=1))
    encoded = (subject.codec.encode(json.loads(line)["text"], False)[:WINDOW] for line in lines)
    geometry, texts = subject.rehearsal.geometry, []
    while len(texts) < given.windows:
        tokens = next(encoded)
        if len(tokens) == WINDOW:
            cache = CacheOnPaper(geometry.layers, geometry.experts, geometry.top_k)
            texts.append(subject.rehearsal.exact(tokens, cache))
    told = {
        f"{dial}, {share:.1%}, {link}": run(subject, dial, share, pace, texts)
        for dial in KL_BOUNDS
        for share in SHARES
        for link, pace in LINKS.items()
    }
    given.out.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(told))


if __name__ == "__main__":
    main()
