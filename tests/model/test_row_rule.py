"""A token's bits never depend on its neighbours: `torch.equal`, in fp32 and bf16, on the CPU.

Two classes are compared within themselves only: prefill cells, and decode (one row, or 16-row cells). The rule
rests on the matrix library not looking at a row's place. MKL keeps to that where the inner dimension of an fp32
product is a multiple of 4 (measured for 2 to 129 inner columns with 1, 2 and 4 threads; of
other dimensions nearly all break it), so the random configurations here have such widths, as all released models do.
"""

import os
import subprocess
import sys
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from steerpipe.model.cells import CELL, by_cell, padded
from steerpipe.model.kv_cache import KvSequence
from tests.golden.configurations import Configuration, configurations
from tests.support import tiny
from tests.support.bits import check_bits, random_tokens
from tests.support.running import Loaded, ShuffledExperts, load, loaded

LENGTH = 150  # past the first KV block
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_moe": ("qwen2_moe", {}),
    "qwen3_moe": ("qwen3_moe", {}),
    "mixtral": ("mixtral", {}),
    "olmoe": ("olmoe", {}),
    "sliding": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 37}),
    "dense": ("qwen2_moe", {"num_experts": 0}),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

every_model = pytest.mark.parametrize("name", MODELS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
few = settings(max_examples=4, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
splits = st.sets(st.integers(1, LENGTH - 1), max_size=12)


def model_of(name: str, dtype: str) -> Loaded:
    family, changes = MODELS[name]
    return loaded(tiny.tiny(family, **changes).folder, DTYPES[dtype])


def tokens_of(model: Loaded, count: int = LENGTH, seed: int = 0) -> list[int]:
    return random_tokens(model.spec.vocab, count, seed)


# --- prefill


@every_dtype
@every_model
@given(at=splits)
@few
def test_prefill_in_any_chunks_has_the_bits_of_prefill_as_a_whole(name: str, dtype: str, at: set[int]) -> None:
    model = model_of(name, dtype)
    tokens = tokens_of(model)
    assert torch.equal(model.prefill(tokens, sorted(at)), model.prefill(tokens))


@every_dtype
@every_model
def test_a_draft_that_grows_token_by_token_has_the_bits_of_the_whole(name: str, dtype: str) -> None:
    model = model_of(name, dtype)
    tokens = tokens_of(model)
    assert torch.equal(model.prefill(tokens, range(1, LENGTH)), model.prefill(tokens))


@every_dtype
@every_model
@given(edits=st.lists(st.tuples(st.integers(0, LENGTH - 1), st.integers(1, 40)), min_size=1, max_size=5))
@few
def test_what_follows_a_truncation_has_the_bits_of_a_fresh_prefill(
    name: str, dtype: str, edits: list[tuple[int, int]]
) -> None:
    model = model_of(name, dtype)
    kv = model.pool.sequence()
    text = tokens_of(model)
    model.prefill(text, kv=kv)
    for seed, (at, count) in enumerate(edits):
        at = min(at, len(text))
        kv.truncate(at)
        added = tokens_of(model, count, seed=seed + 1)
        text = text[:at] + added
        after = model.prefill(added, kv=kv)
        assert torch.equal(after, model.prefill(text)[at:])
    kv.free()


@every_dtype
@every_model
@given(at=st.integers(1, LENGTH), left=st.integers(1, 30), right=st.integers(1, 30))
@few
def test_both_sides_of_a_fork_have_the_bits_of_fresh_prefills(
    name: str, dtype: str, at: int, left: int, right: int
) -> None:
    model = model_of(name, dtype)
    text, mine, theirs = tokens_of(model), tokens_of(model, left, 1), tokens_of(model, right, 2)
    kv = model.pool.sequence()
    model.prefill(text, kv=kv)
    fork = kv.fork(at)
    first = model.prefill(theirs[:1], kv=fork)
    ours = model.prefill(mine, kv=kv)
    rest = model.prefill(theirs[1:], kv=fork) if theirs[1:] else first[:0]
    assert torch.equal(ours, model.prefill(text + mine)[LENGTH:])
    assert torch.equal(torch.cat([first, rest]), model.prefill(text[:at] + theirs)[at:])
    kv.free()
    fork.free()


# --- decode


def decode_alone(model: Loaded, prompt: list[int], answer: list[int]) -> Tensor:
    kv = model.pool.sequence()
    model.prefill(prompt, kv=kv)
    logits = torch.cat([model.batch([kv], [token]) for token in answer])
    kv.free()
    return logits


@every_dtype
@every_model
@given(neighbours=st.integers(1, 19), row=st.integers(0, 19), seed=st.integers(0, 2**32 - 1))
@few
def test_a_sequence_has_the_same_bits_in_any_batch_of_the_class(
    name: str, dtype: str, neighbours: int, row: int, seed: int
) -> None:
    """Other neighbours, another row, another size (up to 20: two cells), other positions, every step anew."""
    model, random = model_of(name, dtype), Random(seed)
    prompt, answer = tokens_of(model, 120, seed % 97), tokens_of(model, 6, seed % 89)
    kv = model.pool.sequence()
    model.prefill(prompt, kv=kv)
    others = [model.pool.sequence() for _ in range(neighbours)]
    for index, other in enumerate(others):
        model.prefill(tokens_of(model, random.randint(1, 30), index), kv=other)
    parts = []
    for token in answer:
        batch: list[KvSequence] = random.sample(others, random.randint(0, neighbours))
        at = min(row, len(batch))
        batch.insert(at, kv)
        fed = tokens_of(model, len(batch), random.randint(0, 999))
        fed[at] = token
        parts.append(model.batch(batch, fed)[at])
    assert torch.equal(torch.stack(parts), decode_alone(model, prompt, answer))
    for sequence in [kv, *others]:
        sequence.free()


@every_dtype
@every_model
def test_one_row_decode_does_not_depend_on_how_the_prompt_was_chunked(name: str, dtype: str) -> None:
    model = model_of(name, dtype)
    prompt, answer = tokens_of(model, 125), tokens_of(model, 8, 1)
    found = []
    for at in ((), (1,), (7, 50, 99)):
        kv = model.pool.sequence()
        model.prefill(prompt, at, kv=kv)
        found.append(model.one_row(answer, kv=kv))
        kv.free()
    assert all(torch.equal(other, found[0]) for other in found[1:])


@every_dtype
@every_model
def test_the_two_decode_classes_differ_by_rounding_only(name: str, dtype: str) -> None:
    model = model_of(name, dtype)
    prompt, answer = tokens_of(model, 20), tokens_of(model, 8, 1)
    kv = model.pool.sequence()
    model.prefill(prompt, kv=kv)
    one = model.one_row(answer, kv=kv)
    kv.free()
    difference = (one - decode_alone(model, prompt, answer)).abs().amax(-1).median()
    assert difference < (1e-4 if dtype == "fp32" else 0.3)


# --- experts


@every_dtype
@pytest.mark.parametrize("name", tiny.FAMILIES)
@given(seed=st.integers(0, 2**32 - 1), singly=st.booleans())
@few
def test_the_order_in_which_experts_arrive_changes_no_bit(name: str, dtype: str, seed: int, singly: bool) -> None:
    model = model_of(name, dtype)
    tokens = tokens_of(model, 70, seed % 101)
    late = ShuffledExperts(model.experts, Random(seed), singly)
    assert torch.equal(model.prefill(tokens, [33], experts=late), model.prefill(tokens))
    kvs = [model.pool.sequence() for _ in range(6)]
    for kv in kvs:
        model.prefill(tokens[:5], kv=kv)
    forks = [kv.fork() for kv in kvs]
    assert torch.equal(model.batch(kvs, tokens[:6], experts=late), model.batch(forks, tokens[:6]))
    assert late.waves > 6, "the experts came in waves"
    for kv in kvs + forks:
        kv.free()


# --- any configuration, any number of threads


def check_configuration(configuration: Configuration, dtype: str, length: int, seed: int) -> None:
    family, keys = configuration
    random = Random(seed)
    with TemporaryDirectory() as folder:
        tiny.write(tiny.config_of(family, **keys), Path(folder), seed)
        model = load(Path(folder), DTYPES[dtype], blocks=64)
    check_bits(model, random, length)


@every_dtype
@given(configurations(width_unit=4), st.integers(2, 60), st.integers(0, 2**32 - 1))
@settings(few, max_examples=20)
def test_any_configuration_keeps_the_row_rule(dtype: str, configuration: Configuration, length: int, seed: int) -> None:
    check_configuration(configuration, dtype, length, seed)


@pytest.mark.slow
@every_dtype
@given(configurations(width_unit=4), st.integers(2, 140), st.integers(0, 2**32 - 1))
@settings(few, max_examples=400, derandomize=False)
def test_many_configurations_keep_the_row_rule(
    dtype: str, configuration: Configuration, length: int, seed: int
) -> None:
    check_configuration(configuration, dtype, length, seed)


@pytest.mark.parametrize("threads", [2, 3])
def test_the_row_rule_holds_with_several_threads(threads: int) -> None:
    """MLPs 2,304 wide: from 32,768 numbers on, torch divides the work on a cell between threads."""
    wide = tiny.tiny(
        "qwen2_moe",
        num_hidden_layers=1,
        num_experts=3,
        moe_intermediate_size=2304,
        shared_expert_intermediate_size=2304,
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.bits", str(threads), str(wide.folder)],
        env=os.environ | {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)},
        cwd=root, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["float32", "ok", "bfloat16", "ok"]


RELEASED = {  # outer and inner columns of products of released models, [N, K]
    "Mixtral router": (8, 4096), "Qwen1.5 router": (60, 2048), "Qwen3 router": (128, 2048),
    "Qwen1.5 expert": (2816, 2048), "Qwen1.5 expert down": (2048, 1408), "Qwen1.5 shared": (11264, 2048),
    "Qwen1.5 switch": (1, 2048), "Qwen3 expert": (1536, 2048), "Qwen3 expert down": (2048, 768),
    "Qwen3 qkv": (5120, 2048), "OLMoE expert": (2048, 2048), "Mixtral out": (4096, 4096),
}  # fmt: skip


@pytest.mark.slow
@every_dtype
@pytest.mark.parametrize("threads", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("product", RELEASED)
def test_in_products_of_released_sizes_a_row_s_place_does_not_matter(product: str, threads: int, dtype: str) -> None:
    torch.set_num_threads(threads)  # conftest puts it back
    outer, inner = RELEASED[product]
    weight, x = torch.randn(outer, inner).to(DTYPES[dtype]), torch.randn(16, inner).to(DTYPES[dtype])
    whole = torch.nn.functional.linear(x, weight)
    for _ in range(3):
        order = torch.randperm(16)
        assert torch.equal(torch.nn.functional.linear(x[order], weight), whole[order])
    few_rows = torch.cat([x[3:6], torch.zeros(13, inner, dtype=x.dtype)])
    assert torch.equal(torch.nn.functional.linear(few_rows, weight)[:3], whole[3:6])


# --- the parts of it


def test_a_cell_is_16_rows_and_rows_are_rounded_up_to_cells() -> None:
    assert CELL == 16
    assert [padded(n) for n in (0, 1, 15, 16, 17, 33)] == [0, 16, 16, 16, 32, 48]


def test_every_function_sees_whole_cells_and_nothing_else() -> None:
    seen = []

    def function(x: Tensor, y: Tensor) -> Tensor:
        seen.append((tuple(x.shape), tuple(y.shape)))
        return x.sum(-1, keepdim=True) + y

    x, y = torch.randn(48, 5), torch.randn(48, 1)
    assert torch.equal(by_cell(function, x, y, cell=16), x.sum(-1, keepdim=True) + y)
    assert seen == [((16, 5), (16, 1))] * 3
    with pytest.raises(AssertionError, match="47 rows are not whole cells of 16"):
        by_cell(function, x[:47], y[:47], cell=16)
