"""The arithmetic of covering a transfer: how long a block takes on each link, and how many tokens that is.

Pure: no torch, no clock, no measurement; rates in bytes per second, times in seconds. Floors are what physics allows,
not what a run will show: every byte moves once at the link's full rate, and nothing else costs anything.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

# LFRU on the recorded routing of nano (24 layers, 60 experts, top-4): share of experts in slots, share of hits.
# benchmarks/notes/2026-11-15-hit-rates-nano.md
_RECORDED_HITS = ((0.0, 0.0), (0.125, 0.339), (0.25, 0.527), (0.4, 0.697), (0.5, 0.782), (0.75, 0.932), (1.0, 1.0))

DISK = "disk"


@dataclass(frozen=True, slots=True)
class Link:
    """What brings a block from one place. `share`: of the experts that lie there, nearer places left out."""

    name: str
    bytes_per_second: float
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class Cover:
    """One block over one link. `tokens`: typed, or generated, in that time; `least` to `most` in whole ones."""

    link: str
    bytes_per_second: float
    seconds: float
    tokens: float

    @property
    def least(self) -> int:
        """The nearest whole number of tokens."""
        return round(self.tokens)

    @property
    def most(self) -> int:
        """With one to spare."""
        return self.least + 1


@dataclass(frozen=True, slots=True)
class Geometry:
    """The experts of a model, and what a step reads besides them. `slot_bytes`: of one that can be computed with."""

    layers: int
    experts: int  # per layer
    top_k: int
    block_bytes: int
    slot_bytes: int
    dense_bytes: int

    @property
    def routed(self) -> int:
        """Experts that one token uses."""
        return self.layers * self.top_k


@dataclass(frozen=True, slots=True)
class Floor:
    """The least time of a step: waiting for every missing block (`demand`), or for none but the link (`hidden`)."""

    what: str
    hit_rate: float
    demand_seconds: float
    hidden_seconds: float
    shared_seconds: float | None = None  # waiting, while a CPU computes its share of the missing where they lie


def cover(block_bytes: int, link: Link, tokens_per_second: float) -> Cover:
    """2 GB over 31.5 GB/s are 63.5 ms; at 30 tokens per second 1.9 tokens cover that."""
    assert block_bytes > 0 and link.bytes_per_second > 0 and tokens_per_second > 0, "amounts and rates are positive"
    seconds = block_bytes / link.bytes_per_second
    return Cover(link.name, link.bytes_per_second, seconds, seconds * tokens_per_second)


def expected_hits(resident_share: float) -> float:
    """What LFRU found in slots on recorded routing at this residency, by straight lines between six measurements."""
    shares = [share for share, _ in _RECORDED_HITS]
    right = min(max(1, bisect_left(shares, resident_share)), len(shares) - 1)
    (low, low_hits), (high, high_hits) = _RECORDED_HITS[right - 1], _RECORDED_HITS[right]
    return low_hits + (high_hits - low_hits) * (resident_share - low) / (high - low)


def block_seconds(block_bytes: int, links: Sequence[Link]) -> float:
    """Of a missing block, on average over where it may lie; 0 where nothing is ever missing."""
    return sum(link.share * block_bytes / link.bytes_per_second for link in links)


def shared_seconds(block_bytes: int, links: Sequence[Link], cpu: Link) -> float:
    """As `block_seconds`, while a CPU computes what lies in `cpu`'s place: both end at once, or none is left there."""
    every = block_seconds(block_bytes, links)
    near = next((link for link in links if link.name == cpu.name), None)
    if near is None:
        return every
    saved = block_bytes / near.bytes_per_second  # of the link, by a block that the CPU takes
    taken = min(near.share, every / (saved + block_bytes / cpu.bytes_per_second))
    return every - taken * saved


def token_floors(
    geometry: Geometry, resident_share: float, memory_rate: float, links: Sequence[Link], cpu: Link | None = None
) -> tuple[Floor, ...]:
    """Of one decoded token: with all hits, as recorded, with a cache no better than chance, and with none.

    Compute is the time to read every weight that the token uses once, at `memory_rate`. `cpu`: where a CPU beside
    the fast memory computes blocks as they lie, and how many bytes of them per second.
    """
    compute = (geometry.dense_bytes + geometry.routed * geometry.slot_bytes) / memory_rate
    each = block_seconds(geometry.block_bytes, links)
    split = None if cpu is None else shared_seconds(geometry.block_bytes, links, cpu)
    assumed = {"every expert is there": 1.0}
    if resident_share < 1:
        assumed["hits as recorded of nano (LFRU)"] = expected_hits(resident_share)
        assumed["hits no better than chance"] = resident_share
        assumed["no expert is there"] = 0.0
    floors = []
    for what, hits in assumed.items():
        missing = geometry.routed * (1 - hits)
        copies = missing * each
        shared = None if split is None else compute + missing * split
        floors.append(Floor(what, hits, compute + copies, max(compute, copies), shared))
    return tuple(floors)


def distinct_experts(geometry: Geometry, tokens: int) -> float:
    """Per layer, that a prompt uses if each token's choice were independent and even; real prompts use fewer."""
    return geometry.experts * (1 - (1 - geometry.top_k / geometry.experts) ** tokens)


def prompt_floor(
    geometry: Geometry, tokens: int, resident_share: float, memory_rate: float, links: Sequence[Link]
) -> Floor:
    """Until the first token of an answer: every expert that the prompt uses comes, or is read, once."""
    used = geometry.layers * distinct_experts(geometry, tokens)
    compute = (geometry.dense_bytes + used * geometry.slot_bytes) / memory_rate
    copies = used * (1 - resident_share) * block_seconds(geometry.block_bytes, links)
    return Floor(f"{tokens} tokens", resident_share, compute + copies, max(compute, copies))
