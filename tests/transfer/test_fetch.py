"""Patience: what is tried again, how often, and what is told of each piece of a run."""

from collections.abc import Sequence

import pytest
import torch

from steerpipe.core.errors import TransferError
from steerpipe.core.ids import ExpertId
from steerpipe.transfer.disk import DiskLink
from steerpipe.transfer.faulty import ALWAYS, Faults, FaultyLink
from steerpipe.transfer.fetch import RETRIES, Fetcher
from steerpipe.transfer.link import Link, OverLink, Piece
from steerpipe.transfer.slabs import Slab
from steerpipe.transfer.source import LadderSource
from tests.transfer.packs import tiny_pack


def fetcher(faults: Faults) -> tuple[LadderSource, Fetcher]:
    source = LadderSource.open(tiny_pack(), slots=2, dtype=torch.float32, wrap=lambda link: FaultyLink(link, faults))
    return source, source._fetcher


def run_of(source: LadderSource, *experts: int) -> tuple[list[Piece], list[Slab]]:
    addresses = [source._ladder.addresses[ExpertId(0, expert)] for expert in experts]
    slabs = [Slab.allocate(address.size_bytes) for address in addresses]
    pieces = [Piece(address, 0, slab.view) for address, slab in zip(addresses, slabs, strict=True)]
    return pieces, slabs


def test_one_bad_block_of_a_run_does_not_take_its_neighbours_with_it() -> None:
    source, fetch = fetcher(Faults(fails={ExpertId(0, 1): ALWAYS}))
    with source:
        pieces, slabs = run_of(source, 0, 1, 2)
        first, bad, last = fetch.read(pieces)
        assert first is last is None
        assert bad is not None
        assert "expert 1 of layer 0" in bad.what
        for expert in (0, 2):
            assert torch.equal(slabs[expert].tensor, source.pack.read_block(0, expert))


@pytest.mark.parametrize(("times", "count"), [(0, 0), (1, 1), (2, 2), (3, 2), (ALWAYS, 2)])
def test_a_read_is_tried_three_times_in_all(times: int, count: int) -> None:
    source, fetch = fetcher(Faults(fails={ExpertId(0, 3): times}))
    with source:
        (error,) = fetch.read(run_of(source, 3)[0])
        assert (error is None) == (times <= RETRIES)
        assert source.counters().retries == count


def test_what_no_retry_cures_is_told_at_once() -> None:
    class Gone(OverLink):
        calls = 0

        def read(self, pieces: Sequence[Piece]) -> None:
            self.calls += 1
            raise TransferError("the file is gone", fix="bring it back")

    def make(link: Link) -> Link:
        return Gone(link)

    pack = tiny_pack()
    link = make(DiskLink(pack.expert_file))
    with LadderSource(pack, link, slots=2, dtype=torch.float32) as source:
        (error,) = source._fetcher.read(run_of(source, 3)[0])
        assert error is not None
        assert error.what == "the file is gone"
        assert isinstance(link, Gone)
        assert link.calls == 1


def test_a_wrong_block_is_read_again_once_from_further_below() -> None:
    for times, cured in ((1, True), (2, False)):
        source, fetch = fetcher(Faults(corrupts={ExpertId(0, 5): times}))
        with source:
            (piece,), (slab,) = run_of(source, 5)
            assert fetch.read([piece]) == [None]
            if cured:
                fetch.check(piece.address, slab)
                assert torch.equal(slab.tensor, source.pack.read_block(0, 5))
            else:
                with pytest.raises(TransferError, match=r"expert 5 of layer 0 in .* twice in a row"):
                    fetch.check(piece.address, slab)
            assert source.counters().rereads == 1
