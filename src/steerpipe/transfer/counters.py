"""What the ladder did, in numbers that add up: hits + late + misses = experts leased."""

from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

from steerpipe.transfer.link import LinkRate
from steerpipe.transfer.queue import Reason


@dataclass(frozen=True, slots=True)
class ReasonCounters:
    """Of one reason. A guess that is demanded goes on as demand: bytes count where they moved, blocks where they began.

    Hits and late ones count for a guess at the first use only; later uses are the cache's, which is demand's.
    """

    read_bytes: int = 0
    transfers: int = 0  # blocks that arrived
    hits: int = 0  # was there when it was leased
    late: int = 0  # was on its way when it was leased
    cancelled: int = 0  # blocks that were cut
    cancelled_bytes: int = 0  # of them, moved for nothing

    def __sub__(self, before: Self) -> Self:
        return type(self)(*(getattr(self, f.name) - getattr(before, f.name) for f in fields(self)))


@dataclass(frozen=True, slots=True)
class LadderCounters:
    """A snapshot since the start, or the difference of two."""

    demand: ReasonCounters = ReasonCounters()
    prefetch: ReasonCounters = ReasonCounters()
    draft: ReasonCounters = ReasonCounters()
    leases: int = 0
    leased: int = 0  # experts
    misses: int = 0
    evictions: int = 0
    retries: int = 0  # reads that failed and were tried again
    rereads: int = 0  # blocks whose checksum was wrong at first
    failures: int = 0  # blocks that could not be had
    stall_seconds: float = 0.0  # leases waited, for at least one miss
    late_seconds: float = 0.0  # leases waited, only for what was on its way
    decode_seconds: float = 0.0  # checking blocks and making them compute-ready, on the readers
    link_reads: int = 0
    link_seconds: float = 0.0  # with a read outstanding, whatever tier answered
    disk_reads: int = 0
    disk_bytes: int = 0
    disk_seconds: float = 0.0  # with a read of the disk outstanding
    seconds: float = 0.0  # wall clock

    @property
    def hits(self) -> int:
        return self.demand.hits + self.prefetch.hits + self.draft.hits

    @property
    def late(self) -> int:
        return self.demand.late + self.prefetch.late + self.draft.late

    @property
    def read_bytes(self) -> int:
        return self.demand.read_bytes + self.prefetch.read_bytes + self.draft.read_bytes

    @property
    def utilisation(self) -> float:
        """Share of the time in which the link had something to do."""
        return self.link_seconds / self.seconds if self.seconds else 0.0

    @property
    def miss_seconds(self) -> float | None:
        """What a miss waited, on average; None: nothing was missing, or it waited where no host sees it."""
        return self.stall_seconds / self.misses if self.misses and self.stall_seconds else None

    def as_json(self) -> dict[str, Any]:
        """All of it, the sums over the reasons and the link's utilisation included."""
        sums = {"hits": self.hits, "late": self.late, "read_bytes": self.read_bytes, "utilisation": self.utilisation}
        return asdict(self) | sums

    def __sub__(self, before: Self) -> Self:
        """What happened between two snapshots."""
        return type(self)(**{f.name: getattr(self, f.name) - getattr(before, f.name) for f in fields(self)})


@dataclass(slots=True)
class ReasonTally:
    """The running counts behind ReasonCounters."""

    read_bytes: int = 0
    transfers: int = 0
    hits: int = 0
    late: int = 0
    cancelled: int = 0
    cancelled_bytes: int = 0


@dataclass(slots=True)
class Tally:
    """The running counts behind LadderCounters. The caller holds the ladder's lock."""

    of: dict[Reason, ReasonTally] = field(default_factory=lambda: {reason: ReasonTally() for reason in Reason})
    leases: int = 0
    leased: int = 0
    misses: int = 0
    evictions: int = 0
    retries: int = 0
    rereads: int = 0
    failures: int = 0
    stall_seconds: float = 0.0
    late_seconds: float = 0.0
    decode_seconds: float = 0.0

    def snapshot(self, link: LinkRate, disk: LinkRate, seconds: float) -> LadderCounters:
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "of"}
        demand, prefetch, draft = (ReasonCounters(**asdict(self.of[reason])) for reason in Reason)
        return LadderCounters(
            demand=demand,
            prefetch=prefetch,
            draft=draft,
            link_reads=link.reads,
            link_seconds=link.busy_seconds,
            disk_reads=disk.reads,
            disk_bytes=disk.read_bytes,
            disk_seconds=disk.busy_seconds,
            seconds=seconds,
            **own,
        )
