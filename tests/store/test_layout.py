"""Where the parts of a block lie, and how groups are chosen."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steerpipe.core.errors import ConfigError, PackError
from steerpipe.store.formats import DenseFormat, ExpertFormat, parse_dense_format, parse_expert_format
from steerpipe.store.layout import BlockLayout, default_group, plan_block

INT4 = ExpertFormat.INT4


def payload(layout: BlockLayout) -> int:
    return sum(part.size_bytes for part in layout.parts)


@settings(deadline=None)
@given(form=st.sampled_from(ExpertFormat), hidden=st.integers(1, 400), width=st.integers(1, 400))
def test_parts_lie_one_after_the_other_aligned_and_blocks_are_pages(
    form: ExpertFormat, hidden: int, width: int
) -> None:
    layout = plan_block(form, 2 * hidden, 2 * width)
    end = 0
    for part in layout.parts:
        assert part.offset % 64 == 0
        assert end <= part.offset < end + 64
        end = part.offset + part.size_bytes
    assert layout.block_bytes % 4096 == 0
    assert end <= layout.block_bytes < end + 4096


def test_what_is_computed_first_lies_first() -> None:
    assert [part.name for part in plan_block(INT4, 192, 48).parts] == ["gate_up", "gate_up.scale", "down", "down.scale"]
    assert [part.name for part in plan_block(ExpertFormat.BFLOAT16, 192, 48).parts] == ["gate_up", "down"]


@pytest.mark.parametrize(
    ("form", "hidden", "width", "block_bytes", "groups"),
    [
        (INT4, 192, 48, 16384, (32, 16)),  # the embedded model: groups shrink into what 4 KiB leave free
        (INT4, 2048, 768, 2_506_752, (64, 64)),  # Qwen3-30B-A3B
        (INT4, 2048, 1408, 4_595_712, (64, 64)),  # Qwen1.5-MoE
        (INT4, 2880, 2880, 13_221_888, (64, 64)),
        (ExpertFormat.INT8, 192, 48, 28672, (192, 48)),
        (ExpertFormat.BFLOAT16, 2048, 768, 9_437_184, (0, 0)),
    ],
)  # fmt: skip
def test_sizes_of_known_models(
    form: ExpertFormat, hidden: int, width: int, block_bytes: int, groups: tuple[int, int]
) -> None:
    layout = plan_block(form, hidden, width)
    assert (layout.block_bytes, (layout.gate_up_group, layout.down_group)) == (block_bytes, groups)


@settings(deadline=None)
@given(hidden=st.integers(1, 60), width=st.integers(1, 60))
def test_finer_groups_cost_no_page_and_no_finer_pair_would_be_free(hidden: int, width: int) -> None:
    hidden, width = 8 * hidden, 8 * width
    layout = plan_block(INT4, hidden, width)
    coarse = (
        3 * hidden * width // 2
        + 4 * width * hidden // default_group(hidden)
        + 2 * hidden * width // default_group(width)
    )
    assert layout.block_bytes <= -(-(coarse + 3 * 64) // 4096) * 4096
    for gate_up, down in (
        (layout.gate_up_group // 2, layout.down_group),
        (layout.gate_up_group, layout.down_group // 2),
    ):
        if min(gate_up, down) >= 8:
            scales = 4 * width * (hidden // gate_up) + 2 * hidden * (width // down)
            assert 3 * hidden * width // 2 + scales + 3 * 63 > layout.block_bytes - 3 * 63


def test_a_group_can_be_asked_for_and_must_divide_both_widths() -> None:
    layout = plan_block(INT4, 192, 48, group=48)
    assert (layout.gate_up_group, layout.down_group) == (48, 48)
    with pytest.raises(PackError, match="groups of 32 do not divide a width of 48") as caught:
        plan_block(INT4, 192, 48, group=32)
    assert "2, 4, 6, 8, 12, 16, 24, 48" in caught.value.fix
    with pytest.raises(PackError, match="groups of 3 "):
        plan_block(INT4, 192, 48, group=3)
    with pytest.raises(PackError, match="groups of 0 "):
        plan_block(INT4, 192, 48, group=0)
    with pytest.raises(PackError, match="with bfloat16"):
        plan_block(ExpertFormat.BFLOAT16, 192, 48, group=16)


def test_odd_shapes() -> None:
    assert default_group(20) == 20
    assert default_group(42) == 42
    assert default_group(2 * 71) == 2
    with pytest.raises(PackError, match="27 is odd"):
        plan_block(INT4, 32, 27)


def test_formats_by_their_names() -> None:
    assert parse_expert_format("bf16") is ExpertFormat.BFLOAT16
    assert parse_expert_format("float16") is ExpertFormat.FLOAT16
    assert parse_expert_format("int4") is INT4
    assert parse_expert_format("native") is None
    assert parse_dense_format("int8") is DenseFormat.INT8
    with pytest.raises(ConfigError, match="'int5'"):
        parse_expert_format("int5")
    with pytest.raises(ConfigError, match="'int4'"):
        parse_dense_format("int4")


@given(form=st.sampled_from(ExpertFormat), hidden=st.sampled_from([64, 96, 320]), width=st.sampled_from([32, 48, 80]))
def test_a_form_says_where_the_parts_lie(form: ExpertFormat, hidden: int, width: int) -> None:
    layout = plan_block(form, hidden, width)
    said = layout.form
    assert (said.format, said.hidden, said.width) == (form.value, hidden, width)
    assert (said.gate_up, said.down) == (layout.part("gate_up").offset, layout.part("down").offset)
    assert (said.gate_up_group, said.down_group) == (layout.gate_up_group, layout.down_group)
    if form.quantised:
        assert said.gate_up_scale == layout.part("gate_up.scale").offset > 0
        assert said.down_scale == layout.part("down.scale").offset > 0
        assert layout.part("gate_up.scale").columns * said.gate_up_group == hidden
        assert layout.part("down.scale").columns * said.down_group == width
    else:
        assert said.gate_up_scale == said.down_scale == said.gate_up_group == said.down_group == 0
