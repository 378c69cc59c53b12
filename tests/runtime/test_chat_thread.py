"""A conversation on a thread: the answers are those without drafts, and a stop ends one answer only."""

import time
from collections.abc import Iterator

import pytest

from steerpipe.core.errors import RequestError
from steerpipe.core.events import FinishReason
from steerpipe.core.sampling import SamplingSettings
from steerpipe.engine.tokenizer import ChatMessage
from steerpipe.intake.difference import edit_between
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
