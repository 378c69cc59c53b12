"""The engine: prompts in, token events out, one step at a time."""

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass

from steerpipe.core.errors import CapacityError, RequestError, SteerpipeError
from steerpipe.core.events import Completion, FinishReason, PromptEvent, SequenceFailed, TokenEvent
from steerpipe.core.ids import SequenceId
from steerpipe.core.protocols import RoutingSink
from steerpipe.core.random import fresh_seed
from steerpipe.engine.limits import answer_limit
from steerpipe.engine.prefixes import PrefixStore
from steerpipe.engine.request import Opening, Prepared, Promise, Request, Sequence
from steerpipe.engine.scheduler import DecodeStep, PrefillStep, Scheduler
from steerpipe.engine.step import Experts, StepRunner
from steerpipe.engine.tokenizer import TextCodec
from steerpipe.model.decoder import StepDecoder
from steerpipe.model.kv_cache import BLOCK, KvPool
from steerpipe.model.sampling import Sampled

Event = TokenEvent | PromptEvent | SequenceFailed


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How busy an engine is, at one moment."""

    running: int  # sequences
    waiting: int
    live_blocks: int  # of the KV pool
    kept_blocks: int  # of them, in prompts that are kept for reuse
    capacity_blocks: int


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
        self._runner = StepRunner(decoder, experts, sink)
        self._pool = pool
        self._codec = codec
        self._ends = end_tokens
        self._max_context = max_context
        self._ids = itertools.count()
        self._prefixes = PrefixStore(pool)
        self.on_discard: Callable[[SequenceId], object] = lambda _: None  # who keeps something of it elsewhere
        self._scheduler = Scheduler(self._prefixes, max_batch=max_batch, prefill_chunk=prefill_chunk)
        self._finished: dict[SequenceId, Completion] = {}
        self._due: list[Event] = []  # of answers that were prepared, for the next step to tell

    def submit(self, request: Request, promise: Promise | None = None) -> SequenceId:
        """Queues a request, or raises RequestError if it could never run. With a `promise` its first tokens are
        computed, and not told again.
        """
        sequence = self._sequence(request)
        if promise is not None:
            sequence.seed, sequence.told = promise.seed, promise.token_ids
        self._scheduler.add(sequence)
        return sequence.id

    def prepare(self, request: Request, ahead: int = 0) -> SequenceId:
        """Queues what may be asked for soon: a prompt alone, or with `ahead` the first so many tokens of its answer.

        It runs in the background, a cell at a time, and `step` tells nothing of it. Of an answer nothing stays unless
        it is claimed; it may be given up at any time. Raises RequestError as `submit` does, and CapacityError where
        there is no room for it now beside what others type.
        """
        assert request.prompt_only == (not ahead), "a prompt alone, or so many tokens"
        sequence = self._sequence(request)
        sequence.quiet, sequence.ahead = True, ahead
        if not self._scheduler.offer(sequence):
            raise CapacityError("other drafts hold the room", fix="wait until one ends, or raise kv_memory")
        return sequence.id

    def prepared(self, sequence_id: SequenceId) -> Prepared | None:
        """How far a prepared answer has come; None: it was given up, or claimed."""
        sequence = self._scheduler.find(sequence_id)
        return None if sequence is None or not sequence.quiet else sequence.progress()

    def opening(self, sequence_id: SequenceId) -> Opening | None:
        """The first tokens of a prepared answer, to be told whenever somebody wants them; None: there are none."""
        sequence = self._scheduler.find(sequence_id)
        return None if sequence is None else sequence.opening()

    def claim(self, sequence_id: SequenceId, promise: Promise | None = None) -> bool:
        """Somebody asks for a prepared answer: the next step tells its tokens, and it goes on as if submitted now.
        With a `promise` those that follow it.

        False: it is gone, because it was given up or there is no room for the rest of it, or it does not begin as was
        promised; submit the request, with the promise.
        """
        sequence = self._scheduler.find(sequence_id)
        if sequence is None or (promise is not None and not sequence.keeps(promise)):
            return False
        reason = sequence.held[-1].finish_reason if sequence.held else None
        if reason is None and not self._scheduler.claim(sequence):
            return False
        self._due += sequence.claim(() if promise is None else promise.token_ids)
        if reason is not None:
            self._end(sequence, reason)
        return True

    @property
    def max_context(self) -> int:
        """Tokens of a prompt and its answer together."""
        return self._max_context

    @property
    def prefixes(self) -> PrefixStore:
        """Prompts that are kept for reuse."""
        return self._prefixes

    def _sequence(self, request: Request) -> Sequence:
        limit = answer_limit(request, self._runner.vocab, self._max_context)
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
        if sequence.reserved_blocks > self._pool.capacity_blocks:
            raise RequestError(
                f"the request may need {sequence.reserved_blocks} KV blocks; there are {self._pool.capacity_blocks}",
                fix="ask for fewer tokens, or raise kv_memory",
            )
        return sequence

    @property
    def idle(self) -> bool:
        return self._scheduler.idle and not self._due

    @property
    def answering(self) -> bool:
        """Whether anybody waits for an answer: all but the background."""
        return self._scheduler.wanted

    @property
    def compute_seconds(self) -> float:
        """In forward passes and in choosing tokens, since the start."""
        return self._runner.seconds

    @property
    def compute_thread_seconds(self) -> float:
        """Of them, those in which the engine's thread ran."""
        return self._runner.thread_seconds

    @property
    def load(self) -> EngineLoad:
        pool, scheduler = self._pool, self._scheduler
        kept = self._prefixes.held_blocks
        return EngineLoad(scheduler.running, scheduler.waiting, pool.live_blocks, kept, pool.capacity_blocks)

    def step(self) -> list[Event]:
        """One prefill chunk or one decode step; what came of it. A sequence that fails does not stop the others."""
        if self._due:
            due, self._due = self._due, []
            return due
        step = self._scheduler.next_step()  # who runs
        if step is None:
            return []
        return self._prefill(step) if isinstance(step, PrefillStep) else self._decode(step)

    def runs(self, sequence_id: SequenceId) -> bool:
        """Whether there is more to come of a sequence: it has been submitted and has not ended."""
        return self._scheduler.find(sequence_id) is not None or any(e.sequence == sequence_id for e in self._due)

    def cancel(self, sequence_id: SequenceId) -> None:
        """Ends a sequence early; its completion says so. Nothing happens if it has ended already."""
        sequence = self._scheduler.find(sequence_id)
        if sequence is not None:
            sequence.ended = time.perf_counter()
            self._end(sequence, FinishReason.CANCELLED)
            self._withhold(sequence_id)

    def ended(self, sequence_id: SequenceId) -> bool:
        """Whether there is a completion to take."""
        return sequence_id in self._finished

    def take_completion(self, sequence_id: SequenceId) -> Completion:
        """The finished answer, once. It is kept until somebody takes it."""
        return self._finished.pop(sequence_id)

    def discard(self, sequence_id: SequenceId) -> None:
        """Ends a sequence, wherever it is, and keeps nothing of it."""
        self.cancel(sequence_id)
        self._withhold(sequence_id)
        self._finished.pop(sequence_id, None)
        self.on_discard(sequence_id)

    def forget_prefixes(self) -> None:
        """Gives up every prompt that is kept for reuse."""
        self._prefixes.clear()

    def publish_routing(self, sink: RoutingSink | None) -> None:
        """From the next step on routing goes to `sink`, in place of the one before."""
        self._runner.sink = sink

    def check_integrity(self) -> None:
        """When idle, nothing may be held but prompts that are kept for reuse, and answers that were prepared."""
        leaked = self._pool.live_blocks - self._prefixes.held_blocks - self._scheduler.parked_blocks
        assert not self.idle or leaked == 0, f"{leaked} KV blocks leaked"
        self._pool.check_integrity()

    def _prefill(self, step: PrefillStep) -> list[Event]:
        sequence = step.sequence
        sequence.started = sequence.started or time.perf_counter()
        try:
            done = self._runner.prefill(step)
        except SteerpipeError as error:
            return self._fail(sequence, error)
        sequence.prompt_logprobs += [score.logprob for score in done.scores if score.logprob is not None]
        sequence.prompt_top_logprobs += [score.top for score in done.scores]
        return self._settle_prompt(sequence, done.first) if step.last else []

    def _settle_prompt(self, sequence: Sequence, sampled: Sampled | None) -> list[Event]:
        request = sequence.request
        if request.scope is not None and not sequence.ahead:
            # whole blocks: a shared tail would have to be copied when the answer goes on
            whole = len(request.prompt_ids) // BLOCK * BLOCK
            self._prefixes.keep(request.scope, request.prompt_ids[:whole], sequence.kv.fork(whole))
        events: list[Event] = []
        if request.prompt_logprobs is not None or request.prompt_only:
            told = sequence.end_prompt()
            events += [] if sequence.quiet else [told]
            if told.finish_reason is not None:
                self._end(sequence, told.finish_reason)
        return [*events, *self._settle(sequence, sampled)] if sampled is not None else events

    def _decode(self, step: DecodeStep) -> list[Event]:
        try:
            sampled = self._runner.decode(step)
        except SteerpipeError as error:
            if len(step.sequences) == 1:
                return self._fail(step.sequences[0], error)
            # somebody's experts or numbers are at fault: alone, each gets its own bits or its own error
            return [event for s in step.sequences for event in self._decode(DecodeStep((s,), step.batched))]
        pairs = zip(step.sequences, sampled, strict=True)
        return [event for sequence, token in pairs for event in self._settle(sequence, token)]

    def _settle(self, sequence: Sequence, sampled: Sampled) -> list[Event]:
        event = sequence.take(sampled, self._ends)
        if sequence.quiet:
            sequence.held.append(event)
            if event.finish_reason is not None or len(sequence.answer) == sequence.ahead:
                sequence.ended = time.perf_counter()
                self._scheduler.park(sequence)
            return []
        if event.finish_reason is not None:
            self._end(sequence, event.finish_reason)
        return [event] if len(sequence.answer) > len(sequence.told) else []

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        self._finished[sequence.id] = sequence.completion(reason)
        self._scheduler.remove(sequence)

    def _withhold(self, sequence_id: SequenceId) -> None:
        """Nothing more is told of it."""
        self._due = [event for event in self._due if event.sequence != sequence_id]

    def _fail(self, sequence: Sequence, error: SteerpipeError) -> list[Event]:
        self._scheduler.remove(sequence, failed=True)
        return [] if sequence.quiet else [SequenceFailed(sequence.id, error)]
