"""`steerpipe demo`: what this engine computes, shown against transformers on tiny models of every family."""

import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from steerpipe.runtime.pipeline import Pipeline
from steerpipe.tiny import FAMILIES, write_tiny

_PROMPT = "The experts that a token needs are known only when it is there; or are they?"
_NEW_TOKENS = 64


@dataclass(frozen=True, slots=True)
class FamilyCheck:
    """One family against transformers, in fp32."""

    family: str
    greatest_difference: float  # of log probabilities along the greedy path
    same_tokens: int  # of `_NEW_TOKENS` greedy ones
    chunking_changes_bits: bool
    tokens_per_second: float


def check_family(family: str, folder: Path) -> FamilyCheck:
    """Writes a tiny checkpoint, continues a prompt with both implementations, and compares."""
    write_tiny(family, folder)
    with Pipeline(folder, dtype="float32", threads=1, cache_dir=str(folder.parent)) as pipe:
        ids = pipe.encode(_PROMPT, raw=True)
        options: dict[str, Any] = {"temperature": 0.0, "max_tokens": _NEW_TOKENS, "ignore_eos": True, "logprobs": 0}
        ours = pipe.generate(ids, **options)
    with Pipeline(folder, dtype="float32", threads=1, prefill_chunk=16, cache_dir=str(folder.parent)) as pipe:
        chunked = pipe.generate(ids, **options)
    expected_ids, expected_logprobs = _transformers(folder, ids)
    differences = [abs(ours.logprobs[i].logprob - expected_logprobs[i]) for i in range(_NEW_TOKENS)]
    return FamilyCheck(
        family=family,
        greatest_difference=max(differences),
        same_tokens=sum(a == b for a, b in zip(ours.token_ids, expected_ids, strict=True)),
        chunking_changes_bits=ours.logprobs != chunked.logprobs,
        tokens_per_second=ours.timings.predicted_n / ours.timings.predicted_ms * 1e3,
    )


def _transformers(folder: Path, prompt: tuple[int, ...]) -> tuple[list[int], list[float]]:
    """Greedy ids and their log probabilities, from the reference implementation."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    given = torch.tensor([prompt])
    with torch.inference_mode():
        out = model.generate(
            given, attention_mask=torch.ones_like(given), do_sample=False, max_new_tokens=_NEW_TOKENS,
            min_new_tokens=_NEW_TOKENS, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        ids = out[0, len(prompt) :].tolist()
        logits = model(out).logits[0, len(prompt) - 1 : -1].float()
    logprobs = logits.log_softmax(-1)
    return ids, [float(logprobs[i, token]) for i, token in enumerate(ids)]


def run_demo(console: Console) -> list[FamilyCheck]:
    """All families, as a table. Takes some seconds."""
    table = Table(title=f"steerpipe against transformers, fp32, {_NEW_TOKENS} greedy tokens, tiny random models")
    for name in ("family", "greatest difference of log p", "same tokens", "prompt in chunks of 16", "tokens/s"):
        table.add_column(name, justify="left" if name == "family" else "right")
    checks = []
    with tempfile.TemporaryDirectory() as scratch, console.status("writing and comparing tiny checkpoints"):
        for family in FAMILIES:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                check = check_family(family, Path(scratch) / family)
            checks.append(check)
            table.add_row(
                check.family,
                f"{check.greatest_difference:.1e}",
                f"{check.same_tokens} of {_NEW_TOKENS}",
                "other bits" if check.chunking_changes_bits else "same bits",
                f"{check.tokens_per_second:.0f}",
            )
    console.print(table)
    return checks
