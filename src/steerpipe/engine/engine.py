"""The engine: prompts in, token events out, one step at a time."""

import itertools
import time
from dataclasses import dataclass

from steerpipe.core.errors import RequestError, SteerpipeError
from steerpipe.core.events import Completion, FinishReason, PromptEvent, SequenceFailed, TokenEvent
from steerpipe.core.ids import SequenceId
from steerpipe.core.protocols import RoutingSink
from steerpipe.core.random import fresh_seed
from steerpipe.engine.prefixes import PrefixStore
from steerpipe.engine.request import Request, Sequence
from steerpipe.engine.scheduler import DecodeStep, PrefillStep, Scheduler, reserved_blocks
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
        self._scheduler = Scheduler(self._prefixes, max_batch=max_batch, prefill_chunk=prefill_chunk)
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

    def forget_prefixes(self) -> None:
        """Gives up every prompt that is kept for reuse."""
        self._prefixes.clear()

    def check_integrity(self) -> None:
        """When idle, nothing may be held but prompts that are kept for reuse."""
        leaked = self._pool.live_blocks - self._prefixes.held_blocks
        assert not self.idle or leaked == 0, f"{leaked} KV blocks leaked"

    def _prefill(self, step: PrefillStep) -> list[Event]:
        sequence = step.sequence
        sequence.started = sequence.started or time.perf_counter()
        try:
            done = self._runner.prefill(step)
        except SteerpipeError as error:
            return [self._fail(sequence, error)]
        sequence.prompt_logprobs += [score.logprob for score in done.scores if score.logprob is not None]
        sequence.prompt_top_logprobs += [score.top for score in done.scores]
        return self._settle_prompt(sequence, done.first) if step.last else []

    def _settle_prompt(self, sequence: Sequence, sampled: Sampled | None) -> list[Event]:
        request = sequence.request
        if request.scope is not None:  # whole blocks: a shared tail would have to be copied when the answer goes on
            whole = len(request.prompt_ids) // BLOCK * BLOCK
            self._prefixes.keep(request.scope, request.prompt_ids[:whole], sequence.kv.fork(whole))
        events: list[Event] = []
        if request.prompt_logprobs is not None or request.prompt_only:
            told = sequence.end_prompt()
            events.append(told)
            if told.finish_reason is not None:
                self._end(sequence, told.finish_reason)
        return [*events, self._settle(sequence, sampled)] if sampled is not None else events

    def _decode(self, step: DecodeStep) -> list[Event]:
        try:
            sampled = self._runner.decode(step)
        except SteerpipeError as error:
            if len(step.sequences) == 1:
                return [self._fail(step.sequences[0], error)]
            # somebody's experts or numbers are at fault: alone, each gets its own bits or its own error
            return [event for s in step.sequences for event in self._decode(DecodeStep((s,), step.batched))]
        return [self._settle(s, token) for s, token in zip(step.sequences, sampled, strict=True)]

    def _settle(self, sequence: Sequence, sampled: Sampled) -> TokenEvent:
        event = sequence.take(sampled, self._ends)
        if event.finish_reason is not None:
            self._end(sequence, event.finish_reason)
        return event

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        self._finished[sequence.id] = sequence.completion(reason)
        self._scheduler.remove(sequence)

    def _fail(self, sequence: Sequence, error: SteerpipeError) -> SequenceFailed:
        self._scheduler.remove(sequence, failed=True)
        return SequenceFailed(sequence.id, error)

    def _answer_limit(self, request: Request) -> int:
        """Most tokens the answer may have; checks the prompt on the way."""
        prompt, vocab = request.prompt_ids, self._runner.vocab
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
        if room < (not request.prompt_only):
            raise RequestError(
                f"the prompt has {len(prompt)} tokens; the context holds {self._max_context}, answer included",
                fix="shorten the prompt, or raise max_context if the model allows it",
            )
        return 0 if request.prompt_only else min(request.settings.max_tokens or room, room)
