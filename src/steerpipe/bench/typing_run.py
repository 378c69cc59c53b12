"""One prompt typed into an engine: what Enter had to wait for, with or without the work that was done before it."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

from steerpipe.bench.typing_prompts import TypedPrompt
from steerpipe.core.events import TokenEvent
from steerpipe.core.sampling import SamplingSettings
from steerpipe.engine.engine import Engine
from steerpipe.engine.request import Opening
from steerpipe.intake.edits import paste
from steerpipe.intake.pauses import SPECULATIVE_ENTER
from steerpipe.runtime.drafts import DraftId, Drafts
from steerpipe.transfer.counters import LadderCounters

FIRST_TOKENS = 16


_LOOK_SECONDS = 0.001  # between two looks whether transfers have landed


class TypingClock:
    """Seconds that pass while something is computed or transferred; waiting for the next key is real, or (`virtual`)
    skipped as soon as nothing is `moving`."""

    def __init__(self, *, virtual: bool, moving: Callable[[], bool] = lambda: False) -> None:
        self._virtual = virtual
        self._moving = moving
        self._skipped = 0.0

    def now(self) -> float:
        return time.perf_counter() + self._skipped

    def wait_until(self, moment: float) -> None:
        while self._virtual and self.now() < moment and self._moving():
            time.sleep(_LOOK_SECONDS)
        left = moment - self.now()
        if left > 0 and self._virtual:
            self._skipped += left
        elif left > 0:
            time.sleep(left)


class EnterKey:
    """Enter, pressed in time on a thread of its own though the engine's is in the middle of a step: tells what is known
    of the answer then, as a chat's front does."""

    def __init__(self, clock: TypingClock, moment: float) -> None:
        self._clock = clock
        self._moment = moment
        self.told: Opening | None = None
        self.first = moment  # when that was

    @contextmanager
    def waiting(self, opening: Opening) -> Iterator[None]:
        """While the engine computes, and so much is known."""
        timer = threading.Timer(max(0.0, self._moment - self._clock.now()), self.press, (opening,))
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()

    def press(self, opening: Opening | None) -> None:
        if opening is not None:
            self.told, self.first = opening, self._clock.now()


@dataclass(frozen=True, slots=True)
class TypedAnswer:
    """Seconds from Enter on. `stall`: leases waited so long until the 16th token; `decode_stall`: from the first on."""

    name: str
    prompt_tokens: int
    last_pause_seconds: float
    prefilled_tokens: int
    ahead_tokens: int  # of the answer, when the engine heard of Enter
    told_tokens: int  # of them, those that were told without asking it
    left_tokens: int  # of the prompt, that were not computed then, nor begun
    saved_seconds: float  # as the draft itself counts it
    overrun_seconds: float  # a step that was under way when Enter came went on for so long
    first_token_seconds: float
    first_tokens_seconds: float  # until the 16th
    stall_seconds: float
    decode_stall_seconds: float
    misses: int
    decode_misses: int  # of them, from the first token on
    token_ids: tuple[int, ...]


class Typist:
    """Types prompts into drafts, on a clock, and measures the answers."""

    def __init__(
        self, engine: Engine, drafts: Drafts, counters: Callable[[], LadderCounters | None], clock: TypingClock
    ) -> None:
        self._engine = engine
        self._drafts = drafts
        self._counters = counters
        self._clock = clock

    def type(self, prompt: TypedPrompt, settings: SamplingSettings, scope: str) -> TypedAnswer:
        """From the first key to the 16th token of the answer."""
        drafts, clock = self._drafts, self._clock
        draft = drafts.open(scope, settings=settings)
        if prompt.already:  # it was typed in more time than the work on it takes
            drafts.edit(draft, [paste(0, prompt.already, clock.now())])
            self._work()
        begin = clock.now()
        for edit in prompt.edits:
            self._work_until(begin + edit.seconds)
            drafts.edit(draft, [replace(edit, seconds=begin + edit.seconds)])
        entered = begin + prompt.enter_seconds
        key = EnterKey(clock, entered)
        self._work_until(entered, key, draft)
        if key.told is None:
            key.press(drafts.opening(draft))
        told = key.told
        overrun = max(0.0, clock.now() - entered)
        warmth = drafts.warmth(draft)
        before = begun = self._counters()
        request, promise = (None, None) if told is None else (told.request, told.promise)
        sequence = drafts.submit(draft, request=request, promise=promise)
        tokens = [] if promise is None else [*promise.token_ids]
        first, done = key.first, entered
        while self._engine.runs(sequence):
            new = [e for e in self._engine.step() if isinstance(e, TokenEvent) and e.sequence == sequence]
            done = clock.now()
            if new and not tokens:
                first, begun = done, self._counters()
            tokens += [event.token_id for event in new]
        whole = len(self._engine.take_completion(sequence).prompt_token_ids)
        after = self._counters()
        spent, decoding = _between(before, after), _between(begun, after)
        return TypedAnswer(
            name=prompt.name, prompt_tokens=prompt.tokens, last_pause_seconds=prompt.last_pause_seconds,
            prefilled_tokens=warmth.prefilled_tokens, ahead_tokens=warmth.speculated_tokens,
            told_tokens=0 if told is None else len(told.events),
            left_tokens=0 if warmth.speculated_tokens else whole - warmth.prefilled_tokens,
            saved_seconds=warmth.saved_seconds, overrun_seconds=overrun, first_token_seconds=first - entered,
            first_tokens_seconds=done - entered, stall_seconds=spent.stall_seconds + spent.late_seconds,
            decode_stall_seconds=decoding.stall_seconds + decoding.late_seconds,
            misses=spent.misses, decode_misses=decoding.misses, token_ids=tuple(tokens),
        )  # fmt: skip

    def _work(self) -> None:
        """Until there is nothing to do."""
        while True:
            self._drafts.tend(self._clock.now())
            if not self._engine.idle:
                self._engine.step()
            elif (wake := self._drafts.next_wake()) is not None:
                self._clock.wait_until(wake)
            else:
                return

    def _work_until(self, moment: float, enter: EnterKey | None = None, draft: DraftId | None = None) -> None:
        """What an engine's thread does between two keys, the last of which may be Enter. A step that has begun is not
        cut short.
        """
        drafts, engine, clock = self._drafts, self._engine, self._clock
        while (now := clock.now()) < moment:
            drafts.tend(now)
            if not engine.idle:
                known = None if draft is None else drafts.opening(draft)
                with nullcontext() if enter is None or known is None else enter.waiting(known):
                    engine.step()
                continue
            wake = drafts.next_wake()
            clock.wait_until(moment if wake is None else min(moment, max(wake, now)))


def _between(before: LadderCounters | None, after: LadderCounters | None) -> LadderCounters:
    return LadderCounters() if before is None or after is None else after - before


def pause_allows(prompt: TypedPrompt) -> bool:
    """Whether an answer may have been begun before Enter at all."""
    return prompt.last_pause_seconds > SPECULATIVE_ENTER.quiet_seconds
