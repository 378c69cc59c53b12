"""What the character model is compared with: the commonest fitting token, and the language model itself."""

import gzip
import json
from collections import Counter
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM

from steerpipe.engine.tokenizer import TextCodec

_SAMPLE_BYTES = 8 << 20  # of the training text, for counting tokens


class Vocabulary:
    """Which tokens fit the beginning of a text."""

    def __init__(self, codec: TextCodec, size: int) -> None:
        self.codec = codec
        self.texts = [codec.decode([token]) for token in range(size)]
        self._fitting: dict[str, npt.NDArray[np.int64]] = {}

    def fitting(self, tail: str) -> npt.NDArray[np.int64]:
        """Tokens whose text begins with `tail`."""
        if tail not in self._fitting:
            found = [token for token, text in enumerate(self.texts) if text.startswith(tail)]
            self._fitting[tail] = np.array(found, np.int64)
        return self._fitting[tail]

    def shorter(self, tail: str) -> int | None:
        """The token that the tokenizer takes from the tail if nothing follows, where that is shorter than the tail."""
        first = self.codec.encode_part(tail)[0]
        return first if len(self.texts[first]) < len(tail) else None


class UnigramBaseline:
    """The commonest tokens that fit; the shorter one last."""

    def __init__(self, vocabulary: Vocabulary, counts: npt.NDArray[np.float64]) -> None:
        self._vocabulary = vocabulary
        self._counts = counts

    @classmethod
    def count(cls, codec: TextCodec, corpus: Path) -> "UnigramBaseline":
        counts: Counter[int] = Counter()
        read = 0
        with gzip.open(sorted(corpus.glob("train-*.jsonl.gz"))[0], "rt", encoding="utf-8") as lines:
            for line in lines:
                text = json.loads(line)["text"]
                counts.update(codec.encode_part(text))
                read += len(text)
                if read > _SAMPLE_BYTES:
                    break
        size = max(counts) + 1
        return cls(Vocabulary(codec, size), np.array([counts[token] for token in range(size)], np.float64))

    def rank(self, tail: str) -> list[int]:
        fitting = self._vocabulary.fitting(tail)
        best = fitting[np.argsort(-self._counts[fitting], kind="stable")][:5].tolist()
        shorter = self._vocabulary.shorter(tail)
        return best if shorter is None else [*best[:4], shorter]


class NanoBaseline:
    """p(token | stable tokens, what is typed): a token that is too short counts with what may follow it there.

    Computed with transformers in float32, keys and values kept between calls that share a beginning.
    """

    def __init__(self, codec: TextCodec, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
        self._vocabulary = Vocabulary(codec, self._model.config.vocab_size)
        self._ids: tuple[int, ...] = ()
        self._cache = None
        self._after: dict[tuple[int, ...], npt.NDArray[np.float64]] = {}

    def rank(self, ids: tuple[int, ...], tail: str) -> list[int]:
        probabilities = self._next(ids)
        shares = {int(token): float(probabilities[token]) for token in self._vocabulary.fitting(tail)}
        shorter = self._vocabulary.shorter(tail)
        if shorter is not None:
            rest = tail[len(self._vocabulary.texts[shorter]) :]
            following = self._next((*ids, shorter))
            fits = following[self._vocabulary.fitting(rest)].sum()
            further = self._vocabulary.shorter(rest)
            shares[shorter] = float(probabilities[shorter] * (fits + (0 if further is None else following[further])))
        return sorted(shares, key=lambda token: -shares[token])[:5]

    @torch.inference_mode()
    def _next(self, ids: tuple[int, ...]) -> npt.NDArray[np.float64]:
        """p(. | ids)."""
        if ids in self._after:
            return self._after[ids]
        same = 0
        if self._cache is not None:
            while same < min(len(self._ids), len(ids) - 1) and self._ids[same] == ids[same]:
                same += 1
            if 0 < same < len(self._ids):
                self._cache.crop(same - len(self._ids))  # negative: so many fewer
        if not same:
            self._cache, self._after = None, {}
        out = self._model(torch.tensor([ids[same:]]), past_key_values=self._cache, use_cache=True)
        self._cache, self._ids = out.past_key_values, ids
        self._after[ids] = torch.softmax(out.logits[0, -1].double(), -1).numpy()
        return self._after[ids]
