"""Byte-level BPE with three special tokens, and the ChatML template that goes with it."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from recipes.nano.config import CHAT_END, CHAT_START, END_OF_TEXT, SPECIAL_TOKENS

# Words with their leading space, single digits, runs of punctuation, line ends: the split of the Qwen2 family.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# A chat that opens with small talk stays small talk. Without this exchange nano takes an instruction for a sum or a
# file of code, and a seventh of its answers do not end (benchmarks/notes/2026-11-15-nano-answers.md). A system message
# replaces it.
OPENING = (
    "<|im_start|>user\nhello!<|im_end|>\n"
    "<|im_start|>assistant\nHello! How are you?<|im_end|>\n"
    "<|im_start|>user\nI am good, thanks. And you?<|im_end|>\n"
    "<|im_start|>assistant\nI am doing great!<|im_end|>\n"
    "<|im_start|>user\nCan we talk?<|im_end|>\n"
    "<|im_start|>assistant\nSure! What would you like to talk about?<|im_end|>\n"
)
CHAT_TEMPLATE = (
    "{% if messages and messages[0]['role'] != 'system' %}{{ '" + OPENING + "' }}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """Learn `vocabulary` entries, special tokens included. Any text round-trips: no normaliser, all 256 bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_without_markup(texts), trainer)
    return tokenizer


def _without_markup(texts: Iterable[str]) -> Iterator[str]:
    """Special tokens are single entries by definition: no merges should be spent on their spelling."""
    for text in texts:
        for token in SPECIAL_TOKENS:
            text = text.replace(token, "\n")
        yield text


def save_tokenizer(tokenizer: Tokenizer, folder: Path, context: int) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` as transformers reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "bos_token": None,
        "eos_token": CHAT_END,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": [CHAT_START, CHAT_END],
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def load_tokenizer(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.exists():
        raise FileNotFoundError(f"no {path}; write one with `python -m recipes.nano tokenizer --corpus DIR --out DIR`")
    return Tokenizer.from_file(str(path))
