"""Every family against transformers: tiny random models, in fp32, token by token."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from steerpipe.core.events import Completion
from steerpipe.demo.config import demo_config
from steerpipe.runtime.pipeline import Pipeline
from steerpipe.tiny import write_tiny

_PROMPT = "The experts that a token needs are known only when it is there; or are they?"
_NEW_TOKENS = 64
_MOST_DIFFERENCE = 1e-3  # of log probabilities; fp32 gives 2e-5 at most


@dataclass(frozen=True, slots=True)
class FamilyCheck:
    """One family against transformers, in fp32."""

    family: str
    greatest_difference: float  # of log probabilities along the greedy path
    same_tokens: int  # of `_NEW_TOKENS` greedy ones
    chunking_changes_bits: bool
    tokens_per_second: float
    budget_changes_bits: bool = False  # two experts in memory, the others on the disk

    @property
    def differs(self) -> bool:
        """Whether anything is not as it must be. NaN differs from everything."""
        alike = self.same_tokens == _NEW_TOKENS and self.greatest_difference <= _MOST_DIFFERENCE
        return self.chunking_changes_bits or self.budget_changes_bits or not alike


def check_family(family: str, folder: Path) -> FamilyCheck:
    """Writes a tiny checkpoint, continues a prompt with both implementations, and compares."""
    write_tiny(family, folder)
    cache = str(folder.parent)
    options: dict[str, Any] = {"temperature": 0.0, "max_tokens": _NEW_TOKENS, "ignore_eos": True, "logprobs": 0}
    with Pipeline(folder, config=demo_config(cache_dir=cache)) as pipe:
        ids = pipe.encode(_PROMPT, raw=True)
        ours = pipe.generate(ids, **options)
        experts = sum(pipe.spec.moe(layer).experts for layer in pipe.spec.moe_layers)
    with Pipeline(folder, config=demo_config(cache_dir=cache, prefill_chunk=16)) as pipe:
        chunked = pipe.generate(ids, **options)
    two = f"{200 / experts + 0.01:.2f}%"
    with Pipeline(folder, config=demo_config(cache_dir=cache, fast_memory=two, profile=False)) as pipe:
        squeezed = pipe.generate(ids, **options)
    expected_ids, expected_logprobs = _transformers(folder, ids)
    differences = [abs(ours.logprobs[i].logprob - expected_logprobs[i]) for i in range(_NEW_TOKENS)]
    return FamilyCheck(
        family=family,
        greatest_difference=max(differences),
        same_tokens=sum(a == b for a, b in zip(ours.token_ids, expected_ids, strict=True)),
        chunking_changes_bits=ours.logprobs != chunked.logprobs,
        budget_changes_bits=ours.logprobs != squeezed.logprobs,
        tokens_per_second=rate(ours),
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


def rate(answer: Completion) -> float:
    """Tokens per second; the first is the prompt's."""
    return (answer.timings.predicted_n - 1) / answer.timings.predicted_ms * 1e3


def family_table(checks: tuple[FamilyCheck, ...], machine: str) -> Table:
    table = Table(
        title=f"steerpipe against transformers, fp32, {_NEW_TOKENS} greedy tokens, tiny random models",
        caption=f"tokens/s on {machine}, 1 thread",
    )
    names = (
        "family",
        "log p apart by",
        "same tokens",
        "chunks of 16",
        "room for two experts",
        "tokens/s",
    )
    for name in names:
        table.add_column(name, justify="left" if name == "family" else "right")
    for check in checks:
        table.add_row(
            check.family,
            f"{check.greatest_difference:.1e}",
            f"{check.same_tokens} of {_NEW_TOKENS}",
            "other bits" if check.chunking_changes_bits else "same bits",
            "other bits" if check.budget_changes_bits else "same bits",
            f"{check.tokens_per_second:.0f}",
            style="bold red" if check.differs else "",
        )
    return table
