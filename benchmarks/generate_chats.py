"""Prompts that people typed, and what nano answers: JSON for `train_predictors.py`.

    python benchmarks/generate_chats.py --prompts FOLDER --out chats.json

FOLDER has prompts-mt-bench.jsonl, prompts-koala.jsonl, prompts-arena-hard.jsonl, gsm8k-test.jsonl, humaneval.jsonl.
Answers are sampled as nano's defaults say (temperature .7, top-p .9, a repetition penalty of 1.3), at most 96 tokens.
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedModel

from benchmarks.predictor_material import CONTEXT, load_nano

ANSWER_TOKENS = 96
LONGEST_PROMPT = CONTEXT - ANSWER_TOKENS


def read_prompts(folder: Path) -> Iterator[tuple[str, str]]:
    def lines(name: str) -> Iterator[dict[str, Any]]:
        for line in (folder / name).read_text(encoding="utf-8").splitlines():
            yield json.loads(line)

    yield from ((f"mt-bench-{each['question_id']}", each["turns"][0]) for each in lines("prompts-mt-bench.jsonl"))
    yield from ((each["id"], each["prompt"]) for each in lines("prompts-koala.jsonl"))
    yield from ((f"arena-hard-{each['uid']}", each["prompt"]) for each in lines("prompts-arena-hard.jsonl"))
    yield from ((f"gsm8k-{number}", each["question"]) for number, each in enumerate(lines("gsm8k-test.jsonl")))
    yield from ((each["task_id"], each["prompt"]) for each in lines("humaneval.jsonl"))


@torch.no_grad()
def answer(
    model: PreTrainedModel, batch: list[list[int]], end: int, seed: int, most: int = ANSWER_TOKENS
) -> list[list[int]]:
    """Prompts padded on the left, sampled together; each answer up to its own end."""
    longest = max(map(len, batch))
    ids = torch.zeros(len(batch), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, tokens in enumerate(batch):
        ids[row, longest - len(tokens) :] = torch.tensor(tokens)
        mask[row, longest - len(tokens) :] = 1
    torch.manual_seed(seed)
    said = model.generate(
        input_ids=ids.to(model.device), attention_mask=mask.to(model.device), max_new_tokens=most,
        do_sample=True, temperature=0.7, top_p=0.9, repetition_penalty=1.3, eos_token_id=end, pad_token_id=0,
    )  # fmt: skip
    answers = said[:, longest:].tolist()
    return [tokens[: tokens.index(end) + 1] if end in tokens else tokens for tokens in answers]


def shared_opening(sequences: list[list[int]]) -> int:
    """Tokens that all of them begin with: the template's, before the first word of the person."""
    columns = zip(*sequences, strict=False)
    return next((place for place, column in enumerate(columns) if len(set(column)) > 1), 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--limit", type=int, default=1_000_000, help="prompts")
    options = parser.parse_args()
    start = time.monotonic()
    model, folder = load_nano(options.device)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    prompts = []
    for name, text in list(read_prompts(options.prompts))[: options.limit]:
        chat = tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)
        tokens = list(chat if isinstance(chat, list) else chat["input_ids"])
        if len(tokens) <= LONGEST_PROMPT:
            prompts.append((name, tokens))
    prompts.sort(key=lambda each: len(each[1]))
    opening = shared_opening([tokens for _, tokens in prompts])
    chats = []
    for first in range(0, len(prompts), options.batch):
        batch = prompts[first : first + options.batch]
        for (name, tokens), said in zip(batch, answer(model, [t for _, t in batch], end, first), strict=True):
            chats.append({"id": name, "opening_tokens": opening, "prompt_tokens": len(tokens), "tokens": tokens + said})
        print(f"{len(chats)} of {len(prompts)} answered, {time.monotonic() - start:.0f} s", flush=True)
    options.out.write_text(json.dumps(chats), encoding="utf-8")


if __name__ == "__main__":
    main()
