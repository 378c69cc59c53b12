"""One prompt typed into an engine: what Enter had to wait for, with or without the work that was done before it."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from steerpipe.bench.typing_prompts import TypedPrompt
from steerpipe.core.events import TokenEvent
from steerpipe.core.sampling import SamplingSettings
from steerpipe.engine.engine import Engine
from steerpipe.intake.edits import paste
from steerpipe.intake.pauses import SPECULATIVE_ENTER
from steerpipe.runtime.drafts import Drafts
from steerpipe.transfer.counters import LadderCounters

FIRST_TOKENS = 16


class TypingClock:
    """Seconds that pass while something is computed; waiting for the next key is real, or (`virtual`) skipped."""

    def __init__(self, *, virtual: bool) -> None:
        self._virtual = virtual
        self._skipped = 0.0

    def now(self) -> float:
        return time.perf_counter() + self._skipped

    def wait_until(self, moment: float) -> None:
        left = moment - self.now()
        if left > 0 and self._virtual:
            self._skipped += left
        elif left > 0:
            time.sleep(left)


@dataclass(frozen=True, slots=True)
class TypedAnswer:
    """Seconds from Enter on. `stall`: of them, leases waited while the first 16 tokens were decoded."""

    name: str
    prompt_tokens: int
    last_pause_seconds: float
    prefilled_tokens: int
    ahead_tokens: int
    saved_seconds: float  # as the draft itself counts it
    first_token_seconds: float
    first_tokens_seconds: float  # until the 16th
    stall_seconds: float
    misses: int
    token_ids: tuple[int, ...]

    @property
    def pause_allowed(self) -> bool:
        """Whether the last pause was long enough for an answer to be begun and its first token to be there."""
        return self.ahead_tokens > 0


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
        self._work_until(entered)
        warmth = drafts.warmth(draft)
        before = self._counters()
        sequence = drafts.submit(draft)
        tokens: list[int] = []
        first = done = entered
        while self._engine.runs(sequence):
            told = [e for e in self._engine.step() if isinstance(e, TokenEvent) and e.sequence == sequence]
            done = clock.now()
            first = done if told and not tokens else first
            tokens += [event.token_id for event in told]
        self._engine.take_completion(sequence)
        after = self._counters()
        spent = after - before if after is not None and before is not None else LadderCounters()
        return TypedAnswer(
            name=prompt.name, prompt_tokens=prompt.tokens, last_pause_seconds=prompt.last_pause_seconds,
            prefilled_tokens=warmth.prefilled_tokens, ahead_tokens=warmth.speculated_tokens,
            saved_seconds=warmth.saved_seconds, first_token_seconds=first - entered,
            first_tokens_seconds=done - entered, stall_seconds=spent.stall_seconds + spent.late_seconds,
            misses=spent.misses, token_ids=tuple(tokens),
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

    def _work_until(self, moment: float) -> None:
        """What an engine's thread does between two keys. A step that has begun is not cut short."""
        drafts, engine, clock = self._drafts, self._engine, self._clock
        while (now := clock.now()) < moment:
            drafts.tend(now)
            if not engine.idle:
                engine.step()
                continue
            wake = drafts.next_wake()
            clock.wait_until(moment if wake is None else min(moment, max(wake, now)))


def pause_allows(prompt: TypedPrompt) -> bool:
    """Whether an answer may have been begun before Enter at all."""
    return prompt.last_pause_seconds > SPECULATIVE_ENTER.quiet_seconds
