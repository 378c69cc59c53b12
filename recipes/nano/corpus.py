"""Text on disk to batches of token windows.

The unit of training is the unit of evaluation: a *window* of at most `context` tokens from one document. Its first
token is predicted from <|endoftext|>, so every token of a text is predicted exactly once and no window knows another:

    inputs   <|endoftext|>  t0  t1 ... t1022
    targets             t0  t1  t2 ... t1023

A batch is flat: windows laid end to end over exactly `tokens_per_step` positions, with the boundaries in `bounds`. A
window that crosses the end of a batch goes on as a new window in the next one. Nothing is padded.
"""

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from recipes.nano.config import END_OF_TEXT_ID

Ints = npt.NDArray[np.int64]
HELD_BACK_SHARE = 0.01  # of the training documents of each source, for choices made while training ...
HELD_BACK_LEAST = 32  # ... but at least so many documents, where that is under a quarter of them


@dataclass(frozen=True)
class Document:
    source: str
    text: str


@dataclass(frozen=True)
class Tokens:
    """Document i is `ids[starts[i]:starts[i + 1]]`, of `sources[i]`, and `text_bytes[i]` long in UTF-8."""

    ids: npt.NDArray[np.uint16]
    starts: Ints
    sources: npt.NDArray[np.str_]
    text_bytes: Ints

    def __len__(self) -> int:
        return len(self.sources)

    def select(self, documents: Ints) -> "Tokens":
        pieces = [self.ids[self.starts[i] : self.starts[i + 1]] for i in documents]
        starts = np.cumsum([0] + [len(piece) for piece in pieces])
        return Tokens(np.concatenate(pieces), starts, self.sources[documents], self.text_bytes[documents])


@dataclass(frozen=True)
class Batch:
    """`inputs[i]`, at `positions[i]` of its window, should predict `targets[i]`; window j starts at `bounds[j]`."""

    inputs: Ints
    targets: Ints
    positions: Ints
    bounds: npt.NDArray[np.int32]


def read_documents(corpus: Path, pattern: str) -> Iterator[Document]:
    """Stream `{"src", "text"}` lines of all files of `corpus` that match, in name order."""
    paths = sorted(corpus.glob(pattern))
    if not paths:
        raise FileNotFoundError(f"no {pattern} in {corpus}; a corpus is train-*.jsonl.gz and heldout.jsonl.gz")
    for path in paths:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            for line in lines:
                record = json.loads(line)
                yield Document(record["src"], record["text"])


def tokenise(documents: Iterator[Document], tokenizer: Tokenizer, close: bool) -> Tokens:
    """Encode all documents. With `close` each ends in <|endoftext|>: models learn to stop there; never scored."""
    ids, lengths, sources, text_bytes = [], [], [], []
    while chunk := list(islice(documents, 2048)):
        for document, encoding in zip(chunk, tokenizer.encode_batch([d.text for d in chunk]), strict=True):
            piece = [*encoding.ids, END_OF_TEXT_ID] if close else encoding.ids
            ids.append(np.array(piece, dtype=np.uint16))
            lengths.append(len(piece))
            sources.append(document.source)
            text_bytes.append(len(document.text.encode()))
    return Tokens(np.concatenate(ids), np.cumsum([0, *lengths]), np.array(sources), np.array(text_bytes))


def split_held_back(tokens: Tokens, seed: int) -> tuple[Tokens, Tokens]:
    """(train, held back): a fixed sample of every source shows overfitting without a look at held-out text."""
    rng = np.random.default_rng([seed, 1])
    chosen = []
    for source in np.unique(tokens.sources):
        members = np.flatnonzero(tokens.sources == source)
        count = max(int(HELD_BACK_SHARE * len(members)), min(HELD_BACK_LEAST, len(members) // 4))
        chosen.append(rng.choice(members, count, replace=False))
    held_back = np.sort(np.concatenate(chosen))
    return tokens.select(np.setdiff1d(np.arange(len(tokens)), held_back)), tokens.select(held_back)


def epoch_windows(tokens: Tokens, context: int, weights: dict[str, float], seed: int, epoch: int) -> Ints:
    """Windows (first, last + 1) of one epoch in training order, as [windows, 2].

    Documents are repeated by the weight of their source (a fraction is a probability). Those longer than the context
    are cut at a phase drawn anew each epoch, so that no epoch sees the same windows again.
    """
    rng = np.random.default_rng([seed, 2, epoch])
    weight = np.array([weights.get(str(source), 1.0) for source in tokens.sources])
    repeats = np.floor(weight + rng.random(len(tokens))).astype(np.int64)
    documents = np.repeat(np.arange(len(tokens)), repeats)
    pieces = []
    for first, last in zip(tokens.starts[documents], tokens.starts[documents + 1], strict=True):
        phase = int(rng.integers(1, context + 1)) if last - first > context else int(last - first)
        cuts = np.concatenate([[first], np.arange(first + phase, last, context), [last]])
        pieces.append(np.stack([cuts[:-1], cuts[1:]], axis=1))
    windows = np.concatenate(pieces)
    return windows[rng.permutation(len(windows))]


def scoring_windows(tokens: Tokens, context: int) -> tuple[Ints, Ints]:
    """All windows of all documents, cut from each document's first token, and the document of each window."""
    windows, owners = [], []
    for document in range(len(tokens)):
        first, last = tokens.starts[document], tokens.starts[document + 1]
        for cut in range(first, last, context):
            windows.append((cut, min(cut + context, last)))
            owners.append(document)
    return np.array(windows), np.array(owners)


def batches(tokens: Tokens, windows: Ints, size: int, first_batch: int = 0, partial: bool = False) -> Iterator[Batch]:
    """Lay windows end to end and cut every `size` positions. The last incomplete batch only comes with `partial`."""
    lengths = windows[:, 1] - windows[:, 0]
    ends = np.cumsum(lengths)  # flat position after each window
    total = int(ends[-1])
    count = -(-total // size) if partial else total // size
    for number in range(first_batch, count):
        low, high = number * size, min((number + 1) * size, total)
        inside = slice(np.searchsorted(ends, low, side="right"), np.searchsorted(ends, high, side="left") + 1)
        stop = np.minimum(ends[inside], high)
        start = np.maximum(ends[inside] - lengths[inside], low)
        offset = windows[inside, 1] - ends[inside]  # flat position -> index into ids
        yield _flat_batch(tokens.ids, start - low, stop - low, offset + low)


def _flat_batch(ids: npt.NDArray[np.uint16], start: Ints, stop: Ints, offset: Ints) -> Batch:
    lengths = stop - start
    flat = np.arange(stop[-1])
    where = flat + np.repeat(offset, lengths)
    targets = ids[where].astype(np.int64)
    inputs = ids[where - 1].astype(np.int64)  # wrong at a window's start: next line
    inputs[start] = END_OF_TEXT_ID
    bounds = np.concatenate([[0], stop]).astype(np.int32)
    return Batch(inputs, targets, flat - np.repeat(start, lengths), bounds)
