"""What cover tokens cost and hide: KL against the exact distribution on the same prefix, and the time until N tokens.

    PYTHONPATH=src:. python benchmarks/typing_cover.py LOG [--prompts 8] [--pace 40e6] [--json OUT]

Openings of a keystroke log are prompts; nano decodes the first 16 tokens of its exact answer over a cold ladder, behind
an exact prompt, with 0, 1, 2, 4, 8 or "auto" covered. Every distribution is compared with that of a resident model on
the same tokens: the KL of covered tokens, and that of the tokens behind them, whose keys and values they left.
"""

import argparse
import json
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from benchmarks.typing_openings import answer
from steerpipe.bench.typing_prompts import read_prompts
from steerpipe.core.config import EngineConfig
from steerpipe.core.ids import SequenceId
from steerpipe.model.decoder import Decoder
from steerpipe.model.kv_cache import KvPool
from steerpipe.model.step import decode_rows, prefill_rows
from steerpipe.predict.openings import FIRST_TOKENS
from steerpipe.runtime.calibrating import Subject, open_subject
from steerpipe.runtime.cover import open_cover
from steerpipe.store.reader import open_pack
from steerpipe.transfer.source import LadderSource

CPU, ID = torch.device("cpu"), SequenceId(0)
SPANS = "none,1,2,4,8,auto"


def exact_rows(subject: Subject, prompt: list[int], answered: list[int]) -> Tensor:
    """[tokens, vocab]: log probabilities behind each token of the answer."""
    spec = subject.rehearsal.spec
    decoder, kv = Decoder(spec, subject.weights, CPU), KvPool(spec, torch.float32, CPU, 32).sequence()
    decoder.forward(prefill_rows(ID, kv, prompt, CPU), subject.source, [0])
    steps = (decode_rows([ID], [kv], [token], CPU, cell=1) for token in answered)
    return torch.stack([decoder.forward(step, subject.source, [0])[0] for step in steps]).log_softmax(-1)


def run(
    subject: Subject, prompt: list[int], answered: list[int], exact: Tensor, span: str | None, pace: float | None
) -> dict[str, Any]:
    spec = subject.rehearsal.spec
    slots = len(spec.moe_layers) * spec.moe(spec.moe_layers[0]).experts // 4
    with LadderSource.open(open_pack(subject.folder), slots=slots, dtype=torch.float32, pace=pace) as source:
        config = EngineConfig(cover=span)
        desk = open_cover(config, spec, subject.weights, subject.folder, source, subject.identity)
        decoder, kv = Decoder(spec, subject.weights, CPU, None, desk), KvPool(spec, torch.float32, CPU, 32).sequence()
        decoder.forward(prefill_rows(ID, kv, prompt, CPU), source, [0])
        if desk is not None:
            desk.cover(ID)
        begin, rows, seconds = time.perf_counter(), [], []
        for token in answered:
            rows.append(decoder.forward(decode_rows([ID], [kv], [token], CPU, cell=1), source, [0])[0])
            seconds.append(time.perf_counter() - begin)
        covered = None if desk is None else desk.take(ID)
    lossy = torch.stack(rows).log_softmax(-1)
    kl = (exact.exp() * (exact - lossy)).sum(-1).tolist()
    count = 0 if covered is None else covered.tokens
    return {
        "tokens": count, "covered_ms": 0.0 if covered is None else covered.seconds * 1e3,
        "expected_kl": None if covered is None else covered.nats_per_token,
        "kl": fmean(kl[:count]) if count else 0.0, "kl_behind": fmean(kl[count:]),
        "first_4_ms": seconds[3] * 1e3, "all_16_ms": seconds[-1] * 1e3,
        "same_top1": float((exact.argmax(-1) == lossy.argmax(-1)).float().mean()),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", type=Path)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--pace", type=float, help="bytes per second")
    parser.add_argument("--spans", default=SPANS)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    subject = open_subject(None, EngineConfig(dtype="float32", threads=1))
    codec = subject.codec
    texts = [each.text for each in read_prompts(given.log, lambda text: len(codec.encode_part(text)), given.prompts)]
    found: dict[str, list[dict[str, Any]]] = {}
    for ids, prompt, _ in answer(None, texts, given.prompts):
        first, answered = ids[:prompt].tolist(), ids[prompt : prompt + FIRST_TOKENS].tolist()
        exact = exact_rows(subject, first, answered)
        for span in given.spans.split(","):
            chosen = None if span == "none" else span
            found.setdefault(span, []).append(run(subject, first, answered, exact, chosen, given.pace))
            print(span, found[span][-1], flush=True)
    rows = {
        span: {key: fmean(each[key] for each in lines) if lines[0][key] is not None else None for key in lines[0]}
        for span, lines in found.items()
    }
    for span, row in rows.items():
        print(span, {key: value if value is None else round(value, 3) for key, value in row.items()}, flush=True)
    print(json.dumps({"pace": given.pace, "prompts": given.prompts, "rows": rows}))
    if given.json:
        given.json.write_text(json.dumps({"pace": given.pace, "prompts": given.prompts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
