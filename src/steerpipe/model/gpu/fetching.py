"""What a tap, the routers and `fetch` share in the graph of one row that sends for its guesses by itself (ADR 0008).

Legend: L MoE layers, k experts per row, n experts that are named, N guesses of a layer.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from steerpipe.core.blocks import GUESSES, BlockForm, DirectReads, GuessLanding, Near
from steerpipe.kernels.fetch import MULTIPROCESSORS, PROGRAMS, Fetched, chunk_for, fetch, stop
from steerpipe.kernels.foretell import Sending
from steerpipe.kernels.router import Guessed
from steerpipe.model.gpu.mailbox import Mailbox, likely

NAMED = 8
# From one router to the next 2 to 3 MB come (an H200 at Qwen1.5-MoE's shape; other links and shapes were not measured):
# behind a larger block a second one would not begin, and its slot would be missing in the layers to come.
SECOND_BYTES = 2 << 20
PRIORITY = -2  # of its stream: few programs that the link works for


def guesses_within(block_bytes: int) -> int:
    """How many blocks of that size a tap sends for, but for the last of a step."""
    return GUESSES if block_bytes <= SECOND_BYTES else 1


class Fetching:
    """Buffers that stay where they are, and the stream of the copies. `mail` has a place per tap."""

    def __init__(
        self, slots: GuessLanding, tables: Sequence[Tensor], forms: Sequence[BlockForm], layers: Sequence[int],
        top_k: int, stamp: Tensor,
    ) -> None:  # fmt: skip
        """`tables` [E] and `forms` of the layers, in their order; `stamp` [1] of the step."""
        device, count = stamp.device, len(layers)
        self.slots, self.stamp = slots, stamp
        self._tables, self._layers = tables, layers
        self._chunks = [chunk_for(form) for form in forms]
        slots.tags.fill_(-1)  # of graphs before, whose stamps will come again
        words = torch.zeros(4 + NAMED, dtype=torch.int64, device=device)
        self._sighted, self._seen, self._entries = words[:1], words[2 : 2 + GUESSES], words[4 : 4 + NAMED]
        self.since = torch.zeros(top_k, dtype=torch.int64, device=device)
        self.running = torch.zeros(MULTIPROCESSORS, dtype=torch.int32, device=device)
        self._progress = torch.zeros(count, GUESSES, PROGRAMS, dtype=torch.int64, device=device)
        self._looked = torch.zeros(count, 2, dtype=torch.int64, device=device)  # one is used: aligned to 16 bytes
        self._arrived = torch.zeros(count, 2, dtype=torch.int64, device=device)
        self.mail = Mailbox(count, GUESSES, pinned=device.type == "cuda")
        self.said: torch.cuda.Event | None = None  # by the last tap that was queued
        self._stream = torch.cuda.Stream(device, priority=PRIORITY) if device.type == "cuda" else None

    def guessed(self, order: int) -> Guessed:
        """For the router of that layer."""
        slots = self.slots
        return Guessed(self._words(order), slots.ring, slots.tail, self._sighted, self._seen, self.since)

    def sending(self, order: int) -> Sending:
        """For the tap behind that layer's router. Behind the last one it sends for the first layer of the next step."""
        slots, (later, target) = self.slots, self._after(order)
        table, tags = self._tables[target], slots.tags[target]
        most = GUESSES if later else guesses_within(slots.block_bytes(self._layers[target]))
        return Sending(table, slots.ring, self._sighted, slots.head, tags, self._entries, later=later, most=most)

    def fetch(self, order: int) -> None:
        """Behind what is queued on the current stream, and what that layer's tap has said."""
        if self._stream is None:
            self._fetch(order)
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        if self.said is not None:
            self._stream.wait_event(self.said)
        with torch.cuda.stream(self._stream):
            self._fetch(order)

    def join(self) -> None:
        """The end of a step, whose logits are queued."""
        stop(self._looked[0], self.stamp)
        self.said = None
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    def settle(
        self, order: int, stamp: int, reads: DirectReads, words: Mailbox, finished: Callable[[], bool]
    ) -> None:  # fmt: skip
        """The host's part, when that layer of step `stamp` was followed. `words`: of the tap that speaks in it."""
        last = len(self._layers) - 1

        def near() -> Near:  # the tap may speak later than this: then nobody is known to be wanted in the next layer
            following = self._layers[self._after(order)[1]]
            return {following: likely(words.look(order, stamp) or ()), self._layers[order]: reads.routed}

        if order == 0:
            self.slots.settle_owed(reads.sent, near)
        else:  # it stopped when the layer's router looked
            sent = self.mail.take_sent(order - 1, stamp, finished)
            self.slots.settle(self._layers[order], sent, reads.sent, near)
        if order == last:
            self.slots.owe(self._layers[0], lambda: self.mail.take_sent(last, stamp, finished))

    def _fetch(self, order: int) -> None:
        later, target = self._after(order)
        fetch(
            self._words(target), ring=self.slots.ring, stamp=self.stamp, arrived=self._arrived[order],
            size_bytes=self.slots.block_bytes(self._layers[target]), chunk_bytes=self._chunks[target],
            mail=self.mail.words[order], running=self.running, later=later,
        )  # fmt: skip

    def _after(self, order: int) -> tuple[int, int]:
        """How many steps later the next layer comes, and which it is."""
        return divmod(order + 1, len(self._layers))

    def _words(self, order: int) -> Fetched:
        pinned = self.slots.pinned(self._layers[order])
        return Fetched(self.slots.tags[order], self._progress[order], self._looked[order], pinned)
