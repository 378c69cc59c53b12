"""Reads that are tried again, and blocks that are checked: a link plus patience. Holds no lock while it reads."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from steerpipe.core.errors import PackError, TransferError
from steerpipe.store.reader import Pack
from steerpipe.transfer.counters import Tally
from steerpipe.transfer.link import BlockAddress, Link, LinkMeter, Piece
from steerpipe.transfer.slabs import Slab

RETRIES = 2
_CHECK_DISK = "check the disk (dmesg, smartctl), then ask again; if it is gone, copy the pack to another disk"


class Counted(Protocol):
    """Where retries are counted: a ladder, for instance."""

    @property
    def lock(self) -> AbstractContextManager[object]: ...

    @property
    def tally(self) -> Tally: ...


class Fetcher:
    """What reader threads share. `meter` measures the link, whatever tier answers."""

    def __init__(self, pack: Pack, link: Link, ladder: Counted) -> None:
        self.link = link
        self.meter = LinkMeter()
        self._pack = pack
        self._ladder = ladder

    def read(self, run: Sequence[Piece]) -> list[TransferError | None]:
        """One result for each piece of a run: None if its bytes are there. Blocks.

        A run that fails is read again piece by piece, so that one bad block does not take its neighbours with it.
        """
        try:
            self._read(run)
        except (OSError, TransferError) as problem:
            if len(run) > 1:
                self._count_retry()
                return [self._read_patiently(piece, RETRIES) for piece in run]
            if isinstance(problem, TransferError):
                return [problem]
            self._count_retry()
            return [self._read_patiently(run[0], RETRIES - 1)]
        return [None] * len(run)

    def fetch(self, address: BlockAddress, slab: Slab) -> None:
        """A whole block, checked, into the slab. Blocks; TransferError if it cannot be had."""
        error = self._read_patiently(Piece(address, 0, slab.view[: address.size_bytes]), RETRIES)
        if error is not None:
            raise error
        self.check(address, slab)

    def check(self, address: BlockAddress, slab: Slab) -> None:
        """Raises TransferError unless the block in the slab is the one that was packed. Reads it again once."""
        if not self._pack.verify or self._mismatch(address, slab) is None:
            return
        with self._ladder.lock:
            self._ladder.tally.rereads += 1
        self.link.forget(address)
        error = self._read_patiently(Piece(address, 0, slab.view[: address.size_bytes]), RETRIES)
        if error is not None:
            raise error
        mismatch = self._mismatch(address, slab)
        if mismatch is not None:
            raise TransferError(f"{mismatch.what}, twice in a row", fix=mismatch.fix) from None

    def _mismatch(self, address: BlockAddress, slab: Slab) -> PackError | None:
        try:
            self._pack.check_block(*address.expert, slab.view[: address.size_bytes])
        except PackError as mismatch:
            return mismatch
        return None

    def _read(self, run: Sequence[Piece]) -> None:
        with self.meter.reading(sum(len(piece.into) for piece in run)):
            self.link.read(run)

    def _read_patiently(self, piece: Piece, retries: int) -> TransferError | None:
        """Tries once, and again so many times if it fails in a way that may pass."""
        while True:
            try:
                self._read([piece])
            except TransferError as problem:
                return problem
            except OSError as problem:
                if not retries:
                    layer, expert = piece.address.expert
                    return TransferError(
                        f"expert {expert} of layer {layer} could not be read from {self._pack.expert_file}, "
                        f"{RETRIES + 1} times in a row: {problem}",
                        fix=_CHECK_DISK,
                    )
            else:
                return None
            retries -= 1
            self._count_retry()

    def _count_retry(self) -> None:
        with self._ladder.lock:
            self._ladder.tally.retries += 1
