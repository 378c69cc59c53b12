"""Bits per byte: the one figure that compares models across tokenizers.

nats of all tokens of a text / ln 2 / UTF-8 bytes of the text, over windows of `context` tokens cut from each document's
first token. A window's first token is predicted from <|endoftext|> alone; nothing is carried over, nothing else scored.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from recipes.nano.corpus import Tokens, batches, scoring_windows
from recipes.nano.device import DeviceBatch, place
from recipes.nano.model import Decoder, cross_entropy


@dataclass(frozen=True)
class Score:
    nats: float
    tokens: int
    text_bytes: int

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / self.text_bytes

    @property
    def perplexity(self) -> float:
        return math.exp(self.nats / self.tokens)

    def __add__(self, other: "Score") -> "Score":
        return Score(self.nats + other.nats, self.tokens + other.tokens, self.text_bytes + other.text_bytes)


def bits_per_byte(model: Decoder, tokens: Tokens, batch_tokens: int) -> dict[str, Score]:
    """Scores by source, and `total`. Windows are never split: `batch_tokens` only bounds how many go at once."""
    nats = document_nats(model, tokens, batch_tokens)
    lengths = tokens.starts[1:] - tokens.starts[:-1]
    scores = {}
    for source in np.unique(tokens.sources):
        mine = tokens.sources == source
        sums = (values[mine].sum().item() for values in (nats, lengths, tokens.text_bytes))
        scores[str(source)] = Score(*sums)
    scores["total"] = sum(scores.values(), start=Score(0.0, 0, 0))
    return scores


@torch.no_grad()
def document_nats(model: Decoder, tokens: Tokens, batch_tokens: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Nats of each document."""
    model.eval()
    nats = np.zeros(len(tokens))
    for batch, owner in scoring_batches(tokens, model.shape.context, batch_tokens, model.embedding.device):
        with torch.compiler.set_stance("force_eager"):  # every batch has its own size: not worth a compilation each
            hidden, _ = model(batch.inputs, batch.positions, batch.bounds)
        per_token = token_nats(hidden, model.embedding, batch.targets)
        nats += np.bincount(owner, weights=per_token.double().cpu().numpy(), minlength=len(tokens))
    return nats


@torch.no_grad()
def greedy_agreement(model: Decoder, other: Decoder, tokens: Tokens, batch_tokens: int) -> float:
    """Share of positions of `tokens` at which the two most likely next tokens are the same."""
    same = count = 0
    for batch, _ in scoring_batches(tokens, model.shape.context, batch_tokens, model.embedding.device):
        left, right = (m.eval()(batch.inputs, batch.positions, batch.bounds)[0] for m in (model, other))
        for mine, theirs in zip(left.split(16_384), right.split(16_384), strict=True):
            same += int((model.logits(mine).argmax(-1) == other.logits(theirs).argmax(-1)).sum())
        count += len(left)
    return same / count


def token_nats(hidden: Tensor, embedding: Tensor, targets: Tensor) -> Tensor:
    """Nats of each position, in pieces that bound the float32 logits to a few GB."""
    pieces = zip(hidden.split(16_384), targets.split(16_384), strict=True)
    return torch.cat([cross_entropy(part, embedding, target) for part, target in pieces])


def scoring_batches(
    tokens: Tokens, context: int, batch_tokens: int, device: torch.device
) -> Iterator[tuple[DeviceBatch, np.ndarray[tuple[int], np.dtype[np.int64]]]]:
    """Whole windows, as many as fit into `batch_tokens` (at least one), with the document that owns each position."""
    windows, owners = scoring_windows(tokens, context)
    lengths = windows[:, 1] - windows[:, 0]
    first = 0
    while first < len(windows):
        count = max(1, int(np.searchsorted(np.cumsum(lengths[first:]), batch_tokens, side="right")))
        some = slice(first, first + count)
        (batch,) = batches(tokens, windows[some], int(lengths[some].sum()))
        yield place(batch, device), np.repeat(owners[some], lengths[some])
        first += count
