"""The words that routers post."""

import threading

import pytest

from steerpipe.model.gpu.mailbox import Mailbox

NONE = 0xFFFFFFFF


def post(mailbox: Mailbox, order: int, stamp: int, experts: list[int]) -> None:
    for place, expert in enumerate(experts):
        mailbox.words[order, place] = stamp << 32 | expert & NONE


def test_experts_are_taken_once_each_and_ascending() -> None:
    mailbox = Mailbox(2, 4, pinned=False)
    post(mailbox, 1, 7, [5, 2, 5, -1])
    assert mailbox.take(1, 7, lambda: False) == [2, 5]


def test_a_layer_without_rows_asks_for_nothing() -> None:
    mailbox = Mailbox(1, 2, pinned=False)
    post(mailbox, 0, 1, [-1, -1])
    assert mailbox.take(0, 1, lambda: False) == []


def test_words_of_an_earlier_step_are_not_taken() -> None:
    mailbox = Mailbox(1, 2, pinned=False)
    post(mailbox, 0, 3, [1, 2])
    mailbox.words[0, 0] = 4 << 32 | 6  # half of step 4
    with pytest.raises(AssertionError, match="never posted"):
        mailbox.take(0, 4, lambda: True)


def test_a_post_that_comes_late_is_waited_for() -> None:
    mailbox = Mailbox(1, 2, pinned=False)
    asked = threading.Event()

    def device() -> None:
        asked.wait()
        post(mailbox, 0, 1, [4, 0])

    thread = threading.Thread(target=device)
    thread.start()

    def finished() -> bool:
        asked.set()
        return False

    assert mailbox.take(0, 1, finished) == [0, 4]
    thread.join()


def test_a_post_between_the_last_look_and_the_end_of_the_step_is_found() -> None:
    mailbox = Mailbox(1, 1, pinned=False)

    def finished() -> bool:
        post(mailbox, 0, 9, [3])
        return True

    assert mailbox.take(0, 9, finished) == [3]


def test_a_failed_device_ends_the_wait() -> None:
    def finished() -> bool:
        raise RuntimeError("an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal"):
        Mailbox(1, 1, pinned=False).take(0, 1, finished)
