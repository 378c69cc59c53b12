"""Reads of the pack's file: direct, continued when short, buffered where the file system wants it."""

import errno
import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from steerpipe.core.errors import TransferError
from steerpipe.core.ids import ExpertId
from steerpipe.transfer.disk import DiskLink, adjacent
from steerpipe.transfer.link import BlockAddress, Piece

PAGE = 4096


def address(index: int, pages: int = 2) -> BlockAddress:
    return BlockAddress(ExpertId(0, index), index * pages * PAGE, pages * PAGE)


def pieces(*indices: int) -> list[Piece]:
    return [Piece(address(index), 0, memoryview(mmap.mmap(-1, 2 * PAGE))) for index in indices]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "blocks"
    path.write_bytes(os.urandom(16 * PAGE))
    return path


def content(file: Path, piece: Piece) -> bytes:
    return file.read_bytes()[piece.offset : piece.end]


def check(file: Path, wanted: Sequence[Piece]) -> None:
    for piece in wanted:
        assert bytes(piece.into) == content(file, piece)


class Calls:
    """os.preadv, watched and bent."""

    def __init__(self, bend: Callable[[int, list[memoryview], int], list[memoryview]] | None = None) -> None:
        self.made: list[tuple[int, int, int]] = []  # descriptor, buffers, offset
        self._bend = bend

    def __call__(self, descriptor: int, views: list[memoryview], offset: int) -> int:
        self.made.append((descriptor, len(views), offset))
        return os.preadv(descriptor, self._bend(len(self.made), views, offset) if self._bend else views, offset)


def test_neighbours_are_one_read_and_others_are_not(file: Path) -> None:
    calls = Calls()
    link = DiskLink(file, preadv=calls)
    wanted = pieces(1, 2, 3, 6, 0)
    link.read(wanted)
    check(file, wanted)
    assert [(buffers, offset) for _, buffers, offset in calls.made] == [(3, 2 * PAGE), (1, 12 * PAGE), (1, 0)]
    assert link.disk.snapshot().reads == 3
    assert link.disk.snapshot().read_bytes == 10 * PAGE
    link.close()


def test_a_short_read_is_continued_where_it_ended(file: Path) -> None:
    calls = Calls(lambda call, views, _: [views[0][:PAGE]] if call < 3 else views)
    link = DiskLink(file, preadv=calls)
    wanted = pieces(1, 2)
    link.read(wanted)
    check(file, wanted)
    assert [offset for _, _, offset in calls.made] == [2 * PAGE, 3 * PAGE, 4 * PAGE]
    link.close()


def test_a_short_read_that_ends_inside_a_page_is_continued_by_a_buffered_one(file: Path) -> None:
    def bend(call: int, views: list[memoryview], offset: int) -> list[memoryview]:
        if offset % PAGE and call == 2:
            raise OSError(errno.EINVAL, "not aligned")
        return [views[0][:100]] if call == 1 else views

    link = DiskLink(file, preadv=Calls(bend), direct=False)
    link._direct = link._buffered  # a direct descriptor refuses 100 bytes; this one plays its part
    wanted = pieces(1)
    link.read(wanted)
    check(file, wanted)
    assert "direct" in link.name  # an odd place is no reason to give direct reads up
    link._direct = None
    link.close()


def test_a_file_system_that_refuses_aligned_direct_reads_is_read_buffered_from_then_on(file: Path) -> None:
    def bend(call: int, views: list[memoryview], offset: int) -> list[memoryview]:
        if call == 1:
            raise OSError(errno.EINVAL, "no direct reads here")
        return views

    calls = Calls(bend)
    link = DiskLink(file, preadv=calls)
    link._direct = link._direct or link._buffered  # where even opening was refused
    for _ in range(2):
        wanted = pieces(0, 1)
        link.read(wanted)
        check(file, wanted)
    assert "buffered" in link.name
    assert {descriptor for descriptor, _, _ in calls.made[1:]} == {link._buffered}
    link.forget(address(0))
    link.close()


def test_a_file_system_that_refuses_to_open_direct_is_read_buffered(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refuse(path: Path, flags: int) -> int:
        if flags & getattr(os, "O_DIRECT", 0):
            raise OSError(errno.EINVAL, "no direct reads here")
        return real(path, flags)

    monkeypatch.setattr(os, "open", refuse)
    link = DiskLink(file)
    assert link.name == "disk (buffered reads)"
    wanted = pieces(3)
    link.read(wanted)
    check(file, wanted)
    link.close()


def test_a_file_that_became_shorter_is_an_error_that_no_retry_cures(file: Path) -> None:
    link = DiskLink(file)
    os.truncate(file, 5 * PAGE + 100)
    with pytest.raises(TransferError, match="became shorter"):
        link.read(pieces(2))
    wanted = pieces(0, 1)
    link.read(wanted)
    check(file, wanted)
    link.close()


def test_a_removed_file_can_still_be_read(file: Path) -> None:
    link = DiskLink(file)
    kept = file.read_bytes()
    file.unlink()
    (wanted,) = pieces(4)
    link.read([wanted])
    assert bytes(wanted.into) == kept[wanted.offset : wanted.end]
    link.close()


def test_a_file_that_is_not_there_is_an_error_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(TransferError, match="nowhere"):
        DiskLink(tmp_path / "nowhere")


def test_what_the_disk_says_is_passed_on(file: Path) -> None:
    def bend(call: int, views: list[memoryview], offset: int) -> list[memoryview]:
        raise OSError(errno.EIO, "broken")

    link = DiskLink(file, preadv=Calls(bend))
    with pytest.raises(OSError, match="broken"):
        link.read(pieces(0))
    assert link.disk.snapshot().read_bytes == 0
    link.close()


def test_closing_gives_every_descriptor_back_once(file: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    link = DiskLink(file)
    link.close()
    link.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_runs_end_where_the_next_piece_lies_elsewhere() -> None:
    wanted = pieces(0, 1, 3, 4, 2)
    assert [[p.address.expert.expert for p in run] for run in adjacent(wanted)] == [[0, 1], [3, 4], [2]]
    assert list(adjacent([])) == []
