"""Where experts lie, as an onlooker is told."""

import torch

from steerpipe.core.ids import ExpertId
from steerpipe.store.policies import Lfru
from steerpipe.store.residency import SlotTable
from steerpipe.transfer.disk import DiskLink
from steerpipe.transfer.link import PacedLink
from steerpipe.transfer.places import Place, held_in_ram, places_of
from steerpipe.transfer.ram import RamTier
from steerpipe.transfer.source import LadderSource, block_addresses
from tests.transfer.packs import tiny_pack

EXPERTS = [ExpertId(0, index) for index in range(4)]


def test_what_is_loading_is_on_its_way() -> None:
    table = SlotTable(EXPERTS, 2, Lfru(4), transient_limit=1)
    for expert in EXPERTS[:2]:
        table.begin(expert, transient=False, now=0)
    table.finish(EXPERTS[0])
    assert list(places_of(EXPERTS, table, {EXPERTS[0], EXPERTS[2]})) == [
        Place.FAST,
        Place.MOVING,
        Place.RAM,
        Place.DISK,
    ]


def test_ram_is_found_below_a_paced_link() -> None:
    pack = tiny_pack()
    addresses = list(block_addresses(pack).values())
    tier = RamTier(DiskLink(pack.expert_file), addresses, 4 * addresses[0].size_bytes)
    block = memoryview(bytearray(addresses[0].size_bytes))
    tier.keep(addresses[0], block)
    tier.keep(addresses[1], block)
    tier.forget(addresses[1])  # what is held of it is wrong
    link = PacedLink(tier, 1e9)
    assert held_in_ram(link) == {addresses[0].expert}
    assert held_in_ram(DiskLink(pack.expert_file)) == frozenset()
    link.close()


def test_a_source_tells_of_every_expert_in_its_own_order() -> None:
    with LadderSource.open(tiny_pack(), slots=4, dtype=torch.float32) as source:
        with source.lease(source.experts[0].layer, [1, 2]) as lease:
            for _ in lease.waves():
                pass
        source.check_integrity()
        places = dict(zip(source.experts, source.places(), strict=True))
    assert {expert for expert, place in places.items() if place == Place.FAST} == {
        ExpertId(source.experts[0].layer, 1), ExpertId(source.experts[0].layer, 2),
    }  # fmt: skip
