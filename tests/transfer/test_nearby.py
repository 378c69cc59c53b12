"""What lies in RAM is computed there: the bits of a slot, held while it is computed, and no more than pays."""

from collections.abc import Sequence

import pytest
import torch

from steerpipe.core.errors import ConfigError
from steerpipe.core.ids import ExpertId
from steerpipe.core.quality import computed_share
from steerpipe.model.moe import expert_ffn
from steerpipe.store.formats import ExpertFormat
from steerpipe.transfer.nearby import CpuTime, RamExperts
from steerpipe.transfer.places import ram_tier
from steerpipe.transfer.source import LadderSource
from tests.transfer.packs import EXPERTS, tiny_pack, true_weights

FORMS = (ExpertFormat.INT8, ExpertFormat.BFLOAT16)


def opened(form: ExpertFormat = ExpertFormat.INT8, *, blocks: int = 3 * EXPERTS, **given: object) -> LadderSource:
    pack = tiny_pack("qwen3_moe", form)
    options = {"slots": 2, "dtype": torch.float32, "ram_bytes": blocks * pack.layout(0).block_bytes} | given
    return LadderSource.open(pack, **options)  # type: ignore[arg-type]


def near(source: LadderSource) -> RamExperts:
    return source.nearby()


def lease(source: LadderSource, layer: int, experts: Sequence[int]) -> None:
    with source.lease(layer, experts) as held:
        list(held.waves())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_output_has_the_bits_of_a_slot(form: ExpertFormat, dtype: torch.dtype) -> None:
    with opened(form, dtype=dtype) as source:
        held = near(source).take(1, [5])
        assert held is not None and held.experts == (5,)
        x = torch.randn(16, source.pack.spec.hidden).to(dtype)
        expected = expert_ffn(x, true_weights(ExpertId(1, 5), dtype, form=form))
        assert torch.equal(held.compute(5, x), expected)
        held.let_go()
        held.let_go()
        tier = ram_tier(source.link)
        assert tier is not None
        tier.check_integrity()  # nothing is pinned


def test_a_block_that_is_computed_keeps_its_place_while_others_come() -> None:
    with opened(blocks=2, slots=4) as source:  # RAM for two blocks
        lease(source, 0, [0, 1])
        tier, ram = ram_tier(source.link), near(source)
        assert tier is not None and tier.held() == {ExpertId(0, 0), ExpertId(0, 1)}
        held = ram.take(0, [0])
        assert held is not None
        x = torch.randn(1, source.pack.spec.hidden)
        for layer in (1, 2):
            lease(source, layer, [2, 3, 4, 5])  # each wants a place in RAM
        assert ExpertId(0, 0) in tier.held() and ExpertId(0, 1) not in tier.held()
        assert torch.equal(held.compute(0, x), expert_ffn(x, true_weights(ExpertId(0, 0), form=ExpertFormat.INT8)))
        held.let_go()
        tier.check_integrity()


def test_what_does_not_lie_in_ram_is_left_to_the_link() -> None:
    with opened(blocks=2) as source:
        assert near(source).take(0, [3]) is None  # nothing was read yet


def test_without_ram_there_is_nobody_to_ask() -> None:
    with opened(ram_bytes=0) as source, pytest.raises(ConfigError, match="no expert lies in RAM") as raised:
        source.nearby()
    assert "--ram" in raised.value.fix


@pytest.mark.parametrize(
    ("misses", "link", "cpu", "share"),
    [
        (0, 1.0, 1.0, 0),
        (4, 1.0, 1.0, 2),  # both end together
        (4, 1.0, 3.0, 1),
        (4, 1.0, 5.0, 0),  # one block of the CPU takes longer than all of the link's
        (4, 3.0, 1.0, 3),
        (4, 9.0, 1.0, 4),
        (1, 1.0, 1.0, 1),  # as soon, and the link has nothing to do
        (3, 0.0, 1.0, 0),
        (3, 1.0, None, 1),  # tried once
        (0, 1.0, None, 0),
    ],
)  # fmt: skip
def test_misses_are_split_so_that_link_and_cpu_end_together(
    misses: int, link: float, cpu: float | None, share: int
) -> None:
    assert computed_share(misses, link, cpu) == share


@pytest.mark.parametrize("misses", range(9))
@pytest.mark.parametrize("cpu", [0.1, 0.5, 1.0, 2.0, 7.0])
def test_no_other_split_ends_sooner(misses: int, cpu: float) -> None:
    def ends(share: int) -> float:
        return max(share * cpu, (misses - share) * 1.0)

    assert ends(computed_share(misses, 1.0, cpu)) == min(ends(share) for share in range(misses + 1))


def test_a_cpu_that_was_left_out_is_tried_again() -> None:
    cpu = CpuTime()
    cpu.left_out()
    assert cpu.block_seconds is None
    cpu.note(1.5)
    asked = 0
    while not computed_share(1, 1.0, cpu.block_seconds):
        cpu.left_out()
        asked += 1
    assert 10 < asked < 100
    cpu.note(0.5)
    assert cpu.block_seconds is not None and 0.5 < cpu.block_seconds < 1.0
