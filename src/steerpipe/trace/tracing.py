"""Two engines, one face: prompts in, traced sequences out, each as soon as it is finished."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from steerpipe.engine.tokenizer import TextCodec
from steerpipe.predict.records import Geometry, TracedSequence
from steerpipe.trace.header import ModelIdentity, TraceOptions

Windows = list[TracedSequence]  # of one prompt: more than one where it was longer than the context


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    id: str
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TracedModel:
    """What a trace's header says of its model."""

    identity: ModelIdentity
    geometry: Geometry
    vocabulary: int
    context: int  # most tokens of a sequence
    engine: str  # steerpipe or transformers
    generator: str  # with its version
    dtype: str  # that it computes in


class Tracer(Protocol):
    """A model that tells how it routes."""

    @property
    def model(self) -> TracedModel: ...

    @property
    def codec(self) -> TextCodec: ...

    def check(self, options: TraceOptions) -> None:
        """Raises ConfigError for what this engine cannot do."""
        ...

    def trace(self, prompts: Sequence[EncodedPrompt], options: TraceOptions) -> Iterator[Windows]:
        """Every prompt once, in any order; what was begun and is not given yet is in flight."""
        ...


def answer_seed(prompt: str, seed: int) -> int:
    """Of one prompt's answer: the same whichever prompts came before it, so a trace that goes on is the same trace."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{prompt}".encode(), digest_size=7).digest(), "big")
