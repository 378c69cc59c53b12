"""A conversation whose engine runs on a thread of its own, so that keys and answers do not wait for each other.

The front gives edits, Enter and stop; the thread computes, and answers through a queue for each turn. What it has of
an answer before Enter it leaves where the front sees it: Enter tells that at once, whatever step is under way. What is
typed goes to the engine's memory and nowhere else.
"""

import queue
import threading
import time
from enum import Enum

from steerpipe.core.cover import Covered
from steerpipe.core.errors import SteerpipeError
from steerpipe.core.events import SequenceFailed, TokenEvent
from steerpipe.core.quality import Substituted
from steerpipe.core.sampling import SamplingSettings
from steerpipe.engine.engine import Event
from steerpipe.engine.tokenizer import ChatMessage
from steerpipe.intake.difference import edit_between
from steerpipe.intake.edits import DraftEdit
from steerpipe.runtime.chat_turn import Answer, Asked, Known, Turn, TurnReport
from steerpipe.runtime.drafts import DraftId, DraftWork, Warmth
from steerpipe.runtime.pipeline import Pipeline

__all__ = ["Answer", "ChatThread", "TurnReport"]

_SCOPE = "chat"
_NOTHING = DraftWork(prefill=False, ahead_tokens=0, forecast=False, guess=False, promote=False)


class _Signal(Enum):
    STOP_ANSWER = "stop the answer"
    FORGET = "forget the conversation"
    END = "end the thread"


