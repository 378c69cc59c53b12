"""One step carried out: rows in, forward pass, tokens chosen. Knows nothing of queues."""

import time
from collections.abc import Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor

from steerpipe.core.events import RoutingRecord
from steerpipe.core.protocols import RoutingSink
from steerpipe.engine.request import Sequence
from steerpipe.engine.scheduler import DecodeStep, PrefillStep
from steerpipe.model.cells import CELL
from steerpipe.model.decoder import StepDecoder
from steerpipe.model.sampling import Sampled, SamplingContext, sample_row, score_row
from steerpipe.model.step import StepRows, decode_rows, prefill_rows

Experts = TypeVar("Experts")  # what the decoder at hand computes with: an ExpertSource or a BlockSource


@dataclass(slots=True)
class _Records:
    """A RoutingSink that holds what it is given."""

    held: list[RoutingRecord] = field(default_factory=list)

    def observe(self, record: RoutingRecord) -> None:
        self.held.append(record)


@dataclass(frozen=True, slots=True)
class Prefilled:
    """What came of one chunk of a prompt."""

    scores: tuple[Sampled, ...]  # of the prompt's tokens, where they were asked for
    first: Sampled | None  # the answer's first token, where it was due


class StepRunner:
    """Computes steps on one decoder. A step that fails leaves every KV as it was. One thread."""

    def __init__(self, decoder: StepDecoder[Experts], experts: Experts, sink: RoutingSink | None) -> None:
        def compute(rows: StepRows, wanted: Items[int], sink: RoutingSink | None) -> Tensor:
            return decoder.forward(rows, experts, wanted, sink)

        self._compute = compute
        self._device = decoder.rows_device
        self.sink = sink  # may be changed between steps
        self.vocab = decoder.spec.vocab
        self.seconds = 0.0  # spent here since the start, by the clock
        self.thread_seconds = 0.0  # of them, those in which this thread ran

    def prefill(self, step: PrefillStep) -> Prefilled:
        sequence, request = step.sequence, step.sequence.request
        start, count = sequence.kv.length, len(step.tokens)
        scored, answers = request.prompt_logprobs is not None, step.last and not request.prompt_only
        # row i says what follows it: a token of the prompt, or after the last row the answer's first
        wanted = range(0 if scored else count - 1, count if answers or (scored and not step.last) else count - 1)
        with self._whole(sequence):
            tail = step.last and not (sequence.quiet and request.prompt_only)  # of what is typed the end is not known
            rows = prefill_rows(sequence.id, sequence.kv, step.tokens, self._device, last=tail)
            logits = self._forward(rows, wanted)
            following = request.prompt_ids[start + 1 : start + 1 + count] if scored else ()
            scores = tuple(_score(row, sequence, start + 1 + i) for i, row in enumerate(logits[: len(following)]))
            return Prefilled(scores, sample_row(logits[-1], sequence.sampling_context()) if answers else None)

    def decode(self, step: DecodeStep) -> list[Sampled]:
        sequences = step.sequences
        with self._whole(*sequences):
            rows = decode_rows(
                [s.id for s in sequences],
                [s.kv for s in sequences],
                [s.answer[-1] for s in sequences],
                self._device,
                cell=CELL if step.batched else 1,
            )
            logits = self._forward(rows, range(len(sequences)))
            return [sample_row(row, s.sampling_context()) for row, s in zip(logits, sequences, strict=True)]

    def _forward(self, rows: StepRows, wanted: Items[int]) -> Tensor:
        """Routing is published when the whole step has succeeded: one that fails may be run again."""
        records = _Records()
        logits = self._compute(rows, wanted, records if self.sink else None)
        if self.sink is not None:
            for record in records.held:
                self.sink.observe(record)
        return logits

    @contextmanager
    def _whole(self, *sequences: Sequence) -> Iterator[None]:
        """Whatever ends a step early, an interrupt too, leaves the KV as it was: the step can then be run again."""
        before = [sequence.kv.length for sequence in sequences]
        began, ran = time.perf_counter(), time.thread_time()
        try:
            yield
        except BaseException:
            for sequence, length in zip(sequences, before, strict=True):
                sequence.kv.truncate(length)
            raise
        finally:
            self.seconds += time.perf_counter() - began
            self.thread_seconds += time.thread_time() - ran


def _score(row: Tensor, sequence: Sequence, position: int) -> Sampled:
    """Of the prompt's token at `position`."""
    request = sequence.request
    context = SamplingContext(request.settings, sequence.seed, position)
    return score_row(row, request.prompt_ids[position], request.prompt_logprobs or 0, context)
