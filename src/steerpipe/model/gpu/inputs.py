"""The integers of captured steps: the host writes them into pinned memory, and every graph begins by copying them.

A copy of its own before each replay would cost the host more than writing them does, while the device has nothing else
to do.
"""

import torch
from torch import Tensor

from steerpipe.model.gpu.rows import Packing, Pass, room_for


class StepInputs:
    """Of one class of steps (`rows` rows). One thread."""

    def __init__(self, rows: int, reach: int, device: torch.device) -> None:
        """`reach`: positions that a sequence can have."""
        self._rows = rows
        words, cuda = Packing.of_size(rows, room_for(reach), lanes=rows).words, device.type == "cuda"
        self._here = torch.zeros(words, dtype=torch.int64, device=device)
        self._staging = torch.zeros(words, dtype=torch.int64, pin_memory=cuda)
        self._view = self._staging.numpy()
        self._packings: dict[int, Packing] = {}  # by room
        self._read = torch.cuda.Event() if cuda else None
        self._unread = False  # what was queued last may still read

    @property
    def stamp(self) -> Tensor:
        """[1], on the device."""
        return self._here[:1]

    def views(self, room: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """stamp, tokens, positions, turns, blocks, on the device."""
        return self._packing(room).views(self._here)

    def write(self, rows: Pass, room: int, stamp: int) -> None:
        """For the next replay. Whoever queued the one before knows that it has begun, or has said `read_later`."""
        self._wait()
        self._packing(room).write(rows, stamp, self._view)

    def write_nobody(self, room: int) -> None:
        """A step without any real row: it writes no key and asks for no expert; of stamp 0, for which nobody waits."""
        self._wait()
        self._view.fill(0)
        self._packing(room).views(self._staging)[2].fill_(-1)

    def queue(self, room: int) -> None:
        """The copy, on the current stream."""
        words = self._packing(room).words
        self._here[:words].copy_(self._staging[:words], non_blocking=True)

    def read_later(self) -> None:
        """What is queued on the current stream reads them, and nobody is told when it has."""
        if self._read is not None:
            self._read.record()
            self._unread = True

    def _wait(self) -> None:
        if self._unread and self._read is not None:
            self._read.synchronize()
            self._unread = False

    def _packing(self, room: int) -> Packing:
        if room not in self._packings:
            self._packings[room] = Packing.of_size(self._rows, room, lanes=self._rows)
        return self._packings[room]
