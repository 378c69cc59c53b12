"""Tokenizers small enough to read, one per way in which released models turn ids into text."""

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "[{{ m['role'] }}]{{ m['content'] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
PIECES = [
    "▁",
    "▁the",
    "▁a",
    "▁b",
    "the",
    "cat",
    "▁cat",
    "s",
    "t",
    "o",
    "p",
    "a",
    "b",
    "c",
    ".",
    ",",
    "é",
    "日",
    "本",
    "▁▁",
]
SPECIALS = ["<unk>", "<s>", "</s>"]


def byte_level() -> Tokenizer:
    """As Qwen, OLMoE, gpt-oss and DeepSeek: ids are bytes in disguise, some begin and end inside a character."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [
        ("Ġ", "t"),
        ("h", "e"),
        ("Ġt", "he"),
        ("Ĥ", "¬"),
        ("Ĥ¬", "â"),
        ("ð", "Ł"),
        ("ðŁ", "ĺ"),
        ("Ģ", "ð"),
        ("æ", "Ĺ"),
    ]
    tokens = [*SPECIALS, *alphabet, *(left + right for left, right in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _with_specials(tokenizer)


def byte_fallback() -> Tokenizer:
    """As Mixtral: ▁ is a space, the text's first one is stripped, what is not in the vocabulary is byte tokens."""
    tokens = [*SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    scores = [(token, -100.0 if i < 259 else -float(10 - len(token))) for i, token in enumerate(tokens)]
    tokenizer = Tokenizer(models.Unigram(scores, unk_id=0, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _with_specials(tokenizer)


def metaspace() -> Tokenizer:
    """As small sentencepiece models without byte fallback: the first token of any decode loses its space."""
    tokens = [*SPECIALS, *PIECES]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return _with_specials(tokenizer)


def _with_specials(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path, chat_template: str | None = None) -> Path:
    """Writes the folder as a released model has it."""
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=chat_template
    )
    fast.save_pretrained(str(folder))
    return folder
