"""Byte-level tokenizers with the splitting rules of released models, trained in a moment on a few sentences."""

import json
from functools import cache
from typing import Any

from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from steerpipe.intake.boundaries import _PATTERNS
from steerpipe.intake.frame import PromptFrame, fill

SENTENCES = (
    "It's what they'd said: we've 12 dogs, 1234 cats and 56 birds!\n\n",
    "def main(arguments):\n    return arguments[0] / 2  # it isn't 3.14\n",
    "Hello there, how are you? I'm fine; thanks. THE END of the story's beginning...\r\n",
    "You can see https://example.org/a/b?c=d or write to me@example.org, can't you?\n/usr/bin\n",
)
ADDED = ("<|im_start|>", "<|im_end|>", "<|a b|>", "<|a b|> c", "end\n/x")
FRAMES = {
    "plain": PromptFrame("", ""),
    "chat": PromptFrame("<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"),
    "stripped": PromptFrame("<|im_start|>user\n\n", "<|im_end|>", strips_left=True, strips_right=True),
    "words": PromptFrame("USER: ", " ASSISTANT:", strips_right=True),
}

FRAGMENTS = [
    "the", "story", " ", "  ", "\n", "\r\n", "\t", "'", "'s", "'Ll", "/", "!", "...", "(", ")", ",", "1", "234", "x",
    "E", "aB", "é", "e\u0301", "\u0301", "ठ\u093c", "क़", "你好", "，", "。", "ん", "😀", "²", "\u00a0", "\u3000", "ﬁ",
    "ǅ", "ʰ", "\u200d", "\x00", "<", "<|", "im_end", "|", ">", "|>", "<|im_end|>", "<|a", " b|>", " c", "end\n", "/x",
    "<g>", "<g", "word", "\u16e6", "\u0378",
]  # fmt: skip
texts = st.lists(st.sampled_from(FRAGMENTS) | st.characters(codec="utf-8"), max_size=14).map("".join)
sentences = st.lists(st.sampled_from(FRAGMENTS[:24]), max_size=60).map("".join)


def _splitter(kind: str) -> Any:
    if kind == "gpt2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if kind == "digits":
        return pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    pattern = next(pattern for pattern, name in _PATTERNS.items() if name == kind)
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


KINDS = ("gpt2", "digits", "qwen", "qwen3.5", "cl100k", "o200k")


@cache
def sentencepiece(kind: str, *, joining: bool = False) -> Tokenizer:
    """As Mixtral: a ▁ before every text (`prepended`), or as newer ones, by Metaspace with that `prepend_scheme`.

    `joining`: with tokens that hold a space inside, as no released one does.
    """
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer = None if joining else pre_tokenizers.Metaspace(prepend_scheme="never", split=True)
    special = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=560, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(SENTENCES * 3, trainer)
    definition = json.loads(tokenizer.to_str())
    definition["pre_tokenizer"] = None
    if kind != "prepended":
        definition["normalizer"] = None
        definition["pre_tokenizer"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": kind, "split": False}
    definition["added_tokens"] = []
    tokenizer = Tokenizer.from_str(json.dumps(definition))
    tokenizer.add_special_tokens([AddedToken(content, special=True, normalized=False) for content in ADDED])
    return tokenizer


@cache
def made(kind: str, *, nfc: bool = True, greedy: bool = False) -> Tokenizer:
    """`greedy`: an added token takes the white space beside it, as some released models have it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = _splitter(kind)
    tokenizer.decoder = decoders.ByteLevel()
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=520, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES * 3, trainer)
    tokenizer.add_special_tokens([AddedToken(content, special=True, normalized=False) for content in ADDED])
    if greedy:
        tokenizer.add_tokens([AddedToken("<g>", lstrip=True, rstrip=True), AddedToken("word", single_word=True)])
    return tokenizer


def tokens_of(tokenizer: Tokenizer, frame: PromptFrame, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(fill(frame, text), add_special_tokens=False).ids)
