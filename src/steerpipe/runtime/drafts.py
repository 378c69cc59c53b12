"""Prompts that are being typed, worked on while nobody needs the engine.

Tokens that can no longer change are really prefilled, one cell at a time, and kept as the beginning of a prompt of
their scope; in a pause the answer is begun. Both run in the engine's background, so what is computed is exactly what
would be computed after Enter: drafts change time, never text. One piece of work at a time; scopes, and the drafts of a
scope, take turns. What is typed lives in memory until the draft ends, and nowhere else.
"""

import itertools
from collections.abc import Sequence

from steerpipe.core.errors import RequestError
from steerpipe.core.ids import SequenceId
from steerpipe.core.sampling import SamplingSettings
from steerpipe.engine.engine import Engine
from steerpipe.engine.request import Opening, Promise, Request
from steerpipe.engine.tokenizer import ChatMessage, TextCodec
from steerpipe.intake.edits import DraftEdit
from steerpipe.runtime.draft_crowd import DraftCrowd
from steerpipe.runtime.draft_forecast import Readiness
from steerpipe.runtime.draft_foresight import DraftForesight
from steerpipe.runtime.draft_session import DraftId, DraftSession, DraftWork, Warmth
from steerpipe.runtime.draft_turns import DraftTurns
from steerpipe.runtime.draft_work import DraftWorker
from steerpipe.runtime.typed import TypedPrompts

__all__ = ["DraftId", "DraftWork", "Drafts", "Warmth"]

_TOKEN_CHARACTERS = 16  # a text of more for each token of the context is not worked on
_COUNTED_TAIL = 1024  # characters of an unstable end whose tokens are counted; of a longer one they are estimated
_USUAL_CHARACTERS = 4  # of a token, for that


