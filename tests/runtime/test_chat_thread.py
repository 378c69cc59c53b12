"""A conversation on a thread: the answers are those without drafts, and a stop ends one answer only."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from steerpipe.core.errors import RequestError, TransferError
from steerpipe.core.events import FinishReason
from steerpipe.core.sampling import SamplingSettings
from steerpipe.engine.engine import Event
from steerpipe.engine.tokenizer import ChatMessage
from steerpipe.intake.difference import edit_between
from steerpipe.intake.edits import delete, insert
from steerpipe.runtime.chat_thread import ChatThread, TurnReport
from steerpipe.runtime.pipeline import Pipeline

ENDING = "<|im_end|>\n<|im_start|>assistant\n"  # of nano's template, after the text
SETTINGS = SamplingSettings(temperature=0.0, max_tokens=10)


@pytest.fixture(scope="module")
def nano() -> Iterator[Pipeline]:
    with Pipeline(dtype="float32", threads=1, predict="off", profile=False, max_context=512) as pipe:
        yield pipe


def talk(thread: ChatThread, text: str) -> tuple[str, TurnReport]:
    *words, report = thread.enter(text)
    assert isinstance(report, TurnReport)
    return "".join(str(word) for word in words), report


def type_in(thread: ChatThread, text: str) -> None:
    for end in range(1, len(text) + 1):
        edit = edit_between(text[: end - 1], text[:end], time.perf_counter())
        assert edit is not None
        thread.edit(edit)


@pytest.mark.parametrize("drafts", [True, False])
def test_two_turns_are_answered_as_they_would_be_without_drafts(nano: Pipeline, drafts: bool) -> None:
    turns, wanted = [], []
    for text in ("What is the capital of France?", "And how many people live there?"):
        turns.append(ChatMessage("user", text))
        wanted.append(nano.generate(turns, temperature=0.0, max_tokens=10).text)
        turns.append(ChatMessage("assistant", wanted[-1]))
    thread = ChatThread(nano, nano.settings(temperature=0.0, max_tokens=10), drafts=drafts)
    given = []
    for text in ("What is the capital of France?", "And how many people live there?"):
        type_in(thread, text)
        answer, report = talk(thread, text)
        given.append(answer)
        assert report.tokens <= 10 and report.first_token_seconds >= 0
        assert drafts or report.saved_seconds == 0
    thread.close()
    assert given == wanted


def test_a_pause_is_enough_for_the_answer_to_begin(nano: Pipeline) -> None:
    text = "What is the capital of France?"
    typed = len(nano.encode([ChatMessage("user", text)])) - len(nano.codec.encode_part(ENDING))
    thread = ChatThread(nano, SETTINGS)
    type_in(thread, text)
    until = time.monotonic() + 60
    while (warmth := thread.warmth) is None or warmth.typed_tokens < typed or not warmth.speculated_tokens:
        assert time.monotonic() < until
        time.sleep(0.01)
    _, report = talk(thread, text)
    thread.close()
    assert report.ahead_tokens > 0 and report.saved_seconds > 0


@pytest.mark.parametrize("after", ["nothing", "stopped", "given up and stopped", "forgotten"])
def test_enter_tells_what_is_known_though_the_engine_is_in_the_middle_of_a_step(
    nano: Pipeline, monkeypatch: pytest.MonkeyPatch, after: str
) -> None:
    text = "What is the capital of France?"
    wanted = nano.generate([ChatMessage("user", text)], temperature=0.0, max_tokens=10).text
    step, goes_on = nano.engine.step, threading.Event()
    thread = ChatThread(nano, nano.settings(temperature=0.0, max_tokens=10))

    def stands_still() -> list[Event]:
        if thread._known is not None and len(thread._known.opening.events) == 3:
            goes_on.wait()
        return step()

    monkeypatch.setattr(nano.engine, "step", stands_still)
    type_in(thread, text)
    until = time.monotonic() + 60
    while thread._known is None or len(thread._known.opening.events) < 3:
        assert time.monotonic() < until
        time.sleep(0.01)
    if after == "forgotten":
        thread.forget()
    if after == "given up and stopped":  # a key and its Backspace: what was told has to be computed again
        thread.edit(insert(0, "x", time.perf_counter()))
        thread.edit(delete(0, 1, time.perf_counter()))
    words = thread.enter(text)
    if after == "forgotten":
        assert words._words.empty(), "it belongs to another conversation"
    else:
        first = next(words)
        assert isinstance(first, str) and first and wanted.startswith(first)
    if after.endswith("stopped"):
        thread.stop()
    goes_on.set()
    *rest, report = words
    thread.close()
    assert isinstance(report, TurnReport)
    if after == "nothing":
        assert first + "".join(map(str, rest)) == wanted and report.ahead_tokens >= 3
    elif after.endswith("stopped"):
        assert thread._history[-1].content.startswith(first) and report.finish_reason is FinishReason.CANCELLED
        assert report.tokens >= 3
    else:
        assert "".join(map(str, rest)) == wanted


def test_an_error_is_told_and_the_conversation_goes_on(nano: Pipeline) -> None:
    thread = ChatThread(nano, SETTINGS)
    with pytest.raises(RequestError, match="the context holds 512"):
        talk(thread, "word " * 600)
    answer, _ = talk(thread, "Hello")
    thread.close()
    assert answer


def test_an_answer_is_stopped_where_it_stands(nano: Pipeline) -> None:
    thread = ChatThread(nano, SamplingSettings(temperature=0.0, max_tokens=300, ignore_eos=True))
    words = thread.enter("Tell me a story.")
    next(words)
    thread.stop()
    *_, report = words
    assert isinstance(report, TurnReport) and report.finish_reason is FinishReason.CANCELLED
    assert 0 < report.tokens < 300
    thread.close()
    nano.engine.forget_prefixes()
    nano.engine.check_integrity()


def test_an_interrupt_while_an_answer_is_waited_for_does_not_end_it(
    nano: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = nano.generate([ChatMessage("user", "Hello")], temperature=0.0, max_tokens=10).text
    step, goes_on = nano.engine.step, threading.Event()

    def stands_still() -> list[Event]:
        goes_on.wait()
        return step()

    thread = ChatThread(nano, SETTINGS, drafts=False)
    monkeypatch.setattr(nano.engine, "step", stands_still)
    words = thread.enter("Hello")
    threading.Timer(0.2, signal.pthread_kill, (threading.get_ident(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        next(words)
    goes_on.set()
    *text, report = words
    thread.close()
    assert "".join(map(str, text)) == wanted and isinstance(report, TurnReport)


def test_words_of_an_answer_that_nobody_heard_out_are_not_the_next_ones(nano: Pipeline) -> None:
    thread = ChatThread(nano, SamplingSettings(temperature=0.0, max_tokens=20, ignore_eos=True))
    first = thread.enter("Tell me a story.")
    heard = [next(first)]
    answer, report = talk(thread, "What is the capital of France?")
    heard += first
    thread.close()
    assert isinstance(heard[-1], TurnReport) and heard[-1].finish_reason is FinishReason.CANCELLED
    said = ChatMessage("assistant", "".join(map(str, heard[:-1])))
    turns = [ChatMessage("user", "Tell me a story."), said, ChatMessage("user", "What is the capital of France?")]
    assert answer == nano.generate(turns, temperature=0.0, max_tokens=20, ignore_eos=True).text and report.tokens == 20


@pytest.mark.parametrize("error", [RuntimeError("boom"), TransferError("the disk is gone", fix="plug it in")])
def test_a_thread_that_dies_tells_whoever_waits_and_whoever_comes_later(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def broken() -> list[Event]:
        raise error

    own = Pipeline(dtype="float32", threads=1, predict="off", profile=False, max_context=512)
    with own, closing(ChatThread(own, SETTINGS, drafts=False)) as thread:
        talk(thread, "Hello")
        monkeypatch.setattr(own.engine, "step", broken)
        with pytest.raises(type(error)) as told:
            talk(thread, "Hello again")
        assert told.value is error and thread.failure is error
        with pytest.raises(type(error)):
            thread.enter("Is anybody there?")


def test_a_conversation_that_is_forgotten_begins_anew(nano: Pipeline) -> None:
    thread = ChatThread(nano, SETTINGS, system="Be brief.")
    first, report = talk(thread, "Hello")
    _, longer = talk(thread, "Hello")
    thread.forget()
    again, anew = talk(thread, "Hello")
    thread.close()
    assert again == first and anew.prompt_tokens == report.prompt_tokens < longer.prompt_tokens


@pytest.mark.parametrize("drafts", [True, False])
def test_an_answer_that_is_not_exact_says_how_much_of_it_was_substituted(drafts: bool) -> None:
    settings = SamplingSettings(temperature=0.0, max_tokens=6, ignore_eos=True)
    with Pipeline(threads=1, profile=False, max_context=256, fast_memory="12.5%", quality="drop") as own:
        with closing(ChatThread(own, settings, drafts=drafts)) as thread:
            for text in ("Hello", "Do you like dogs?"):
                counts = talk(thread, text)[1].substituted
                assert counts is not None and counts.uses == 5 * 24 * 4 and 0 < counts.share < 1
        assert own.quality is not None and not own.quality.desk.accounts._of
