"""`steerpipe chat` in a pseudo-terminal: keys go in, answers come out, and nothing of it reaches a file."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

pytest.importorskip("prompt_toolkit", reason="the extra chat is not installed")

from steerpipe.cli.chat_screen import report_line, toolbar_line, whole
from steerpipe.core.events import FinishReason
from steerpipe.runtime.chat_thread import TurnReport
from steerpipe.runtime.drafts import Warmth

PATIENCE_SECONDS = 60.0
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]|\r")


@dataclass
class Terminal:
    process: "subprocess.Popen[bytes]"
    screen: int
    shown: str = ""
    raw: bytes = field(default=b"")

    def type(self, text: str | bytes) -> None:
        os.write(self.screen, text.encode() if isinstance(text, str) else text)

    def wait_for(self, wanted: str) -> str:
        """What was shown since the last call, up to and with `wanted`."""
        return self.wait_until(re.escape(wanted))

    def wait_until(self, pattern: str) -> str:
        """As `wait_for`, by a regular expression."""
        until = time.monotonic() + PATIENCE_SECONDS
        while (found := re.search(pattern, self.shown)) is None:
            left = until - time.monotonic()
            ready, _, _ = select.select([self.screen], [], [], max(0.0, left))
            assert ready, f"{pattern!r} did not come; there is {self.shown[-500:]!r}"
            try:
                self.raw = os.read(self.screen, 65536)
            except OSError:
                self.raw = b""
            assert self.raw, f"the chat has ended; there is {self.shown[-2000:]!r}"
            if b"\x1b[6n" in self.raw:  # where is the cursor?
                os.write(self.screen, b"\x1b[1;1R")
            self.shown += _COLOURS.sub("", self.raw.decode(errors="replace"))
        before, self.shown = self.shown[: found.end()], self.shown[found.end() :]
        return before


def start(folder: Path, *options: str) -> Terminal:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    environment = os.environ | {
        "TERM": "xterm", "XDG_CACHE_HOME": str(folder / "cache"), "HOME": str(folder),
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    command = [sys.executable, "-m", "steerpipe", "chat", "--threads", "1", "--temperature", "0", *options]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, cwd=folder)
    os.close(theirs)
    return Terminal(process, ours)


def leave(terminal: Terminal) -> None:
    terminal.type("/quit\r")
    assert terminal.process.wait(PATIENCE_SECONDS) == 0
    os.close(terminal.screen)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    found = start(tmp_path, "--max-tokens", "12")
    yield found
    found.process.kill()
    found.process.wait()
    os.close(found.screen)


def test_a_conversation(terminal: Terminal, tmp_path: Path) -> None:
    terminal.wait_for("/help")
    terminal.type("Can you tell me about zanzibarine gardens?")
    terminal.wait_for("tokens of the answer")
    terminal.type("\r")
    assert "computed before Enter" in terminal.wait_for(" · length")
    terminal.type("/stats\r")
    assert "1: first token after" in terminal.wait_for(" · length")
    terminal.type("/nonsense\r")
    terminal.wait_for("there is no /nonsense")
    terminal.type("/quit\r")
    assert terminal.process.wait(PATIENCE_SECONDS) == 0
    written = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert not [file for file in written if b"zanzibarine" in file.read_bytes()]


def test_ctrl_c_stops_the_answer_and_the_next_one_is_its_own(tmp_path: Path) -> None:
    terminal = start(tmp_path, "--max-tokens", "900", "--no-drafts", "--fast-memory", "12.5%", "--pace", "20MB")
    terminal.wait_for("drafts are off")
    terminal.type("Tell me a story.\r")
    terminal.wait_for("What")  # into the answer
    terminal.process.send_signal(signal.SIGINT)  # the pseudo-terminal controls no process: its ^C would be echoed only
    assert "error" not in terminal.wait_for(" · cancelled")
    terminal.type("/new\r")
    terminal.wait_for("forgotten")
    terminal.type("Tell me a story.\r")
    assert "What is your favorite movie?" in terminal.wait_for(" · stop")  # all of its own, nothing of the other
    leave(terminal)


def test_bytes_that_are_not_utf_8_are_sent_as_a_mark(terminal: Terminal) -> None:
    terminal.wait_for("/help")
    terminal.type(b"caf\xe9 please")
    terminal.wait_for("please")
    terminal.type("\r")
    found = terminal.wait_until(" · (length|stop)")
    assert "Traceback" not in found and "Exception" not in found


def test_where_the_context_is_full_a_new_conversation_is_offered_and_begun(tmp_path: Path) -> None:
    terminal = start(tmp_path, "--max-tokens", "4", "--max-context", "160", "--no-drafts")
    terminal.wait_for("drafts are off")
    for _ in range(12):
        terminal.type("Do you like dogs, cats, and all the other animals?\r")
        if "/new" in terminal.wait_until(" · length| · stop|/new forgets the conversation"):
            break
    else:
        pytest.fail("the context of 160 tokens was never full")
    terminal.type("/new\r")
    terminal.wait_for("a new conversation")
    terminal.type("Do you like dogs?\r")
    terminal.wait_until(" · (length|stop)")
    terminal.type("/help\r")
    terminal.wait_for("/new        forget")
    leave(terminal)


def test_an_answer_that_is_not_exact_says_so(tmp_path: Path) -> None:
    terminal = start(tmp_path, "--max-tokens", "6", "--fast-memory", "12.5%", "--quality", "fast")
    terminal.wait_for("/help")
    terminal.type("Do you like dogs?\r")
    terminal.wait_until(r"(length|stop)\s+quality fast: \d+\.\d% of \d+ expert uses in decoding were substituted")
    leave(terminal)


def test_halves_of_characters_are_marked_and_whole_ones_kept() -> None:
    assert whole("a\udce9b 😀 é") == "a\ufffdb 😀 é"


def test_a_chat_needs_a_terminal(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "steerpipe", "chat"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and "a chat needs a terminal" in done.stderr


def test_the_bar_shows_how_much_is_computed_and_whether_the_answer_has_begun() -> None:
    cold = Warmth(80, 78, 0, 0, 0, 0, 0, 0.0)
    assert toolbar_line(cold) == "░" * 12 + " 0 of 80 tokens"
    warm = Warmth(80, 78, 64, 300, 360, 0, 8, 1.5)
    line = toolbar_line(warm)
    assert line.count("█") == 10 and line.endswith("64 of 80 tokens · 300 of 360 experts · 8 tokens of the answer")


def test_tokens_that_were_there_at_enter_are_no_speed() -> None:
    report = TurnReport(90, 90, 28, 0.002, 1.0, 8, 0.75, FinishReason.STOP, None)
    assert report_line(report) == "first token after 2 ms · 20.0 tokens/s · 750 ms computed before Enter · stop"
