"""A loaded nano and somebody who types into it, on a clock that tests move."""

import gc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from steerpipe.core.events import TokenEvent
from steerpipe.core.ids import SequenceId
from steerpipe.core.sampling import SamplingSettings
from steerpipe.engine.engine import Engine
from steerpipe.engine.request import Request
from steerpipe.engine.tokenizer import ChatMessage
from steerpipe.intake.edits import DraftEdit, insert
from steerpipe.runtime.drafts import DraftId, Drafts, DraftWork
from steerpipe.runtime.pipeline import Pipeline

GREEDY = SamplingSettings(temperature=0.0, max_tokens=12)


@dataclass
class Desk:
    """Drafts over an engine. `typing` gives the engine its time between the edits, as long as they are apart."""

    pipe: Pipeline
    work: DraftWork = field(default_factory=DraftWork)
    now: float = 0.0
    parts: bool = True
    drafts: Drafts = field(init=False)

    def __post_init__(self) -> None:
        self.drafts = Drafts(self.pipe.engine, self.pipe.codec, self.work, parts=self.parts)

    @property
    def engine(self) -> Engine:
        return self.pipe.engine

    def close(self) -> None:
        """Ends every draft; nothing may be left of any of them."""
        for draft in list(self.drafts._open):
            self.drafts.close(draft)
        self.engine.forget_prefixes()
        assert self.engine.idle and self.engine.load.live_blocks == 0

    def rest(self, until: float | None = None) -> None:
        """Works until there is nothing to do before `until`."""
        while True:
            self.drafts.tend(self.now)
            while not self.engine.idle:
                assert not self.engine.step(), "nobody has asked for anything"
                self.drafts.tend(self.now)
            wake = self.drafts.next_wake()
            if wake is None or (until is not None and wake > until):
                break
            self.now = max(self.now, wake)
        self.now = self.now if until is None else max(self.now, until)

    def type(self, draft: DraftId, edits: Iterable[DraftEdit], *, lazy: bool = False) -> None:
        """Each edit at its time; `lazy`: the engine gets no time in between."""
        for edit in edits:
            if not lazy:
                self.rest(edit.seconds)
            self.now = max(self.now, edit.seconds)
            self.drafts.edit(draft, [edit])

    def answer(self, sequence: SequenceId) -> list[int]:
        """Runs the engine to the end; the tokens that it told."""
        told = []
        while not self.engine.idle:
            told += [e.token_id for e in self.engine.step() if isinstance(e, TokenEvent) and e.sequence == sequence]
        self.engine.take_completion(sequence)
        return told


def keys(text: str, start: float = 0.0, gap: float = 0.1, at: int = 0) -> list[DraftEdit]:
    """One insert for each character, at the end of what was typed before."""
    return [insert(at + place, character, start + place * gap) for place, character in enumerate(text)]


def expected(pipe: Pipeline, text: str, history: Sequence[ChatMessage] = (), settings: SamplingSettings = GREEDY,
             *, batched: bool = False) -> list[int]:  # fmt: skip
    """The answer without any draft."""
    turns = [*history, ChatMessage("user", text)]
    sequence = pipe.engine.submit(Request(pipe.encode(turns), settings, batched, continues=False))
    while not pipe.engine.idle:
        pipe.engine.step()
    return list(pipe.engine.take_completion(sequence).token_ids)


@contextmanager
def nothing_left(pipe: Pipeline) -> Iterator[None]:
    """What is done inside leaves no KV block behind but those that were kept before."""
    before = pipe.engine.load.live_blocks
    yield
    gc.collect()
    pipe.engine.check_integrity()
    assert pipe.engine.load.live_blocks == before
