"""The engine: prompts in, token events out, one step at a time."""

import itertools
import time
from collections.abc import Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor

from steerpipe.core.errors import RequestError, SteerpipeError
from steerpipe.core.events import Completion, FinishReason, RoutingRecord, SequenceFailed, TokenEvent
from steerpipe.core.ids import SequenceId
from steerpipe.core.protocols import RoutingSink
from steerpipe.core.random import fresh_seed
from steerpipe.engine.request import Request, Sequence
from steerpipe.engine.scheduler import DecodeStep, PrefillStep, Scheduler, reserved_blocks
from steerpipe.engine.tokenizer import TextCodec
from steerpipe.model.cells import CELL
from steerpipe.model.decoder import StepDecoder, StepRows, decode_rows, prefill_rows
from steerpipe.model.kv_cache import KvPool
from steerpipe.model.sampling import Sampled, sample_row

Event = TokenEvent | SequenceFailed
Experts = TypeVar("Experts")  # what the decoder at hand computes with: an ExpertSource or a BlockSource


@dataclass(slots=True)
class _Records:
    """A RoutingSink that holds what it is given."""

    held: list[RoutingRecord] = field(default_factory=list)

    def observe(self, record: RoutingRecord) -> None:
        self.held.append(record)


@contextmanager
def _undone_on_error(*sequences: Sequence) -> Iterator[None]:
    """Whatever ends a step early, an interrupt too, leaves the KV as it was: the step can then be run again."""
    before = [sequence.kv.length for sequence in sequences]
    try:
        yield
    except BaseException:
        for sequence, length in zip(sequences, before, strict=True):
            sequence.kv.truncate(length)
        raise


