"""Reader threads: take, read, check, decode, say so. The lock is held for bookkeeping, never for work."""

import threading
import time

import torch

from steerpipe.core.errors import TransferError
from steerpipe.store.reader import Pack
from steerpipe.store.slots import SlotArena
from steerpipe.transfer.disk import adjacent
from steerpipe.transfer.fetch import Fetcher
from steerpipe.transfer.ladder import Ladder
from steerpipe.transfer.link import BlockAddress, Piece
from steerpipe.transfer.promotion import Promotion
from steerpipe.transfer.slabs import Slab


class Readers:
    """`count` daemon threads that serve a ladder until `close`. They know nothing of the source that owns them.

    A reader decodes what it has read: with two, one reads while the other decodes (blocks of 4.5 MiB to float32 on two
    cores: 2.9 GB/s where one reader gave 1.9 and a separate decoding thread 2.4).

    Errors of a block travel to the leases that wait for it; anything else that goes wrong stops the ladder, and every
    lease says so.
    """

    def __init__(
        self, ladder: Ladder, fetcher: Fetcher, pack: Pack, arena: SlotArena, dtype: torch.dtype,
        device: torch.device, count: int = 1, promotion: Promotion | None = None,
    ) -> None:  # fmt: skip
        self._ladder = ladder
        self._fetcher = fetcher
        self._pack = pack
        self._arena = arena
        self._dtype = dtype
        self._device = device
        self._promotion = promotion
        self._threads = [
            threading.Thread(target=self._run, name=f"steerpipe-reader-{number}", daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Ends the threads after the block they are at, and closes the link. Waits for them. Twice is once."""
        with self._ladder.lock:
            self._ladder.closed = True
            self._ladder.work.notify_all()
            self._ladder.changed.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():  # a collected source may close itself on any thread
                thread.join()
        self._fetcher.link.close()

    def _run(self) -> None:
        try:
            while (pieces := self._wait_for_work()) is not None:
                for run in adjacent(pieces):
                    self._serve(run)
                if not pieces and self._promotion is not None:
                    self._promotion.bring_next()
        except BaseException as problem:  # noqa: BLE001 (every lease raises it again)
            with self._ladder.lock:
                self._ladder.crash = problem
                self._ladder.changed.notify_all()

    def _wait_for_work(self) -> list[Piece] | None:
        """Empty: nothing is due but promotions. None: the ladder is closed."""
        with self._ladder.lock:
            while not self._ladder.closed:
                if pieces := self._ladder.next_visit():
                    return pieces
                if self._promotion is not None and self._promotion.pending:
                    return []
                self._ladder.work.wait()
        return None

    def _serve(self, run: list[Piece]) -> None:
        begin = time.perf_counter()
        errors = self._fetcher.read(run)
        self._note(run, begin)
        for piece, error in zip(run, errors, strict=True):
            with self._ladder.lock:
                if error is not None:
                    self._ladder.failed(piece, error)
                    continue
                slab = self._ladder.arrived(piece)
            if slab is not None:
                self._land(piece.address, slab)

    def _note(self, run: list[Piece], begin: float) -> None:
        if (timeline := self._ladder.timeline) is not None:
            named = ", ".join(f"{piece.address.expert.layer}:{piece.address.expert.expert}" for piece in run)
            timeline.span("stream 1: link", f"read {named}", begin, time.perf_counter())

    def _land(self, address: BlockAddress, slab: Slab) -> None:
        """The block is whole: from slab to slot."""
        begin = time.perf_counter()
        try:
            self._fetcher.check(address, slab)
        except TransferError as error:
            with self._ladder.lock:
                self._ladder.spoiled(address.expert, error)
            return
        self._fetcher.link.keep(address, slab.view)
        self._decode(address, slab)
        with self._ladder.lock:
            now = time.perf_counter()
            self._ladder.tally.decode_seconds += now - begin
            if self._ladder.timeline is not None:
                self._ladder.timeline.span(
                    "stream 1: decode", f"{address.expert.layer}:{address.expert.expert}", begin, now
                )
            self._ladder.ready(address.expert)

    def _decode(self, address: BlockAddress, slab: Slab) -> None:
        layer = address.expert.layer
        slot = self._ladder.table.slot(address.expert)  # LOADING: it cannot change
        block = slab.tensor[: address.size_bytes].to(self._device)
        self._pack.decode_block(layer, block, self._dtype, out=self._arena.weights(slot, self._pack.layout(layer)))
