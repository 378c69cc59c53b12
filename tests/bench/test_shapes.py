"""Shapes have the bytes that the released models have."""

import pytest

from steerpipe.bench.shapes import SHAPES, make_shape
from steerpipe.core.errors import ConfigError
from steerpipe.model.tensors import dense_tensors
from steerpipe.store.formats import ExpertFormat
from tests.families.released import RELEASED

# MB of an expert, GB per token and of all experts, in bf16 and int4.
TABLE = {
    "qwen1.5-moe": (17.3, 4.6, 1.66, 0.44, 24.9, 6.6),
    "qwen3-30b": (9.4, 2.5, 3.62, 0.96, 58.0, 15.4),
    "mixtral": (352, 93.6, 22.6, 5.99, 90.2, 24.0),
    "olmoe": (12.6, 3.3, 1.61, 0.43, 12.9, 3.4),
}
RELEASE_OF = {
    "qwen1.5-moe": "Qwen1.5-MoE-A2.7B", "qwen3-30b": "Qwen3-30B-A3B", "mixtral": "Mixtral-8x7B-v0.1",
    "olmoe": "OLMoE-1B-7B-0924",
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_bytes_of_experts_are_those_of_the_table_of_shapes(name: str) -> None:
    found = []
    for figure in range(3):
        for form in (ExpertFormat.BFLOAT16, ExpertFormat.INT4):
            shape = make_shape(name, form)
            sizes = (shape.layout.block_bytes / 1e6, shape.routed_bytes / 1e9, shape.expert_bytes / 1e9)
            found.append(sizes[figure])
    assert found == pytest.approx(TABLE[name], rel=0.015)


@pytest.mark.parametrize("name", RELEASE_OF)
def test_dense_weights_and_experts_together_are_the_released_files(name: str) -> None:
    shape = make_shape(name, ExpertFormat.BFLOAT16)
    dense = 0
    for sizes in dense_tensors(shape.spec, shape.family.names).values():
        count = 1
        for size in sizes:
            count *= size
        dense += 2 * count
    experts = shape.all_experts * 2 * shape.layout.weights
    assert dense + experts == RELEASED[RELEASE_OF[name]].total_size


def test_a_token_reads_every_dense_weight_but_an_untied_embedding_and_routers_in_fp32() -> None:
    shape = make_shape("qwen3-30b", ExpertFormat.BFLOAT16)
    attention = 2048 * (32 + 2 * 4) * 128 + 32 * 128 * 2048 + 2 * 128
    layer = 2 * (attention + 2 * 2048) + 4 * 128 * 2048
    assert shape.dense_bytes(2) == 48 * layer + 2 * 2048 + 2 * 151936 * 2048
    nano = make_shape("nano", ExpertFormat.INT4)
    assert nano.dense_bytes(2) > 2 * 8192 * 192  # its head is its embedding, which is read


def test_keys_and_values_grow_with_the_context() -> None:
    shape = make_shape("qwen3-30b", ExpertFormat.BFLOAT16)
    assert shape.kv_bytes(4096, 2) == 48 * 2 * 4 * 128 * 4096 * 2


def test_a_longer_context_than_the_release_has_is_given_room() -> None:
    assert make_shape("olmoe", ExpertFormat.INT4).spec.max_context == 4096
    assert make_shape("olmoe", ExpertFormat.INT4, context=33_000).spec.max_context == 33_000


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("form", [ExpertFormat.BFLOAT16, ExpertFormat.INT8, ExpertFormat.INT4])
def test_every_shape_has_every_format(name: str, form: ExpertFormat) -> None:
    shape = make_shape(name, form)
    assert shape.layout.block_bytes >= shape.layout.weights * {"bfloat16": 2, "int8": 1, "int4": 0.5}[form.value]


def test_an_unknown_shape_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'gpt-oss-20b' is not a shape") as caught:
        make_shape("gpt-oss-20b", ExpertFormat.BFLOAT16)
    assert "qwen3-30b" in caught.value.fix
