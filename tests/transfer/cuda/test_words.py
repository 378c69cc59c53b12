"""Words that go together: in their order, by one call of the driver, whatever their sign and number."""

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from steerpipe.core.errors import TransferError
from steerpipe.transfer.cuda.copier import HostCopier, PacedCopier
from steerpipe.transfer.cuda.driver import WordBatch

STREAM = 77


class Batches:
    """As the driver's call: reads operations of 48 bytes."""

    def __init__(self, status: int = 0) -> None:
        self.calls: list[list[tuple[int, ...]]] = []
        self._status = status

    def __call__(self, stream: int, count: int, address: int, flags: int) -> int:
        assert (stream, flags) == (STREAM, 0)
        words = (ctypes.c_uint64 * (6 * count)).from_address(address)
        self.calls.append([tuple(words[6 * each : 6 * each + 6]) for each in range(count)])
        return self._status


def batch(calls: Batches) -> WordBatch:
    def check(status: int) -> None:
        raise TransferError(f"status {status}", fix="none")

    driver: Any = SimpleNamespace(write_batch=calls, check=check)
    return WordBatch(driver)


@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 200])
def test_words_are_written_in_their_order_by_few_calls(count: int) -> None:
    calls = Batches()
    batch(calls).write(STREAM, [(4096 + 8 * each, each) for each in range(count)])
    assert [len(call) for call in calls.calls] == [64] * (count // 64) + [count % 64] * (count % 64 > 0)
    assert [word for call in calls.calls for word in call] == [
        (5, 4096 + 8 * each, each, 0, 0, 0) for each in range(count)
    ]


def test_a_value_may_be_negative_or_have_all_its_bits() -> None:
    calls = Batches()
    batch(calls).write(STREAM, [(8, -1), (16, -(1 << 63)), (24, (1 << 64) - 1)])
    assert [word[2] for word in calls.calls[0]] == [(1 << 64) - 1, 1 << 63, (1 << 64) - 1]


def test_what_the_driver_refuses_is_an_error() -> None:
    with pytest.raises(TransferError, match="status 1"):
        batch(Batches(status=1)).write(STREAM, [(8, 1)])


def test_a_host_writes_them_one_after_the_other_also_when_it_is_paced() -> None:
    memory = (ctypes.c_int64 * 3)()
    first = ctypes.addressof(memory)
    words = [(first, 5), (first + 8, -6), (first, 7), (first + 16, 8)]
    for copier in (HostCopier(), PacedCopier(HostCopier(), 1e9)):
        memory[:] = [0, 0, 0]
        copier.write_many(words)
        assert list(memory) == [7, -6, 8]
