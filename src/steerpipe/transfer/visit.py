"""What a reader takes from the queue at once: a stretch of the file. Pure; the caller holds a lock."""

from collections.abc import Mapping

from steerpipe.core.ids import ExpertId
from steerpipe.transfer.link import BlockAddress
from steerpipe.transfer.queue import Chunk, Reason, TransferQueue

CHUNK_BYTES = 1 << 20  # a wrong guess is cut after at most so many
DEMAND_BYTES = 8 << 20  # of one demanded block in one read: nothing outranks it, and longer reads are quicker


def take_visit(
    queue: TransferQueue, addresses: Mapping[ExpertId, BlockAddress], chunk_bytes: int = CHUNK_BYTES
) -> list[Chunk]:
    """The next chunks, all of one reason, of which all but the last are one stretch of the file; empty: nothing to do.

    Goes on taking while the last chunk begins where the one before it ended, within `chunk_bytes` in all, or
    DEMAND_BYTES of one demanded block. The last may lie elsewhere: it waits for one read.
    """
    visit: list[Chunk] = []
    room, reason = chunk_bytes, queue.next_reason()
    while room and queue.next_reason() is reason and (chunk := queue.take(min(chunk_bytes, room))):
        before = visit[-1] if visit else None
        if before is not None and before.expert == chunk.expert and before.offset + before.length == chunk.offset:
            visit[-1] = chunk = Chunk(chunk.expert, before.offset, before.length + chunk.length)
        else:
            visit.append(chunk)
            if before is not None and not _follows(before, chunk, addresses):
                break
        room = _room(visit, addresses, chunk_bytes, demanded=reason is Reason.DEMAND)
    return visit


def _room(visit: list[Chunk], addresses: Mapping[ExpertId, BlockAddress], chunk_bytes: int, *, demanded: bool) -> int:
    """How many bytes more may be taken: the rest of a demanded block, or a whole block after a whole block."""
    last = visit[-1]
    size_bytes = addresses[last.expert].size_bytes
    taken_bytes = sum(chunk.length for chunk in visit)
    if last.offset + last.length < size_bytes:
        return max(0, DEMAND_BYTES - taken_bytes) if demanded else 0
    room = chunk_bytes - taken_bytes
    return room if room >= size_bytes else 0


def _follows(before: Chunk, chunk: Chunk, addresses: Mapping[ExpertId, BlockAddress]) -> bool:
    end = addresses[before.expert].offset + before.offset + before.length
    return addresses[chunk.expert].offset + chunk.offset == end
