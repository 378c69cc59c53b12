"""Answers to chat openers through transformers, and two figures about how they read: do they end, do they loop."""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast


@dataclass(frozen=True)
class Answer:
    prompt: str
    text: str
    ids: tuple[int, ...]  # without the token that ended it
    ended: bool


def read_openers(path: Path) -> list[str]:
    """First turns of a JSONL file of `{"turns": [...]}`."""
    return [json.loads(line)["turns"][0] for line in path.read_text().splitlines() if line]


def repeats(ids: tuple[int, ...], length: int = 4, times: int = 4) -> bool:
    """Whether any run of `length` tokens occurs `times` times."""
    grams = Counter(ids[i : i + length] for i in range(len(ids) - length + 1))
    return bool(grams) and max(grams.values()) >= times


class Chat:
    """A Hugging Face folder that answers many prompts at once."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, padding_side="left")
        auto: Any = AutoModelForCausalLM  # its methods are wrapped in a way that type checkers misread
        self.model = auto.from_pretrained(folder).to(device).eval()
        self.device = device

    @torch.no_grad()
    def answer(self, prompts: list[str], seed: int = 0, **sampling: Any) -> list[Answer]:
        """One answer each; `sampling` replaces the folder's generation defaults. Long prompts keep their end."""
        longest = sampling.get("max_new_tokens", self.model.generation_config.max_new_tokens)
        room = max(1, self.model.config.max_position_embeddings - longest)
        chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
        texts = [self.tokenizer.apply_chat_template(c, tokenize=False, add_generation_prompt=True) for c in chats]
        encoded = [self.tokenizer(text)["input_ids"][-room:] for text in texts]
        batch = self.tokenizer.pad({"input_ids": encoded}, return_tensors="pt").to(self.device)
        torch.manual_seed(seed)
        out = self.model.generate(**{k: batch[k] for k in ("input_ids", "attention_mask")}, **sampling)
        return [
            self._cut(p, row) for p, row in zip(prompts, out[:, batch["input_ids"].shape[1] :].tolist(), strict=True)
        ]

    def _cut(self, prompt: str, ids: list[int]) -> Answer:
        stops = self.model.generation_config.eos_token_id
        end = next((i for i, token in enumerate(ids) if token in stops), None)
        kept = tuple(ids[:end])
        return Answer(prompt, self.tokenizer.decode(kept), kept, end is not None)


def answer_figures(answers: list[Answer]) -> dict[str, float]:
    lengths = sorted(len(answer.ids) for answer in answers)
    return {
        "ended": sum(answer.ended for answer in answers) / len(answers),
        "repeating": sum(repeats(answer.ids) for answer in answers) / len(answers),
        "empty": sum(not answer.text.strip() for answer in answers) / len(answers),
        "median_tokens": lengths[len(lengths) // 2],
    }
