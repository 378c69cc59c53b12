"""Text for training predictors: held-out documents and chats, tokenised, split by prompt, in a seeded order."""

import gzip
import json
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from steerpipe.runtime.models import find_model
from steerpipe.store.unpack import unpack
from steerpipe.trace.live import TokenSequence
from steerpipe.trace.split import split_prompts

HELD_OUT = 0.15
CONTEXT = 1024  # of nano


@dataclass(frozen=True)
class Text:
    """Sequences of the training prompts and of the held-out ones, each in random order."""

    train: list[TokenSequence]
    test: list[TokenSequence]
    openings: dict[str, int]  # first tokens of a chat that all chats share: neither learnt nor tested


def load_nano(device: str) -> tuple[PreTrainedModel, Path]:
    """The shipped model as transformers runs it, in fp32: what the pack holds, to the last bit; and its folder."""
    folder = Path(tempfile.mkdtemp()) / "nano"
    unpack(find_model(None), folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.to(device).eval(), folder


def read_text(documents: Path, chats: Path | None, tokenizer_folder: Path, limit_tokens: int, seed: int = 0) -> Text:
    """`documents`: JSONL (.gz) with "text"; `chats`: JSON made by `generate_chats`. At most so many tokens."""
    sequences = _documents(documents, tokenizer_folder)
    openings: dict[str, int] = {}
    for chat in json.loads(chats.read_text(encoding="utf-8")) if chats else []:
        sequences.append(TokenSequence(chat["id"], chat["tokens"][:CONTEXT], chat["prompt_tokens"]))
        openings[chat["id"]] = chat["opening_tokens"]
    random.Random(seed).shuffle(sequences)
    kept, total = [], 0
    for sequence in sequences:
        if total >= limit_tokens:
            break
        kept.append(sequence)
        total += len(sequence.tokens)
    train, test = split_prompts([sequence.prompt for sequence in kept], HELD_OUT, seed)
    held = set(test)
    assert held.isdisjoint(train), "a prompt on both sides"
    return Text(
        [sequence for sequence in kept if sequence.prompt not in held],
        [sequence for sequence in kept if sequence.prompt in held],
        openings,
    )


def _documents(path: Path, tokenizer_folder: Path) -> list[TokenSequence]:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in lines]
    found = []
    for number, ids in enumerate(tokenizer(texts, add_special_tokens=False)["input_ids"]):
        if len(ids) > 1:
            found.append(TokenSequence(f"heldout-{number}", ids, len(ids)))
    return found