class Engine:
    """Runs any number of sequences on one decoder. Not thread-safe: one thread calls `submit`, `step` and `cancel`."""

    def __init__(
        self,
        decoder: StepDecoder[Experts],
        experts: Experts,
        pool: KvPool,
        codec: TextCodec,
        *,
        end_tokens: frozenset[int],
        max_context: int,
        max_batch: int,
        prefill_chunk: int,
        sink: RoutingSink | None = None,
    ) -> None:
        def compute(rows: StepRows, wanted: Items[int], sink: RoutingSink | None) -> Tensor:
            return decoder.forward(rows, experts, wanted, sink)

        self._compute = compute
        self._rows_device = decoder.rows_device
        self._vocab = decoder.spec.vocab
        self._pool = pool
        self._codec = codec
        self._ends = end_tokens
        self._max_context = max_context
        self._sink = sink
        self._ids = itertools.count()
        self._scheduler = Scheduler(
            capacity_blocks=pool.capacity_blocks, max_batch=max_batch, prefill_chunk=prefill_chunk
        )
        self._finished: dict[SequenceId, Completion] = {}

    def submit(self, request: Request) -> SequenceId:
        """Queues a request, or raises RequestError if it could never run."""
        limit = self._answer_limit(request)
        settings = request.settings
        hidden = (*self._ends, *settings.stop_token_ids)
        context = request.prompt_ids if request.continues else ()
        sequence = Sequence(
            id=SequenceId(next(self._ids)),
            request=request,
            seed=fresh_seed() if settings.seed is None else settings.seed,
            limit=limit,
            stream=self._codec.stream(settings.stop, stop_token_ids=hidden, after=context),
            kv=self._pool.sequence(),
        )
        if reserved_blocks(sequence) > self._pool.capacity_blocks:
            raise RequestError(
                f"the request may need {reserved_blocks(sequence)} KV blocks; there are {self._pool.capacity_blocks}",
                fix="ask for fewer tokens, or raise kv_memory",
            )
        self._scheduler.add(sequence)
        return sequence.id

    @property
    def idle(self) -> bool:
        return self._scheduler.idle

    def step(self) -> list[Event]:
        """One prefill chunk or one decode step; what came of it. A sequence that fails does not stop the others."""
        step = self._scheduler.next_step()  # who runs
        if step is None:
            return []
        return self._prefill(step) if isinstance(step, PrefillStep) else self._decode(step)

    def runs(self, sequence_id: SequenceId) -> bool:
        """Whether a sequence waits or runs: it has been submitted and has not ended."""
        return self._scheduler.find(sequence_id) is not None

    def cancel(self, sequence_id: SequenceId) -> None:
        """Ends a sequence early; its completion says so. Nothing happens if it has ended already."""
        sequence = self._scheduler.find(sequence_id)
        if sequence is not None:
            sequence.ended = time.perf_counter()
            self._end(sequence, FinishReason.CANCELLED)

    def take_completion(self, sequence_id: SequenceId) -> Completion:
        """The finished answer, once. It is kept until somebody takes it."""
        return self._finished.pop(sequence_id)

    def discard(self, sequence_id: SequenceId) -> None:
        """Ends a sequence, wherever it is, and keeps nothing of it."""
        self.cancel(sequence_id)
        self._finished.pop(sequence_id, None)

    def check_integrity(self) -> None:
        """When idle, nothing may be held."""
        assert not self.idle or self._pool.live_blocks == 0, f"{self._pool.live_blocks} KV blocks leaked"

    def _prefill(self, step: PrefillStep) -> list[Event]:
        sequence = step.sequence
        sequence.started = sequence.started or time.perf_counter()
        try:
            with _undone_on_error(sequence):
                rows = prefill_rows(sequence.id, sequence.kv, step.tokens, self._rows_device, last=step.last)
                logits = self._forward(rows, [len(step.tokens) - 1] if step.last else [])
                sampled = sample_row(logits[0], sequence.sampling_context()) if step.last else None
        except SteerpipeError as error:
            return [self._fail(sequence, error)]
        return [self._settle(sequence, sampled)] if sampled is not None else []

    def _decode(self, step: DecodeStep) -> list[Event]:
        try:
            with _undone_on_error(*step.sequences):
                sampled = self._decode_together(step)
        except SteerpipeError as error:
            if len(step.sequences) == 1:
                return [self._fail(step.sequences[0], error)]
            # somebody's experts or numbers are at fault: alone, each gets its own bits or its own error
            return [event for s in step.sequences for event in self._decode(DecodeStep((s,), step.batched))]
        return [self._settle(s, token) for s, token in zip(step.sequences, sampled, strict=True)]

    def _decode_together(self, step: DecodeStep) -> list[Sampled]:
        sequences = step.sequences
        rows = decode_rows(
            [s.id for s in sequences],
            [s.kv for s in sequences],
            [s.answer[-1] for s in sequences],
            self._rows_device,
            cell=CELL if step.batched else 1,
        )
        logits = self._forward(rows, range(len(sequences)))
        return [sample_row(row, s.sampling_context()) for row, s in zip(logits, sequences, strict=True)]

    def _forward(self, rows: StepRows, wanted: Items[int]) -> Tensor:
        """Routing is published when the whole step has succeeded: one that fails may be run again."""
        records = _Records()
        logits = self._compute(rows, wanted, records if self._sink else None)
        if self._sink is not None:
            for record in records.held:
                self._sink.observe(record)
        return logits

    def _settle(self, sequence: Sequence, sampled: Sampled) -> TokenEvent:
        event = sequence.take(sampled, self._ends)
        if event.finish_reason is not None:
            self._end(sequence, event.finish_reason)
        return event

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        self._finished[sequence.id] = sequence.completion(reason)
        self._scheduler.remove(sequence)

    def _fail(self, sequence: Sequence, error: SteerpipeError) -> SequenceFailed:
        self._scheduler.remove(sequence)
        return SequenceFailed(sequence.id, error)

    def _answer_limit(self, request: Request) -> int:
        """Most tokens the answer may have; checks the prompt on the way."""
        prompt, vocab = request.prompt_ids, self._vocab
        if not prompt:
            raise RequestError("the prompt is empty", fix="give at least one token of text")
        strange = next((i for i in prompt if not 0 <= i < vocab), None)
        if strange is not None:
            raise RequestError(
                f"token id {strange} is not in the vocabulary of {vocab}", fix="tokenise with this model"
            )
        unknown = next((i for i in request.settings.stop_token_ids if i >= vocab), None)
        if unknown is not None:
            raise RequestError(f"stop token {unknown} is not in the vocabulary of {vocab}", fix="leave it out")
        room = self._max_context - len(prompt)
        if room < 1:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens; the context holds {self._max_context}, answer included",
                fix="shorten the prompt, or raise max_context if the model allows it",
            )
        return min(request.settings.max_tokens or room, room)
