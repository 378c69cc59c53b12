"""What the engine does for one draft at a time: its next cell, or the beginning of its answer."""

from steerpipe.core.errors import CapacityError, RequestError, SteerpipeError
from steerpipe.core.sampling import SamplingSettings
from steerpipe.engine.engine import Engine
from steerpipe.engine.request import Request
from steerpipe.engine.tokenizer import ChatMessage, TextCodec
from steerpipe.runtime.draft_foresight import DraftForesight
from steerpipe.runtime.draft_session import BegunAnswer, Cell, DraftSession, DraftWork
from steerpipe.runtime.prompts import encode_prompt, is_chat


class DraftWorker:
    """Gives the engine work for drafts, and takes it back. Engine's thread."""

    def __init__(self, engine: Engine, codec: TextCodec, work: DraftWork, foresight: DraftForesight | None) -> None:
        self._engine = engine
        self._codec = codec
        self._work = work
        self._foresight = foresight

    def start(self, draft: DraftSession, now: float) -> bool:
        """The draft's next piece of work; False: there is none now, or (`crowded`) no room for it."""
        draft.crowded = False
        try:
            end = self._next_cell(draft)
            if end is not None:
                return self._fill(draft, end)
            if draft.settings is not None and self.begins(draft) is not None and now >= draft.pause_ends:
                return self._begin(draft, draft.settings)
        except CapacityError:
            draft.crowded = True
        except SteerpipeError:  # longer than the context, say: Enter will tell
            draft.failed = True
        return False

    def due(self, draft: DraftSession) -> float | None:
        """When there is something to do for it, below zero for at once; None: not before it is typed in."""
        return -1.0 if draft.prefix.behind or self._next_cell(draft) is not None else self.begins(draft)

    def begins(self, draft: DraftSession) -> float | None:
        """When its answer is begun if no key comes; None: it is not."""
        ready = draft.may_begin and not draft.prefix.behind
        return draft.pause_ends if self._work.ahead_tokens and ready else None

    def settle(self, draft: DraftSession) -> bool:
        """Whether the work that was given for it is done, or has been given up."""
        if draft.filling is not None and not self._engine.runs(draft.filling.sequence):
            self._filled(draft, draft.filling)
        if draft.begun is not None:
            begun = self._engine.prepared(draft.begun.sequence)
            if begun is not None and not begun.done:
                return False
            if begun is None:  # somebody needed its room
                self.drop_begun(draft)
                draft.failed = True
        return draft.filling is None

    def request(self, draft: DraftSession, settings: SamplingSettings, batched: bool) -> Request:
        """What Enter would ask for now. Raises RequestError."""
        turns = [*draft.messages, ChatMessage("user", draft.typed.text)]
        prompt = turns if self._codec.has_chat_template else draft.typed.text
        ids = encode_prompt(prompt, self._codec, raw=False)
        chat = is_chat(prompt, self._codec, raw=False)
        return Request(ids, settings, batched=batched, continues=not chat, scope=draft.scope)

    def changed(self, draft: DraftSession, kept: int) -> None:
        """Only the first `kept` of its tokens are as they were: what rests on the others goes."""
        self.drop_begun(draft)
        if draft.filling is not None and kept < len(draft.filling.ids):
            self._drop_cell(draft, draft.filling)
        if kept < len(draft.computed):
            before = draft.computed
            draft.forget_from(self._engine.prefixes.usable(kept))
            self._engine.prefixes.cut(draft.scope, before, len(draft.computed))

    def abandon(self, draft: DraftSession) -> None:
        """Takes back what is under way."""
        self.drop_begun(draft)
        if draft.filling is not None:
            self._drop_cell(draft, draft.filling)

    def drop_begun(self, draft: DraftSession) -> None:
        if draft.begun is not None:
            self._engine.discard(draft.begun.sequence)
            draft.begun = None

    def kept(self, draft: DraftSession) -> int:
        """How many of its computed tokens are there still: who needed the room may have taken it."""
        prefixes = self._engine.prefixes
        return prefixes.usable(prefixes.shared(draft.scope, draft.computed))

    def _next_cell(self, draft: DraftSession) -> int | None:
        return draft.next_cell if self._work.prefill else None

    def _fill(self, draft: DraftSession, end: int) -> bool:
        """Up to `end`; what is not there any more is computed with it, in one go: cell by cell, drafts that have no
        room beside each other would take it from each other for ever.
        """
        draft.forget_from(self.kept(draft))
        ids = draft.prefix.first(end)
        request = Request(ids, SamplingSettings(), scope=draft.scope, prompt_only=True)
        draft.filling = Cell(self._engine.prepare(request), ids)
        if self._foresight is not None:
            self._foresight.watch(draft.filling)
        return True

    def _filled(self, draft: DraftSession, cell: Cell) -> None:
        draft.filling = None
        routing = None if self._foresight is None else self._foresight.take(cell)
        if not self._engine.ended(cell.sequence):
            draft.failed = True
            return
        draft.fill(cell, self._engine.take_completion(cell.sequence).timings.prompt_ms / 1e3, routing)

    def _begin(self, draft: DraftSession, settings: SamplingSettings) -> bool:
        if len(draft.prefix) >= self._engine.max_context:
            raise RequestError("the draft does not fit into the context", fix="shorten it")
        request = self.request(draft, settings, draft.batched)
        draft.begun = BegunAnswer(self._engine.prepare(request, self._work.ahead_tokens), request)
        draft.changed = False
        return True

    def _drop_cell(self, draft: DraftSession, cell: Cell) -> None:
        """What was computed of it by chance is given up too."""
        self._engine.discard(cell.sequence)
        self._engine.prefixes.cut(draft.scope, cell.ids, len(draft.computed))
        if self._foresight is not None:
            self._foresight.take(cell)
        draft.filling = None
