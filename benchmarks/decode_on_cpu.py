"""Decode and prefill on the CPU at nano's shape (24 layers, 60 experts, top-4), against transformers, one thread.

    python benchmarks/decode_on_cpu.py [--tokens 64] [--rounds 5]

Random weights: this measures dispatch and products, never caches. Both engines run in the same process, in turns, and
the table gives medians and their ratio. The floor is the time to read the active weights once at the memory's rate.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from steerpipe import Pipeline
from steerpipe.tiny import write_tiny

NANO = {
    "vocab_size": 8192, "hidden_size": 192, "num_hidden_layers": 24, "num_attention_heads": 3,
    "num_key_value_heads": 3, "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 192, "mlp_only_layers": [], "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}  # fmt: skip
ACTIVE = 8192 * 192 + 24 * (4 * 192 * 192 + 60 * 192 + 3 * 192 * 192 + 4 * 3 * 192 * 48)  # weights read per token


def memory_rate() -> float:
    """Bytes per second of a sum over 512 MB, one thread."""
    block = torch.ones(128 * 2**20)
    block.sum()
    begun = time.perf_counter()
    block.sum()
    return block.numel() * 4 / (time.perf_counter() - begun)


def ours(pipe: Pipeline, prompt: list[int], tokens: int) -> tuple[float, float]:
    timings = pipe.generate(prompt, temperature=0, max_tokens=tokens, ignore_eos=True).timings
    return timings.prompt_ms, timings.predicted_ms / (tokens - 1)


def theirs(model: Any, prompt: list[int], tokens: int) -> tuple[float, float]:
    with torch.inference_mode():
        begun = time.perf_counter()
        out = model(torch.tensor([prompt]), use_cache=True)
        token = out.logits[0, -1:].argmax(-1, keepdim=True)
        prefilled = time.perf_counter()
        for _ in range(tokens - 1):
            out = model(token, past_key_values=out.past_key_values, use_cache=True)
            token = out.logits[0, -1:].argmax(-1, keepdim=True)
        return (prefilled - begun) * 1e3, (time.perf_counter() - prefilled) * 1e3 / (tokens - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    prompt = [4 + i * 37 % 8000 for i in range(given.prompt)]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        write_tiny("qwen2_moe", folder, **NANO)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with Pipeline(folder, dtype="float32", threads=1, cache_dir=scratch) as pipe:
            ours(pipe, prompt, 4), theirs(model, prompt, 4)
            pairs = [
                (ours(pipe, prompt, given.tokens), theirs(model, prompt, given.tokens)) for _ in range(given.rounds)
            ]
    rate = memory_rate()
    floor_ms = ACTIVE * 4e3 / rate
    print(f"floor: {ACTIVE * 4e-6:.1f} MB of active weights at {rate * 1e-9:.1f} GB/s: {floor_ms:.2f} ms per token")
    result: dict[str, Any] = {"prompt": given.prompt, "tokens": given.tokens, "rounds": given.rounds}
    for index, name in enumerate(("prefill_ms", "decode_ms_per_token")):
        mine, other = (statistics.median(pair[who][index] for pair in pairs) for who in (0, 1))
        result[name] = {"steerpipe": mine, "transformers": other, "ratio": other / mine}
        print(
            f"{name:20} steerpipe {mine:8.2f}   transformers {other:8.2f}   transformers / steerpipe {other / mine:.2f}"
        )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
