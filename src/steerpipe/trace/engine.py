"""The same records from our own engine: a RoutingSink that keeps what it is told until the answer is complete.

L MoE layers, k routed experts.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from steerpipe import __version__
from steerpipe.core.config import EngineConfig, cache_folder, refuse_lossy
from steerpipe.core.errors import ConfigError, UnsupportedConfigError
from steerpipe.core.events import Completion, RoutingRecord
from steerpipe.model.spec import ModelSpec
from steerpipe.predict.records import Geometry, TracedSequence
from steerpipe.runtime.models import open_model
from steerpipe.runtime.pipeline import Pipeline
from steerpipe.trace.header import TraceOptions
from steerpipe.trace.live import TokenSequence, windows
from steerpipe.trace.models import pack_identity
from steerpipe.trace.tracing import EncodedPrompt, TracedModel, Windows, answer_seed


@dataclass(frozen=True, slots=True)
class RoutedRows:
    """Rows of one sequence in one layer, as one step computed them."""

    positions: NDArray[np.int64]  # [rows]
    experts: NDArray[np.int64]  # [rows, k]
    weights: NDArray[np.float32]  # [rows, k]


class RoutingRecorder:
    """Give it to a Pipeline as its `sink`; one thread."""

    def __init__(self) -> None:
        self._rows: defaultdict[int, defaultdict[int, list[RoutedRows]]] = defaultdict(lambda: defaultdict(list))

    def observe(self, record: RoutingRecord) -> None:
        sequences = np.array([int(sequence) for sequence in record.sequences])
        for sequence in np.unique(sequences):
            own = sequences == sequence
            self._rows[int(sequence)][record.layer].append(
                RoutedRows(record.positions[own], record.experts[own], record.weights[own])
            )

    def take(self, prompt: str, prompt_ids: tuple[int, ...], answer: tuple[int, ...], experts: int) -> TracedSequence:
        """The oldest sequence that was not taken yet, whose tokens these are; `experts` per layer.

        The last token of an answer is sampled but never computed, so it has no routing and is left out.
        """
        layers = self._rows.pop(min(self._rows))
        tokens = prompt_ids + answer[:-1]
        columns = [_by_position(layers[layer], len(tokens)) for layer in sorted(layers)]
        narrow = np.uint8 if experts <= 256 else np.uint16
        return TracedSequence(
            prompt,
            np.array(tokens, dtype=np.int32),
            len(prompt_ids),
            np.stack([column.experts for column in columns], axis=1).astype(narrow),  # [T, L, k]
            np.stack([column.weights for column in columns], axis=1).astype(np.float16),
        )

    def forget(self) -> None:
        """Drops what was not taken, after a failure."""
        self._rows.clear()


def _by_position(parts: list[RoutedRows], tokens: int) -> RoutedRows:
    positions = np.concatenate([part.positions for part in parts])
    order = np.argsort(positions, kind="stable")
    assert np.array_equal(positions[order], np.arange(tokens)), "each position is computed once"
    experts = np.concatenate([part.experts for part in parts])
    return RoutedRows(positions[order], experts[order], np.concatenate([part.weights for part in parts])[order])


class EngineTracer:
    """A model in steerpipe's own engine. `close` gives its memory back."""

    def __init__(self, model: str | None, config: EngineConfig) -> None:
        """None is the embedded model. Blocks until it is loaded. Raises ConfigError if it would not be exact."""
        refuse_lossy(config, "a trace")
        self._recorder = RoutingRecorder()
        self._pipe = Pipeline(model, config=config, sink=self._recorder)
        self.codec = self._pipe.codec
        self.model = TracedModel(
            identity=pack_identity(open_model(self._pipe.folder, cache_folder(config))),
            geometry=_geometry(self._pipe.spec),
            vocabulary=self._pipe.spec.vocab,
            context=self._pipe.config.max_context - 1,  # one token is sampled after every prompt
            engine="steerpipe",
            generator=f"steerpipe {__version__}",
            dtype=self._pipe.config.dtype,
        )

    def check(self, options: TraceOptions) -> None:
        if options.states:
            raise ConfigError("hidden states are not to be had from this engine", fix="use --engine transformers")
        if options.batch > 1 and not options.generate:
            raise ConfigError("a batch of prompts without answers", fix="prompts are read one by one: leave it out")

    def trace(self, prompts: Sequence[EncodedPrompt], options: TraceOptions) -> Iterator[Windows]:
        return self._answers(prompts, options) if options.generate else self._prompts(prompts, options)

    def close(self) -> None:
        self._pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _prompts(self, prompts: Sequence[EncodedPrompt], options: TraceOptions) -> Iterator[Windows]:
        for prompt in prompts:
            found = []
            for piece in windows([TokenSequence(prompt.id, prompt.tokens, len(prompt.tokens))], options.max_tokens):
                self._recorder.forget()
                done = self._pipe.generate(piece.tokens, max_tokens=1, temperature=0.0)
                found.append(self._take(prompt, done, options))
            yield found

    def _answers(self, prompts: Sequence[EncodedPrompt], options: TraceOptions) -> Iterator[Windows]:
        for start in range(0, len(prompts), options.batch):
            batch = prompts[start : start + options.batch]
            self._recorder.forget()
            answers = self._pipe.generate_batch(
                [prompt.tokens for prompt in batch],
                batched=options.batch > 1,
                seeds=[answer_seed(prompt.id, options.seed) for prompt in batch],
                max_tokens=options.generate,
            )
            for prompt, done in zip(batch, answers, strict=True):
                yield [self._take(prompt, done, options)]

    def _take(self, prompt: EncodedPrompt, done: Completion, options: TraceOptions) -> TracedSequence:
        traced = self._recorder.take(prompt.id, done.prompt_token_ids, done.token_ids, self.model.geometry.experts)
        return traced if options.weights else replace(traced, weights=None)


def _geometry(spec: ModelSpec) -> Geometry:
    shapes = {(spec.moe(layer).experts, spec.moe(layer).top_k) for layer in spec.moe_layers}
    if len(shapes) != 1:
        raise UnsupportedConfigError(
            f"layers with {sorted(shapes)} experts and routed experts", fix="traces need the same in every layer"
        )
    ((experts, top_k),) = shapes
    return Geometry(len(spec.moe_layers), experts, top_k, spec.hidden)
