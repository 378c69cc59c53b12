"""The terminal of a chat: one line to type in, a quiet bar under it, and figures after each answer.

What is typed is kept in memory, for the arrow keys, and gone with the process.
"""

import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prompt_toolkit import PromptSession
from prompt_toolkit.buffer import Buffer
from prompt_toolkit.history import InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from rich.console import Console
from rich.markup import escape

from steerpipe.core.errors import RequestError, SteerpipeError
from steerpipe.intake.difference import edit_between
from steerpipe.runtime.chat_thread import ChatThread, TurnReport
from steerpipe.runtime.drafts import Warmth

HELP = """Enter       send
Alt-Enter   new line
Up, Down    what you sent before
Ctrl-C      stop the answer; while typing, clear the line
Ctrl-D      leave
/new        forget the conversation and begin another
/stats      figures of this conversation
/quit       leave
What you type is computed ahead in this process's memory; it is written to no log and to no disk."""
_CELLS = 12  # of the warm bar
_HALVES = re.compile("[\ud800-\udfff]")  # where bytes that are not UTF-8 were typed


class ChatScreen:
    """Shows a ChatThread to a person."""

    def __init__(
        self, thread: ChatThread, name: str, *, drafts: bool, lossy: Callable[[TurnReport], str | None]
    ) -> None:
        """`lossy`: what there is to say of an answer that was not to be exact."""
        self._thread = thread
        self._name = name
        self._drafts = drafts
        self._lossy = lossy
        self._typed = ""
        self._turns: list[TurnReport] = []
        self._console = Console(highlight=False, soft_wrap=True)
        self._session: PromptSession[str] = PromptSession(
            history=InMemoryHistory(), key_bindings=_keys(), multiline=True, bottom_toolbar=self._toolbar,
            refresh_interval=0.2, prompt_continuation="  ",
        )  # fmt: skip
        self._session.default_buffer.on_text_changed += self._text_changed

    def run(self) -> None:
        """Until the person leaves."""
        self._console.print(f"[dim]{self._name} · /help for keys and commands[/dim]")
        while True:
            self._typed = ""
            try:
                text = self._session.prompt("> ")
            except KeyboardInterrupt:  # clears the line
                self._forget_draft()
                continue
            except EOFError:
                return
            command = text.strip()
            if command == "/quit":
                return
            if command == "/new":
                self._begin_anew()
            elif command in ("/help", "/stats") or not command:
                self._forget_draft()
                self._console.print(HELP if command == "/help" else self._stats() if command else "", markup=False)
            elif command.startswith("/") and " " not in command and "\n" not in command:
                self._forget_draft()
                self._console.print(f"there is no {command}; /help lists the commands", markup=False)
            else:
                self._answer(text)

    def _answer(self, text: str) -> None:
        try:
            with _on_interrupt(self._thread.stop):
                for word in self._thread.enter(whole(text)):
                    if isinstance(word, TurnReport):
                        self._turns.append(word)
                        self._console.print(f"\n[dim]{escape(self._report(word))}[/dim]")
                    else:
                        self._console.print(word, end="", markup=False)
        except SteerpipeError as error:
            if self._thread.failure is not None:  # nobody is left to answer
                raise
            self._console.print(f"\nerror: {error}", markup=False)
            if isinstance(error, RequestError):
                self._console.print("  or: /new forgets the conversation, which is part of every prompt", markup=False)

    def _begin_anew(self) -> None:
        self._thread.forget()
        self._turns.clear()
        self._console.print("a new conversation; what was said before is forgotten", markup=False)

    def _text_changed(self, buffer: Buffer) -> None:
        text = whole(buffer.text)
        edit = edit_between(self._typed, text, time.perf_counter())
        self._typed = text
        if edit is not None:
            self._thread.edit(edit)

    def _forget_draft(self) -> None:
        edit = edit_between(self._typed, "", time.perf_counter())
        if edit is not None:
            self._thread.edit(edit)

    def _toolbar(self) -> str:
        warmth = self._thread.warmth
        return toolbar_line(warmth) if self._drafts and warmth is not None else "drafts are off" * (not self._drafts)

    def _stats(self) -> str:
        if not self._turns:
            return "nothing has been answered yet"
        return "\n".join(f"{number}: {self._report(turn)}" for number, turn in enumerate(self._turns, start=1))

    def _report(self, turn: TurnReport) -> str:
        return "\n".join(line for line in (report_line(turn), self._lossy(turn)) if line is not None)


def whole(text: str) -> str:
    """The text with a mark for each half of a character (a lone surrogate), which no tokenizer takes."""
    return _HALVES.sub("\ufffd", text)


def toolbar_line(warmth: Warmth) -> str:
    """How much of the prompt is computed, and whether the answer has begun."""
    share = warmth.prefilled_tokens / warmth.typed_tokens if warmth.typed_tokens else 0.0
    full = round(_CELLS * min(1.0, share))
    ready = f" · {warmth.experts_ready} of {warmth.experts_expected} experts" if warmth.experts_expected else ""
    begun = f" · {warmth.speculated_tokens} tokens of the answer" if warmth.speculated_tokens else ""
    return (
        f"{'█' * full}{'░' * (_CELLS - full)} {warmth.prefilled_tokens} of {warmth.typed_tokens} tokens{ready}{begun}"
    )


def report_line(turn: TurnReport) -> str:
    """TTFT, speed, hits, and what had been computed before Enter."""
    later = turn.tokens - max(1, turn.ahead_tokens)  # those that were there at once are no speed
    speed = f" · {later / turn.seconds:.1f} tokens/s" if later > 0 and turn.seconds else ""
    experts = turn.experts
    hits = f" · {experts.hits / experts.leased:.0%} of experts found in memory" if experts and experts.leased else ""
    before = f" · {turn.saved_seconds * 1e3:.0f} ms computed before Enter" if turn.saved_seconds else ""
    covered = turn.covered
    cover = f" · {covered.tokens} tokens covered {covered.seconds * 1e3:.0f} ms" if covered and covered.tokens else ""
    first = f"first token after {turn.first_token_seconds * 1e3:.0f} ms"
    return f"{first}{speed}{hits}{before}{cover} · {turn.finish_reason.value}"


@contextmanager
def _on_interrupt(act: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C calls `act` and interrupts nothing. In the main thread alone."""
    before = signal.signal(signal.SIGINT, lambda _signal, _frame: act())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _keys() -> KeyBindings:
    bindings = KeyBindings()

    @bindings.add("enter")
    def _send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return bindings
