"""What the server has said and the engine has not taken yet. It is bounded by what is open, not by what is said:

a request that is cancelled here, and a draft that is closed here, are never sent; edits of one draft go as one message;
of a switch only the last position counts; who types faster than the engine reads waits (`typed`). Any thread.
"""

import threading
from collections import deque

from steerpipe.server.messages import (
    Cancel,
    CloseDraft,
    DraftName,
    EditDraft,
    OpenDraft,
    Submit,
    SwitchPrediction,
    ToEngine,
)

_MOST_EDITS = 1000  # of one message
_EDIT_COST = 64  # of an edit, in characters, beside its text


class Outbox:
    """First in, first out."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[ToEngine] = deque()
        self._closed = False

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, message: ToEngine) -> None:
        """Never waits. Nothing happens where it is closed."""
        with self._changed:
            if self._closed:
                return
            if isinstance(message, Cancel):
                self._cancel(message)
            elif isinstance(message, CloseDraft):
                self._close_draft(message)
            elif isinstance(message, EditDraft):
                self._edit(message)
            else:
                if isinstance(message, SwitchPrediction):
                    self._keep([each for each in self._waiting if not isinstance(each, SwitchPrediction)])
                self._waiting.append(message)
            self._changed.notify()

    def take(self) -> ToEngine | None:
        """The next; waits for it. None: it is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            return None if self._closed else self._waiting.popleft()

    def close(self) -> None:
        """Nobody takes anything any more."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()

    def typed(self, name: DraftName) -> int:
        """How much of a draft waits here, in characters."""
        with self._changed:
            edits = [each for each in self._waiting if isinstance(each, EditDraft) and each.name == name]
        return sum(_EDIT_COST + len(edit.text) for each in edits for edit in each.edits)

    def _cancel(self, message: Cancel) -> None:
        submits = (each for each in self._waiting if isinstance(each, Submit))
        here = next((each for each in submits if each.ticket == message.ticket), None)
        if here is None:
            self._waiting.append(message)
            return
        self._waiting.remove(here)
        if here.draft is not None:
            self._close_draft(CloseDraft(here.draft))

    def _edit(self, message: EditDraft) -> None:
        """Joins the edits of that draft that wait: the engine takes a message between two steps, however long it is."""
        for place in reversed(range(len(self._waiting))):
            last = self._waiting[place]
            if isinstance(last, EditDraft) and last.name == message.name:
                if len(last.edits) + len(message.edits) > _MOST_EDITS:
                    break
                self._waiting[place] = EditDraft(message.name, last.edits + message.edits)
                return
        self._waiting.append(message)

    def _close_draft(self, message: CloseDraft) -> None:
        own = [each for each in self._waiting if isinstance(each, OpenDraft | EditDraft) and each.name == message.name]
        self._keep([each for each in self._waiting if not any(each is mine for mine in own)])
        if not any(isinstance(each, OpenDraft) for each in own):
            self._waiting.append(message)

    def _keep(self, messages: list[ToEngine]) -> None:
        self._waiting = deque(messages)
