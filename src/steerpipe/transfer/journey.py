"""What is known of a block on its way, beside its place in the queue."""

from dataclasses import dataclass

from steerpipe.core.errors import TransferError
from steerpipe.transfer.queue import Reason
from steerpipe.transfer.slabs import Slab


@dataclass(slots=True)
class Journey:
    """A block between `begin` and the end of its decoding."""

    began_as: Reason
    slab: Slab | None = None  # from its first chunk on
    moved_bytes: int = 0
    error: TransferError | None = None  # a chunk of it cannot be had
