"""Texts for predictor_data: combinatorial chats and real ones, traced with hidden states."""

import json
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from benchmarks.generate_chats import answer, shared_opening
from benchmarks.predictor_material import CONTEXT
from steerpipe.predict.records import PackedTrace, States
from steerpipe.trace.combinatorial import combinatorial_prompts
from steerpipe.trace.live import TokenSequence
from steerpipe.train.material import collect

ANSWER_TOKENS = 32
LONGEST_PROMPT = 256


@dataclass(frozen=True)
class Corpus:
    """Traced chats; `prompt` [N]: which prompt each token is of."""

    trace: PackedTrace
    prompt: Tensor
    names: list[str]

    def rows_of(self, names: list[str], count: int, seed: int) -> Tensor:
        """`count` tokens of these prompts, drawn."""
        wanted = torch.zeros(len(self.names), dtype=torch.bool, device=self.prompt.device)
        wanted[[self.names.index(name) for name in names]] = True
        return draw(torch.nonzero(wanted[self.prompt]).flatten(), count, seed)


def draw(rows: Tensor, count: int, seed: int) -> Tensor:
    generator = torch.Generator(rows.device).manual_seed(seed)
    chosen = torch.randperm(len(rows), generator=generator, device=rows.device)[:count]
    return rows[chosen].sort().values


def synthetic_chats(model: PreTrainedModel, folder: Path, limit: int) -> list[dict[str, Any]]:
    """The combinatorial prompts with nano's answers, as `generate_chats` makes them of real ones."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    prompts = []
    for each in combinatorial_prompts()[:limit]:
        chat = tokenizer.apply_chat_template([{"role": "user", "content": each.content}], add_generation_prompt=True)
        prompts.append((each.id, list(chat if isinstance(chat, list) else chat["input_ids"])))
    opening = shared_opening([tokens for _, tokens in prompts])
    chats = []
    for first in range(0, len(prompts), 500):
        batch = prompts[first : first + 500]
        said = answer(model, [ids for _, ids in batch], end, first, ANSWER_TOKENS)
        for (name, tokens), words in zip(batch, said, strict=True):
            chats.append(
                {"id": name, "opening_tokens": opening, "prompt_tokens": len(tokens), "tokens": tokens + words}
            )
    return chats


def real_chats(file: Path, tokens: int) -> list[dict[str, Any]]:
    """Of chats.json, in a seeded order, as many as have `tokens` tokens together; answers as short as the synthetic."""
    listed = json.loads(file.read_text(encoding="utf-8"))
    random.Random(0).shuffle(listed)
    kept, total = [], 0
    for chat in listed:
        if chat["prompt_tokens"] <= LONGEST_PROMPT and total < tokens:
            part = chat["tokens"][: chat["prompt_tokens"] + ANSWER_TOKENS]
            kept.append(chat | {"tokens": part})
            total += len(part) - chat["opening_tokens"]
    return kept


def trace_chats(model: PreTrainedModel, chats: list[dict[str, Any]]) -> Corpus:
    sequences = [TokenSequence(each["id"], each["tokens"][:CONTEXT], each["prompt_tokens"]) for each in chats]
    openings = {each["id"]: each["opening_tokens"] for each in chats}
    trace = collect(model, sequences, max_tokens=CONTEXT, openings=openings)
    return Corpus(trace, trace.sequence, [each.prompt for each in sequences])


def taken(trace: PackedTrace, rows: Tensor) -> PackedTrace:
    """These rows alone. Each is a text of its own: the token before it may not be among them."""
    states = trace.states
    assert states is not None and trace.weights is not None, "collect keeps both"
    return replace(
        trace,
        tokens=trace.tokens[rows],
        sequence=torch.arange(len(rows), device=rows.device) // 2,  # pairs: training wants texts of two tokens
        place=torch.arange(len(rows), device=rows.device) % 2,
        experts=trace.experts[rows],
        weights=trace.weights[rows],
        states=States(
            states.entering[rows], states.residual[rows], None if states.shared is None else states.shared[rows]
        ),
    )
