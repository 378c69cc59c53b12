"""A link with faults, seeded: what a disk, a network mount or a bad cable may do. For tests and drills."""

import errno
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from steerpipe.core.ids import ExpertId
from steerpipe.transfer.link import Link, OverLink, Piece

ALWAYS = 1 << 30  # times


@dataclass(frozen=True, slots=True)
class Faults:
    """What goes wrong. Mappings say for which experts and how many times; `ALWAYS` never ends.

    Delays are random, so with two readers blocks arrive in another order than they were asked for.
    """

    delay_seconds: float = 0.0  # each read takes up to so much longer
    stall_share: float = 0.0  # of the reads; they take `stall_seconds` longer
    stall_seconds: float = 0.0
    fail_share: float = 0.0  # of the blocks; their first read fails
    fails: Mapping[ExpertId, int] = field(default_factory=dict)  # the read says EIO
    shortens: Mapping[ExpertId, int] = field(default_factory=dict)  # half of the bytes come, then EIO
    corrupts: Mapping[ExpertId, int] = field(default_factory=dict)  # one bit is wrong, and nobody says so


class FaultyLink(OverLink):
    """Another link with `faults`. Many threads; the same seed and order of reads give the same faults."""

    def __init__(self, below: Link, faults: Faults, seed: int = 0, sleep: Callable[[float], None] = time.sleep) -> None:
        super().__init__(below)
        self._faults = faults
        self._random = Random(seed)
        self._sleep = sleep
        self._lock = threading.Lock()
        self._seen: Counter[tuple[str, ExpertId]] = Counter()
        self._chosen: dict[ExpertId, bool] = {}  # whether fail_share picked a block

    @property
    def name(self) -> str:
        return f"{self.below.name}, with faults"

    def read(self, pieces: Sequence[Piece]) -> None:
        self._wait()
        for piece in pieces:
            if self._strikes("fails", piece) or self._picked(piece):
                raise OSError(errno.EIO, "a fault was planted")
        for piece in pieces:
            if self._strikes("shortens", piece):
                self._shorten(piece)
        self.below.read(pieces)
        for piece in pieces:
            if self._strikes("corrupts", piece):
                piece.into[self._random.randrange(len(piece.into))] ^= 1

    def _wait(self) -> None:
        with self._lock:
            seconds = self._random.random() * self._faults.delay_seconds
            if self._random.random() < self._faults.stall_share:
                seconds += self._faults.stall_seconds
        if seconds:
            self._sleep(seconds)

    def _strikes(self, kind: str, piece: Piece) -> bool:
        expert = piece.address.expert
        planned: Mapping[ExpertId, int] = getattr(self._faults, kind)
        with self._lock:
            if self._seen[kind, expert] >= planned.get(expert, 0):
                return False
            self._seen[kind, expert] += 1
            return True

    def _picked(self, piece: Piece) -> bool:
        """True once for each block that fail_share picks."""
        with self._lock:
            if piece.address.expert in self._chosen:
                return False
            picked = self._chosen[piece.address.expert] = self._random.random() < self._faults.fail_share
            return picked

    def _shorten(self, piece: Piece) -> None:
        half = len(piece.into) // 2
        piece.into[:half] = bytes(half)
        raise OSError(errno.EIO, "a short read was planted")
