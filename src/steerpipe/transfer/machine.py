"""A machine in figures: what the simulator runs on. Pure."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from steerpipe.core.errors import ConfigError
from steerpipe.core.geometry import SMALLEST_SLOTS

T = TypeVar("T")

_SECONDS = (
    "layer_seconds", "expert_seconds", "ask_seconds", "beside_seconds", "latency_seconds", "end_seconds",
    "between_seconds",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Disk:
    """A tier below the RAM: every block lies on the disk, `ram_slots` of them in RAM as well."""

    bytes_per_second: float
    ram_slots: int
    latency_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Decoding:
    """The second stage: who has read a block checks it and makes it compute-ready; then it lands.

    A reader decodes what it has read before it reads on: with one the link waits meanwhile, with two one reads while
    the other decodes.
    """

    seconds: float  # per block
    readers: int = 1


@dataclass(frozen=True, slots=True)
class Looking:
    """What looking ahead costs, each figure measured by itself. As it stands nothing: a guess moves as a demand does.

    A tap is serial: a layer's demands begin `tap_seconds` after its router's decision, and no guess moves meanwhile.
    """

    tap_seconds: float = 0.0  # of a layer, while somebody predicts and does not rest
    delay_seconds: float = 0.0  # from a router's decision until what is foretold from it can be sent for
    most: int | None = None  # blocks that one forecast sends for; None: as many as it names
    bytes_per_second: float | None = None  # of a guess; None: the link's
    # A router's decision and a token's end stop guesses until the next forecast is there; what is left of one that is
    # wanted is asked for like a block that is missing.
    stops: bool = False
    # Added to a tap where one routed expert is missing, two ...; of more than are named: the last.
    tap_more: tuple[float, ...] = ()

    def tap(self, missing: int) -> float:
        """Seconds of a layer in which so many routed experts are not there."""
        more = self.tap_more[:missing]
        return max(0.0, self.tap_seconds + (more[-1] if more else 0.0))

    def sends(self, wanted: Sequence[T], there: Sequence[bool]) -> Iterator[T]:
        """What is there, to be spared, and the first `most` that are not."""
        sent = 0
        for each, here in zip(wanted, there, strict=True):
            if here or self.most is None or sent < self.most:
                sent += not here
                yield each


@dataclass(frozen=True, slots=True)
class Machine:
    """Fast memory of `slots` blocks, filled over one link from RAM (or, without RAM in between, from the disk).

    A layer takes `layer_seconds` up to its router's decision, then `beside_seconds` while what is missing is on its
    way, and `expert_seconds` for each routed expert; an expert is computed while others are on their way. With both 0
    a layer costs Tc = `layer_seconds` and its stall, the arithmetic of docs and tables. Without `decoding` a block can
    be computed on when its last byte is there. After its last layer a token takes `end_seconds` (its logits), then
    a host `between_seconds` until the next one begins.
    """

    slots: int
    block_bytes: int
    link_bytes_per_second: float
    layer_seconds: float
    expert_seconds: float = 0.0
    latency_seconds: float = 0.0  # before the first byte of each block
    chunk_bytes: int = 1 << 20  # what a guess moves between two looks at the queue
    disk: Disk | None = None
    ask_seconds: float = 0.0  # of a layer that misses, before its first block moves: victims, wake-ups
    decoding: Decoding | None = None
    beside_seconds: float = 0.0  # of a layer after its router's decision, on what needs no routed expert: a shared one
    end_seconds: float = 0.0
    between_seconds: float = 0.0
    looking: Looking = Looking()
    cpu_seconds: float | None = None  # of a block that a CPU beside the fast memory computes where it lies in RAM

    def __post_init__(self) -> None:
        for what, right, must in self._rules():
            if not right:
                raise ConfigError(f"{what}: no such machine", fix=f"{what.split(' = ')[0]} must be {must}")

    def _rules(self) -> Iterator[tuple[str, bool, str]]:
        for name in ("block_bytes", "link_bytes_per_second", "chunk_bytes"):
            yield f"{name} = {getattr(self, name)}", 0 < getattr(self, name) < math.inf, "above 0 and finite"
        looking, seconds = self.looking, {name: getattr(self, name) for name in _SECONDS}
        seconds |= {"tap_seconds": looking.tap_seconds, "delay_seconds": looking.delay_seconds}
        for name, value in (seconds | {"cpu_seconds": self.cpu_seconds or 0.0}).items():
            yield f"{name} = {value}", 0 <= value < math.inf, "0 or more and finite"
        yield f"tap_more = {looking.tap_more}", all(map(math.isfinite, looking.tap_more)), "finite"
        yield f"most guesses = {looking.most}", looking.most is None or looking.most >= 1, "1 or more"
        rate = looking.bytes_per_second
        yield f"rate of guesses = {rate}", rate is None or 0 < rate < math.inf, "above 0 and finite"
        least = f"{SMALLEST_SLOTS} or more"
        yield f"slots = {self.slots}", self.slots >= SMALLEST_SLOTS, least
        if self.decoding is not None:
            yield f"decoding seconds = {self.decoding.seconds}", 0 <= self.decoding.seconds < math.inf, "0 or more"
            yield f"readers = {self.decoding.readers}", self.decoding.readers >= 1, "1 or more"
        if self.disk is not None:
            yield f"ram_slots = {self.disk.ram_slots}", self.disk.ram_slots >= SMALLEST_SLOTS, least
            yield f"disk rate = {self.disk.bytes_per_second}", self.disk.bytes_per_second > 0, "above 0"
            yield f"disk latency = {self.disk.latency_seconds}", self.disk.latency_seconds >= 0, "0 or more"

    @property
    def block_seconds(self) -> float:
        """Tx: one block over the link."""
        return self.latency_seconds + self.block_bytes / self.link_bytes_per_second


def slots_of_share(share: float, experts: int) -> int:
    """How many slots hold that share of all `experts` (1.0: all of them); never fewer than a table needs."""
    if not 0 < share <= 1:
        raise ConfigError(f"a residency of {share}", fix="give a share above 0 and up to 1, such as 0.25")
    return max(SMALLEST_SLOTS, int(share * experts + 1e-9))