class ChatThread:
    """One conversation. `drafts` False: nothing is done before Enter. Close it before the pipeline."""

    def __init__(
        self, pipe: Pipeline, settings: SamplingSettings, *, system: str | None = None, drafts: bool = True
    ) -> None:
        self._pipe = pipe
        self._engine = pipe.engine
        self._settings = settings
        self._drafting = drafts
        self._drafts = pipe.drafts(DraftWork() if drafts else _NOTHING)
        self._system = [ChatMessage("system", system)] if system else []
        self._history = [*self._system]
        self._draft = self._open()
        self._commands: queue.SimpleQueue[DraftEdit | Asked | _Signal] = queue.SimpleQueue()
        self._asked: Asked | None = None  # the newest question
        self._answering: Turn | None = None
        self._known: Known | None = None
        self._turns_asked = self._turns_obeyed = 0  # the front's, and the thread's
        self.failure: Exception | None = None  # what the thread has died of
        self.warmth: Warmth | None = None  # of the draft, some milliseconds old
        self._thread = threading.Thread(target=self._run, name="steerpipe-chat", daemon=True)
        self._thread.start()

    def edit(self, edit: DraftEdit) -> None:
        """A key, at `time.perf_counter` seconds. Never waits."""
        if self._drafting:
            self._commands.put(edit)

    def enter(self, text: str) -> Answer:
        """Sends the draft, which ends an answer that is still being given. Raises what the thread has died of."""
        asked = self._asking(text, time.perf_counter())
        self._turns_asked += 1
        self._commands.put(asked)
        if self.failure is not None:  # looked at after the put: a thread that dies later finds the question
            raise self.failure
        return Answer(asked.words)

    def _asking(self, text: str, entered: float) -> Asked:
        """Tells what is known of the answer."""
        known, words = self._known, queue.SimpleQueue[str | TurnReport | Exception]()
        if known is None or (known.turn, known.text) != (self._turns_asked, text):
            return Asked(text, words, entered)
        words.put(known.opening.text)
        return Asked(text, words, entered, known.opening, first=time.perf_counter())

    def stop(self) -> None:
        """Ends the answer where it stands; the conversation goes on. May be called by a signal handler."""
        self._commands.put(_Signal.STOP_ANSWER)

    def forget(self) -> None:
        """Ends the answer, and goes on with the system message alone."""
        self._turns_asked += 1
        self._commands.put(_Signal.FORGET)

    def close(self) -> None:
        self._commands.put(_Signal.END)
        self._thread.join()

    # --- the engine's thread

    def _run(self) -> None:
        try:
            while self._obey_all():
                self._drafts.tend(time.perf_counter())
                for event in self._engine.step():
                    self._hear(event)
                self._leave()
                self.warmth = self._drafts.warmth(self._draft) if self._answering is None else None
            self._drafts.close(self._draft)
        except Exception as error:  # noqa: BLE001  a broken disk, a mistake of ours: whoever waits hears of it
            self.failure = error
            self._tell_all(error)

    def _leave(self) -> None:
        """What is known of the answer lies where the front sees it."""
        opening = None if self._answering is not None else self._drafts.opening(self._draft)
        text = "" if opening is None else self._drafts.text(self._draft)
        self._known = None if opening is None else Known(self._turns_obeyed, text, opening)

    def _tell_all(self, error: Exception) -> None:
        """Answers the question that is open, and those that nobody has looked at."""
        if self._asked is not None:
            self._asked.words.put(error)
        while not self._commands.empty():
            command = self._commands.get()
            if isinstance(command, Asked):
                command.words.put(error)

    def _obey_all(self) -> bool:
        """Does what the front wants; waits for it only while there is nothing to compute. False: to end."""
        wake = self._drafts.next_wake()
        left = None if wake is None else max(0.0, wake - time.perf_counter())
        waits = self._engine.idle and left != 0.0
        while True:
            try:
                command = self._commands.get(block=waits, timeout=left)
            except queue.Empty:
                return True
            if command is _Signal.END:
                return False
            self._obey(command)
            waits = False  # all that has come meanwhile: a key that waits behind a step is no pause

    def _obey(self, command: DraftEdit | Asked | _Signal) -> None:
        if isinstance(command, DraftEdit):
            self._drafts.edit(self._draft, [command])
        elif isinstance(command, Asked):
            self._turns_obeyed += 1
            self._stop_answer()
            self._submit(command)
        elif command is _Signal.STOP_ANSWER:
            self._stop_answer()
        elif command is _Signal.FORGET:
            self._turns_obeyed += 1
            self._stop_answer()
            self._history = [*self._system]
            self._drafts.close(self._draft)
            self._draft = self._open()

    def _submit(self, asked: Asked) -> None:
        self._asked = asked
        opening = asked.opening
        try:
            missing = edit_between(self._drafts.text(self._draft), asked.text, asked.entered)
            if missing is not None:
                self._drafts.edit(self._draft, [missing])
            warmth = self._drafts.warmth(self._draft)
            experts = self._pipe.counters()
            if opening is None:
                sequence = self._drafts.submit(self._draft, settings=self._settings)
            else:
                sequence = self._drafts.submit(self._draft, request=opening.request, promise=opening.promise)
        except SteerpipeError as error:  # longer than the context, say
            self._drafts.close(self._draft)
            self._draft = self._open()
            asked.words.put(error)
            return
        if self._pipe.cover is not None and not warmth.speculated_tokens and opening is None:
            self._pipe.cover.cover(sequence)  # what was begun ahead has its experts
        self._answering = Turn(sequence, asked, warmth, experts, asked.first)

    def _hear(self, event: Event) -> None:
        turn = self._answering
        if turn is None or event.sequence != turn.sequence:
            return
        if isinstance(event, SequenceFailed):
            self._answering = None
            self._draft = self._open()
            self._take_covered(turn)
            self._take_substituted(turn)
            turn.asked.words.put(event.error)
        elif isinstance(event, TokenEvent):
            turn.first = turn.first or time.perf_counter()
            turn.asked.words.put(event.text)
            if event.finish_reason is not None:
                self._finish(turn)

    def _stop_answer(self) -> None:
        if self._answering is not None:
            self._engine.cancel(self._answering.sequence)
            self._finish(self._answering)

    def _finish(self, turn: Turn) -> None:
        done = self._engine.take_completion(turn.sequence)
        told = "" if turn.asked.opening is None else turn.asked.opening.text
        said = max(done.text, told, key=len)  # what was told was told, though it was stopped while computed again
        self._history += [ChatMessage("user", turn.asked.text), ChatMessage("assistant", said)]
        self._answering = None
        self._draft = self._open()
        now, after = time.perf_counter(), self._pipe.counters()
        first = turn.first or now
        report = TurnReport(
            prompt_tokens=len(done.prompt_token_ids), cached_tokens=done.timings.cache_n,
            tokens=max(len(done.token_ids), turn.told_tokens),
            first_token_seconds=first - turn.asked.entered, seconds=now - first,
            ahead_tokens=turn.ahead_tokens, saved_seconds=turn.warmth.saved_seconds,
            finish_reason=done.finish_reason,
            experts=None if after is None or turn.experts is None else after - turn.experts,
            covered=self._take_covered(turn), substituted=self._take_substituted(turn),
        )  # fmt: skip
        turn.asked.words.put(report)

    def _take_covered(self, turn: Turn) -> Covered | None:
        return None if self._pipe.cover is None else self._pipe.cover.take(turn.sequence)

    def _take_substituted(self, turn: Turn) -> Substituted | None:
        quality = self._pipe.quality
        return None if quality is None else quality.desk.accounts.take(turn.sequence)

    def _open(self) -> DraftId:
        return self._drafts.open(_SCOPE, self._history, settings=self._settings)