class Drafts:
    """Engine's thread only. Times of edits and `now` are seconds on one clock, whichever that is."""

    def __init__(
        self, engine: Engine, codec: TextCodec, work: DraftWork | None = None, foresight: DraftForesight | None = None,
        *, parts: bool = True,
    ) -> None:  # fmt: skip
        """`foresight` moves experts; None: none are moved. `parts`: of a cell are computed, where that changes no bit.
        `Pipeline.drafts` knows all of them.
        """
        self._engine = engine
        self._foresight = foresight
        self._worker = DraftWorker(engine, codec, work or DraftWork(), foresight)
        self._prompts = TypedPrompts(codec)
        self._ids = itertools.count()
        self._open: dict[DraftId, DraftSession] = {}
        self._restless: dict[DraftId, DraftSession] = {}  # those for whom there is, or will be, something to do
        self._crowd = DraftCrowd(engine.prefixes.pool)
        self._served: DraftSession | None = None  # whose work the engine has
        self._reading = DraftTurns()
        self._turns = DraftTurns()
        self._now = 0.0  # of the last `tend`
        engine.prefixes.parts = parts
        engine.prefixes.typed = lambda: [(draft.scope, draft.computed_bytes) for draft in self._open.values()]

    def __len__(self) -> int:
        return len(self._open)

    def open(
        self, scope: str, messages: Sequence[ChatMessage] = (), *, settings: SamplingSettings | None = None,
        batched: bool = False,
    ) -> DraftId:  # fmt: skip
        """A draft of the user's next turn after `messages`. `settings` and `batched`: those that the answer will have;
        without settings no answer is begun ahead. Raises RequestError if the template refuses the messages.
        """
        history = tuple(messages)
        prefix = self._prompts.begin(history)
        prefixes = self._engine.prefixes
        kept = prefixes.usable(prefixes.shared(scope, prefix.ids))
        draft = DraftSession(
            DraftId(next(self._ids)), scope, history, settings, batched, prefix, base=kept, computed=prefix.ids[:kept],
            most_characters=_TOKEN_CHARACTERS * self._engine.max_context, parts=prefixes.parts,
        )  # fmt: skip
        self._open[draft.id] = self._restless[draft.id] = draft
        return draft.id

    def edit(self, draft_id: DraftId, edits: Sequence[DraftEdit]) -> None:
        """What was typed; many edits at once cost little more than one. Raises RequestError at an edit that lies
        outside the text; those before it are done.
        """
        draft = self._find(draft_id)
        before = draft.typed.version
        try:
            for edit in edits:
                draft.apply(edit)
        finally:
            if draft.typed.version != before:
                self._follow(draft)

    def tend(self, now: float) -> None:
        """Notes what the engine has done, and gives it the next piece of work. Call it between steps and when idle."""
        self._now = now
        self._settle()
        if self._engine.answering:
            self._crowd.stir()
            return
        if self._foresight is not None:  # not before: an answer's own prediction comes first
            self._foresight.look(now)
        self._read()
        if self._served is not None:
            return
        self._restless |= self._crowd.called()
        for draft in sorted(self._restless.values(), key=self._turns.rank):
            if self._worker.start(draft, now):
                self._served = draft
                self._turns.take(draft)
                self._crowd.leave(draft)
                return
            if draft.crowded:
                self._crowd.add(draft)
                del self._restless[draft.id]  # until it is typed in, or there is room
                return  # one such question at a time: it looks at all prompts
            self._crowd.leave(draft)
            if self._worker.due(draft) is None:
                del self._restless[draft.id]  # until it is typed in

    def next_wake(self) -> float | None:
        """When `tend` has something to do though nothing happens: below zero for at once; None: never."""
        times = [self._worker.due(draft) for draft in self._restless.values()]
        times.append(-1.0 if self._crowd.called() else None)
        if self._foresight is not None:
            times.append(self._foresight.next_wake(self._now))
        return min((time for time in times if time is not None), default=None)

    @property
    def bytes_in_flight(self) -> int:
        """Of experts that are moved for drafts."""
        return 0 if self._foresight is None else self._foresight.bytes_in_flight

    def text(self, draft_id: DraftId) -> str:
        return self._find(draft_id).typed.text

    def warmth(self, draft_id: DraftId) -> Warmth:
        draft = self._find(draft_id)
        if draft is self._served:
            self._settle()
        begun = None if draft.begun is None else self._engine.prepared(draft.begun.sequence)
        kept = self._worker.kept(draft)
        ready = Readiness(0, 0, 0) if self._foresight is None else self._foresight.readiness(draft)
        return Warmth(
            typed_tokens=len(draft.prefix) + self._tail_tokens(draft),
            stable_tokens=len(draft.prefix),
            prefilled_tokens=kept,
            experts_ready=ready.ready,
            experts_expected=ready.expected,
            bytes_in_flight=ready.bytes_in_flight,
            speculated_tokens=0 if begun is None else begun.tokens,
            saved_seconds=sum(filled.seconds for end, filled in draft.filled.items() if end <= kept)
            + (0.0 if begun is None else begun.seconds),
            too_long=draft.too_long,
            crowded=draft.crowded,
        )

    @property
    def served(self) -> DraftId | None:
        """Whose work the engine has."""
        return None if self._served is None else self._served.id

    def opening(self, draft_id: DraftId) -> Opening | None:
        """The first tokens of the answer if Enter comes now, for another thread or process to tell without waiting for
        this one. None: there are none.
        """
        begun = self._find(draft_id).begun
        return None if begun is None else self._engine.opening(begun.sequence)

    def submit(
        self, draft_id: DraftId, *, settings: SamplingSettings | None = None, request: Request | None = None,
        promise: Promise | None = None,
    ) -> SequenceId:  # fmt: skip
        """Enter: the draft becomes a request, and `Engine.step` tells its tokens, those that are there already at once.

        `settings`: None for those that the draft was opened with. `request`: the same, made elsewhere; then the text is
        not encoded here. `promise`: of an `opening` with that request, whose tokens have been told. The draft is
        closed, unless RequestError is raised: then it stays open.
        """
        draft = self._find(draft_id)
        if request is None:
            chosen = draft.settings if settings is None else settings
            if chosen is None:
                raise RequestError("the draft has no sampling settings", fix="give them when it is opened or submitted")
            request = self._worker.request(draft, chosen, draft.batched)
        begun = draft.begun
        if begun is not None and begun.request == request and self._engine.claim(begun.sequence, promise):
            draft.begun = None
            sequence = begun.sequence
        else:
            sequence = self._engine.submit(request, promise)
        self._worker.abandon(draft)
        self._forget(draft, sent=True)
        return sequence

    def close(self, draft_id: DraftId) -> None:
        """Given up: what was computed for it goes, and nothing of it stays."""
        draft = self._find(draft_id)
        self._worker.abandon(draft)
        self._engine.prefixes.cut(draft.scope, draft.computed, draft.base)
        self._forget(draft, sent=False)

    def _follow(self, draft: DraftSession) -> None:
        """Its text has changed."""
        if draft.too_long:
            self._worker.abandon(draft)
            self._restless.pop(draft.id, None)
            self._crowd.leave(draft)
            return
        self._restless[draft.id] = draft
        self._worker.changed(draft, draft.follow())
        if self._foresight is not None:
            self._foresight.typed_in(draft)

    def _read(self) -> None:
        """Looks at the next 512 characters of one draft that has unread text: of a paste, say."""
        draft = min((d for d in self._restless.values() if d.prefix.behind), key=self._reading.rank, default=None)
        if draft is not None:
            draft.prefix.advance()
            self._reading.take(draft)

    def _tail_tokens(self, draft: DraftSession) -> int:
        if draft.too_long:
            return 0
        length = draft.prefix.tail_length
        if draft.prefix.behind or length > _COUNTED_TAIL:
            return length // _USUAL_CHARACTERS
        seen = (draft.typed.version, len(draft.prefix))
        if draft.counted is None or draft.counted[0] != seen:
            draft.counted = seen, len(self._prompts.encode(draft.prefix.tail))
        return draft.counted[1]

    def _settle(self) -> None:
        """Notes what the engine has done."""
        if self._served is not None and self._worker.settle(self._served):
            self._served = None

    def _find(self, draft_id: DraftId) -> DraftSession:
        draft = self._open.get(draft_id)
        if draft is None:
            raise RequestError(f"there is no draft {draft_id}", fix="open one; a draft that was sent or closed is gone")
        return draft

    def _forget(self, draft: DraftSession, *, sent: bool) -> None:
        if self._foresight is not None:
            self._foresight.ended(draft, sent=sent)
        del self._open[draft.id]
        self._restless.pop(draft.id, None)
        self._crowd.leave(draft)
        self._crowd.stir()
        if self._served is draft:
            self._served = None
