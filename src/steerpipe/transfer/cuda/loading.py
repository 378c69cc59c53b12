"""Bringing everything at the start, where there is a slot for every expert."""

from steerpipe.store.progress import Progress
from steerpipe.transfer.cuda.shelf import GROUP, Shelf
from steerpipe.transfer.queue import Reason


def load_all(shelf: Shelf, progress: Progress) -> None:
    """Waits until every expert is in its slot; TransferError if one cannot be had."""
    total = len(shelf.experts)
    for number in sorted(range(total), key=shelf.order):
        begun = shelf.begin(number, Reason.DEMAND, transient=False)
        assert begun, f"{shelf.table.slots} slots are too few for {total} experts"
        shelf.table.pin(shelf.experts[number])  # so that an error finds us
        shelf.fetch([number], Reason.DEMAND)
        if number % GROUP == 0:
            shelf.settle_marked()
    shelf.settle_marked()
    while shelf.loading:
        shelf.land(wait=True)
        for error in shelf.broken.values():
            raise error
        progress((total - len(shelf.loading)) * shelf.memory.slot_bytes, total * shelf.memory.slot_bytes)
    shelf.copier.drain()
    for expert in shelf.experts:
        shelf.table.unpin(expert)
    progress(total * shelf.memory.slot_bytes, total * shelf.memory.slot_bytes)
