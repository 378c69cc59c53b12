"""What a block passes through on the virtual clock: a serial link, then a reader that decodes it. Pure."""

import math
from dataclasses import dataclass

from steerpipe.core.ids import ExpertId
from steerpipe.transfer.machine import Decoding
from steerpipe.transfer.queue import Chunk, Outcome, Reason, TransferQueue


@dataclass(slots=True)
class Traffic:
    """What a link has done so far."""

    busy_seconds: float = 0.0
    demand_bytes: int = 0
    guess_bytes: int = 0


class Lane:
    """One serial link. `ends` is when its chunk lands; inf while it is idle."""

    def __init__(
        self, bytes_per_second: float, latency_seconds: float, chunk_bytes: int, block_bytes: int,
        guess_bytes_per_second: float | None = None,
    ) -> None:  # fmt: skip
        self.queue = TransferQueue()
        self.traffic = Traffic()
        self.ends = math.inf
        self._rate, self._guess_rate = bytes_per_second, guess_bytes_per_second or bytes_per_second
        self._latency = latency_seconds
        self._chunk_bytes, self._block_bytes = chunk_bytes, block_bytes
        self._chunk: Chunk | None = None

    @property
    def idle(self) -> bool:
        return self._chunk is None

    def start(self, now: float, *, guesses: bool = True) -> bool:
        """Takes up the next chunk at `now`, if there is one. A demand moves in one piece: nothing can outrank it.

        `guesses`: whether they may move.
        """
        reason = self.queue.next_reason()
        if reason is None or (reason is not Reason.DEMAND and not guesses):
            return False
        self._chunk = chunk = self.queue.take(self._block_bytes if reason is Reason.DEMAND else self._chunk_bytes)
        assert chunk is not None, "the queue announced a transfer"
        rate = self._rate if reason is Reason.DEMAND else self._guess_rate
        seconds = chunk.length / rate + (0.0 if chunk.offset else self._latency)
        self.ends = now + seconds
        self.traffic.busy_seconds += seconds
        if reason is Reason.DEMAND:
            self.traffic.demand_bytes += chunk.length
        else:
            self.traffic.guess_bytes += chunk.length
        return True

    def land(self) -> tuple[ExpertId, Outcome]:
        """The chunk has arrived: call it when the clock stands at `ends`."""
        assert self._chunk is not None, "nothing is in flight"
        chunk, self._chunk, self.ends = self._chunk, None, math.inf
        return chunk.expert, self.queue.advance(chunk.expert, chunk.length)


class Decoder:
    """Blocks that are whole and not compute-ready yet, each on the reader that read it. `ends` as in a Lane."""

    def __init__(self, figures: Decoding) -> None:
        self._figures = figures
        self._ends: dict[ExpertId, float] = {}  # all take equally long: the first that began is the first that ends

    def __contains__(self, expert: ExpertId) -> bool:
        return expert in self._ends

    @property
    def ends(self) -> float:
        return min(self._ends.values(), default=math.inf)

    @property
    def has_room(self) -> bool:
        """Whether a reader is free to read."""
        return len(self._ends) < self._figures.readers

    def begin(self, expert: ExpertId, now: float) -> None:
        assert self.has_room, "nobody is there to decode"
        self._ends[expert] = now + self._figures.seconds

    def land(self) -> ExpertId:
        """The first that is done: call it when the clock stands at `ends`."""
        expert = next(iter(self._ends))
        del self._ends[expert]
        return expert
