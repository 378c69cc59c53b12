"""Traces on the fly: token sequences through a transformers model in large batches, on any device.

Sequences of similar length share a batch and are padded on the right. A causal model's tokens never see what comes
after them, so no mask is needed, and the rows of padding are dropped. B sequences of a batch, S its longest.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from steerpipe.core.errors import ConfigError, InputError
from steerpipe.predict.records import Geometry, States, TracedSequence
from steerpipe.trace.tracker import MoERouterTracker, Pass

BATCH_TOKENS = {"cpu": 2_048, "cuda": 32_768}  # rows of a pass with padding


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """One text to trace; `prompt_tokens` of its tokens are the prompt, the rest an answer."""

    prompt: str  # names the prompt: splits go by it
    tokens: Sequence[int]
    prompt_tokens: int


@torch.no_grad()
def trace_texts(
    model: PreTrainedModel, sequences: Iterable[TokenSequence], *, states: bool = False, weights: bool = True,
    state_dtype: torch.dtype = torch.bfloat16, batch_tokens: int | None = None, max_tokens: int | None = None,
) -> Iterator[TracedSequence]:  # fmt: skip
    """Every sequence as the model routes it, longest first; states stay on the model's device.

    What is longer than `max_tokens` is cut into windows that are traced by themselves, under the same prompt.
    `batch_tokens`: rows of one forward pass, padding included. One wait for the device per batch.
    """
    if model.training:
        raise ConfigError("the model is in training mode: it would not route as it answers", fix="call model.eval()")
    with MoERouterTracker(model, states=states, state_dtype=state_dtype) as tracker:
        for batch in batches(windows(sequences, max_tokens), batch_rows(model, batch_tokens)):
            yield from _trace_batch(model, tracker, batch, weights)


def batch_rows(model: PreTrainedModel, batch_tokens: int | None) -> int:
    """None: what suits the model's device."""
    return batch_tokens or BATCH_TOKENS.get(model.device.type, BATCH_TOKENS["cpu"])


@torch.no_grad()
def read_geometry(model: PreTrainedModel) -> Geometry:
    """Runs one token: only a pass says how many experts it is routed to."""
    with MoERouterTracker(model) as tracker:
        _forward(model, torch.zeros(1, 1, dtype=torch.int64, device=model.device))
        (routed,) = tracker.take()
        return tracker.geometry(routed)


def windows(sequences: Iterable[TokenSequence], max_tokens: int | None) -> Iterator[TokenSequence]:
    """Each sequence whole, or in pieces of at most `max_tokens`."""
    for sequence in sequences:
        if not len(sequence.tokens):
            raise InputError(f"prompt {sequence.prompt} has no tokens", fix="leave empty prompts out")
        step = max_tokens or len(sequence.tokens)
        for start in range(0, len(sequence.tokens), step):
            piece = sequence.tokens[start : start + step]
            of_prompt = min(max(sequence.prompt_tokens - start, 0), len(piece))
            yield TokenSequence(sequence.prompt, piece, of_prompt)


def batches(sequences: Iterable[TokenSequence], rows: int) -> Iterator[list[TokenSequence]]:
    """Similar lengths together, longest first, so that what does not fit in memory fails at once."""
    ordered = sorted(sequences, key=lambda sequence: -len(sequence.tokens))
    start = 0
    while start < len(ordered):
        count = max(1, rows // len(ordered[start].tokens))
        yield ordered[start : start + count]
        start += count


def _trace_batch(
    model: PreTrainedModel, tracker: MoERouterTracker, batch: Sequence[TokenSequence], weights: bool
) -> Iterator[TracedSequence]:
    longest = len(batch[0].tokens)
    tokens = np.zeros((len(batch), longest), dtype=np.int64)  # [B, S]; any id will do as padding
    for row, sequence in enumerate(batch):
        tokens[row, : len(sequence.tokens)] = sequence.tokens
    _forward(model, torch.from_numpy(tokens).to(model.device))
    (routed,) = tracker.take()
    shape = (len(batch), longest, tracker.layers, -1)
    experts = narrow_ids(routed.experts, tracker.experts).reshape(shape)
    applied = routed.weights.to(torch.float16).cpu().numpy().reshape(shape) if weights else None
    for row, sequence in enumerate(batch):
        length = len(sequence.tokens)
        yield TracedSequence(
            sequence.prompt,
            tokens[row, :length].astype(np.int32),
            sequence.prompt_tokens,
            experts[row, :length],
            None if applied is None else applied[row, :length],
            _states_of(routed, row * longest, length),
        )


def _forward(model: PreTrainedModel, tokens: Tensor) -> None:
    """Without the head: 1 M logits of a large vocabulary would take longer than the rest, and nobody asks for them."""
    model.base_model(input_ids=tokens, use_cache=False)


def narrow_ids(experts: Tensor, count: int) -> NDArray[np.unsignedinteger]:
    """On the host, in the smallest type; waits for the device."""
    host = experts.cpu().numpy()
    return host.astype(np.uint8 if count <= 256 else np.uint16)


def _states_of(routed: Pass, start: int, length: int) -> States | None:
    """Views: they keep their batch alive."""
    if routed.states is None:
        return None
    own = slice(start, start + length)
    shared = routed.states.shared
    return States(routed.states.entering[own], routed.states.residual[own], None if shared is None else shared[own])
