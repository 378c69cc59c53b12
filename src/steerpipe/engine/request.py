"""What is asked of the engine, and the state of an answer in the making."""

import time
from dataclasses import dataclass, field

from steerpipe.core.events import Completion, FinishReason, PromptEvent, Timings, TokenEvent, TokenLogprob
from steerpipe.core.ids import SequenceId
from steerpipe.core.sampling import SamplingSettings
from steerpipe.engine.text import TextStream
from steerpipe.model.kv_cache import BLOCK, KvSequence
from steerpipe.model.sampling import Sampled, SamplingContext


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt and how to continue it.

    `continues` says that the answer's text goes on where the prompt's text ends (a completion) rather than beginning
    anew (a chat): sentencepiece tokenizers then keep the space between the two.
    `batched` chooses the decode class: alone in one-row steps, or together with others in 16-row cells. The two
    differ in the last bits of a product, so a request keeps its class from the first token to the last.
    `scope` is who asks: requests of one scope reuse each other's prompts, and scopes share the engine fairly. None
    reuses nothing and leaves nothing behind.
    `prompt_logprobs` asks for the log probabilities of the prompt's tokens and of the n likeliest at each place.
    `prompt_only` ends when the prompt is computed, without an answer: to score it, or to have it ready.
    `background` (of a `prompt_only` request) takes only time and room that nobody else wants, and gives both back when
    somebody does: what was computed of it by then is kept for its scope.
    """

    prompt_ids: tuple[int, ...]
    settings: SamplingSettings
    batched: bool = False
    continues: bool = True
    scope: str | None = None
    prompt_logprobs: int | None = None
    prompt_only: bool = False
    background: bool = False

    def __post_init__(self) -> None:
        assert not self.background or (self.prompt_only and self.prompt_logprobs is None), (
            "nobody waits in the background"
        )


@dataclass(frozen=True, slots=True)
class Promise:
    """The first tokens of an answer have been told before the engine was asked for it: it tells what follows them."""

    seed: int  # with which they were chosen
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Opening:
    """The first tokens of an answer that was begun ahead. They may be told before the engine is asked for the rest.

    Whoever submits the request with the promise gets what follows them, whatever has become of the answer that was
    begun: where the engine is exact the same request with the same seed has the same tokens anyway.
    """

    request: Request
    seed: int
    events: tuple[TokenEvent, ...]  # none of them ends the answer: the engine tells its end

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events)

    @property
    def promise(self) -> Promise:
        return Promise(self.seed, tuple(event.token_id for event in self.events))


@dataclass(frozen=True, slots=True)
class Prepared:
    """How far an answer has come that nobody has asked for yet."""

    tokens: int
    seconds: float  # from its first step to its last, or to now
    done: bool  # nothing more is computed of it until somebody asks


@dataclass(slots=True)
class Sequence:
    """One request on its way. Owned by the scheduler; `kv` is freed when it ends."""

    id: SequenceId
    request: Request
    seed: int
    limit: int  # most answer tokens; 0 where the prompt is all that is wanted
    stream: TextStream
    kv: KvSequence
    answer: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    top_logprobs: list[tuple[TokenLogprob, ...]] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)  # of every prompt token but the first
    prompt_top_logprobs: list[tuple[TokenLogprob, ...]] = field(default_factory=list)
    cached: int = 0  # prompt tokens that were there already
    quiet: bool = False  # prepared: in the background, and told to nobody
    ahead: int = 0  # tokens of its answer that are computed before anybody asks for it
    held: list[TokenEvent] = field(default_factory=list)  # those tokens
    told: tuple[int, ...] = ()  # its first tokens, that somebody else has told already
    submitted: float = field(default_factory=time.perf_counter)
    started: float = 0.0  # first prefill step
    prefilled: float = 0.0  # first token sampled
    ended: float = 0.0

    @property
    def background(self) -> bool:
        """Whether it takes only time and room that nobody else wants."""
        return self.quiet or self.request.background

    @property
    def waiting_prompt(self) -> tuple[int, ...]:
        """Prompt tokens that have not been prefilled yet."""
        return self.request.prompt_ids[self.kv.length :]

    @property
    def final_length(self) -> int:
        """Positions of all that it may become; the last token is sampled but never stored."""
        most = min(self.limit, self.ahead) if self.ahead else self.limit
        return len(self.request.prompt_ids) + max(0, most - 1)

    @property
    def reserved_blocks(self) -> int:
        return -(-self.final_length // BLOCK)

    def sampling_context(self) -> SamplingContext:
        position = len(self.request.prompt_ids) + len(self.answer)
        return SamplingContext(self.request.settings, self.seed, position, self.request.prompt_ids, self.answer)

    def progress(self) -> Prepared:
        until = self.ended or time.perf_counter()
        return Prepared(len(self.answer), until - self.started if self.started else 0.0, done=self.ended > 0)

    def opening(self) -> Opening | None:
        """What may be told of it before anybody asks the engine; None: nothing."""
        events = tuple(event for event in self.held if event.finish_reason is None)
        return Opening(self.request, self.seed, events) if self.quiet and events else None

    def keeps(self, promise: Promise) -> bool:
        """Whether it begins, or will begin, as was promised."""
        known = tuple(self.answer[: len(promise.token_ids)])
        return self.seed == promise.seed and known == promise.token_ids[: len(known)]

    def claim(self, told: tuple[int, ...]) -> list[TokenEvent]:
        """Somebody has asked for what was prepared: from now on its time counts. The tokens that are there already,
        without those that have been told.
        """
        self.quiet, self.ahead, self.told = False, 0, told
        self.cached = min(self.kv.length, len(self.request.prompt_ids))
        self.submitted = self.started = time.perf_counter()
        self.prefilled = self.ended = self.submitted if self.answer else 0.0
        return self.held[len(told) :]

    def end_prompt(self) -> PromptEvent:
        """The prompt is complete; says so to whoever asked for its log probabilities, or for nothing else."""
        if self.request.prompt_only:
            self.prefilled = self.ended = time.perf_counter()
        reason = FinishReason.LENGTH if self.request.prompt_only else None
        return PromptEvent(self.id, tuple(self.prompt_logprobs), tuple(self.prompt_top_logprobs), reason)

    def take(self, sampled: Sampled, ends: frozenset[int]) -> TokenEvent:
        """Adds a token; says what became printable and whether the answer is complete."""
        now, place = time.perf_counter(), len(self.answer)
        if not self.answer:
            self.prefilled = now
        token_id = self.told[place] if place < len(self.told) else sampled.token_id  # what was told stands
        self.answer.append(token_id)
        text = self.stream.push(token_id)
        reason = self._finish_reason(token_id, ends)
        if reason is not None:
            text += self.stream.finish()
            self.ended = now
        self.pieces.append(text)
        if sampled.logprob is not None:
            self.logprobs.append(sampled.logprob)
            self.top_logprobs.append(sampled.top)
        return TokenEvent(self.id, token_id, text, reason, sampled.logprob, sampled.top)

    def completion(self, reason: FinishReason) -> Completion:
        answered = max(self.ended, self.prefilled)
        return Completion(
            text="".join(self.pieces),
            token_ids=tuple(self.answer),
            finish_reason=reason,
            timings=Timings(
                prompt_n=len(self.request.prompt_ids) - self.cached,
                prompt_ms=(self.prefilled - self.started) * 1e3 if self.prefilled else 0.0,
                predicted_n=len(self.answer),
                predicted_ms=(answered - self.prefilled) * 1e3 if self.answer else 0.0,
                cache_n=self.cached,
                queued_ms=(self.started - self.submitted) * 1e3 if self.started else 0.0,
            ),
            prompt_token_ids=self.request.prompt_ids,
            logprobs=tuple(self.logprobs),
            top_logprobs=tuple(self.top_logprobs),
            prompt_logprobs=tuple(self.prompt_logprobs),
            prompt_top_logprobs=tuple(self.prompt_top_logprobs),
        )

    def _finish_reason(self, token_id: int, ends: frozenset[int]) -> FinishReason | None:
        settings = self.request.settings
        ended = token_id in settings.stop_token_ids or (token_id in ends and not settings.ignore_eos)
        if ended or self.stream.stop_string is not None:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.answer) >= self.limit else None
