"""What "auto" becomes, and why."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steerpipe.core.config import EngineConfig
from steerpipe.core.errors import CapacityError, ConfigError
from steerpipe.core.resolve import Facts, ResolvedConfig, resolve

GIB = 2**30
# One billion parameters: 4 GB in float32, 2 GB in bfloat16. 10,000 KV elements: 40 kB per token in float32.
LAPTOP = Facts(
    has_cuda=False,
    has_native_bf16=True,
    core_count=4,
    free_ram_bytes=16 * GIB,
    free_cuda_bytes=0,
    stored_dtype="bfloat16",
    resident_parameters=10**9,
    model_context=4096,
    kv_elements_per_token=10_000,
)
WORKSTATION = replace(LAPTOP, has_cuda=True, free_cuda_bytes=24 * GIB)


def reason(resolved: ResolvedConfig, name: str) -> str:
    return next(choice.reason for choice in resolved.choices if choice.name == name)


def test_a_laptop() -> None:
    resolved = resolve(EngineConfig(), LAPTOP)
    assert (resolved.device, resolved.dtype, resolved.threads, resolved.max_context) == ("cpu", "float32", 4, 4096)
    assert resolved.kv_memory_bytes == 8 * 4096 * 40_000
    assert [choice.name for choice in resolved.choices] == ["device", "dtype", "threads", "max_context", "kv_memory"]
    assert reason(resolved, "kv_memory") == "holds 8 sequences of 4096 tokens"


def test_a_workstation() -> None:
    resolved = resolve(EngineConfig(), WORKSTATION)
    assert (resolved.device, resolved.dtype) == ("cuda", "bfloat16")
    assert resolved.kv_memory_bytes == 8 * 4096 * 20_000


@pytest.mark.parametrize(("native", "words"), [(True, "in hardware"), (False, "by emulation")])
def test_bf16_on_a_cpu_only_where_fp32_does_not_fit(native: bool, words: str) -> None:
    tight = replace(LAPTOP, free_ram_bytes=4 * 10**9 - 1, has_native_bf16=native)
    resolved = resolve(EngineConfig(), tight)
    assert resolved.dtype == "bfloat16"
    assert words in reason(resolved, "dtype")
    assert resolve(EngineConfig(max_context=16), replace(tight, free_ram_bytes=4 * 10**9 + 10**8)).dtype == "float32"


def test_weights_that_are_not_stored_as_bf16_are_not_rounded_on_a_cpu() -> None:
    tight = replace(LAPTOP, free_ram_bytes=5 * 10**9, stored_dtype="float16")
    assert resolve(EngineConfig(), tight).dtype == "float32"


def test_what_is_set_stays_set() -> None:
    config = EngineConfig(dtype="bfloat16", device="cpu", threads=1, max_context=128, kv_memory="1GiB", max_batch=2)
    resolved = resolve(config, WORKSTATION)
    assert (resolved.dtype, resolved.device, resolved.threads, resolved.max_context) == ("bfloat16", "cpu", 1, 128)
    assert (resolved.max_batch, resolved.prefill_chunk) == (2, 256)
    assert 0 <= GIB - resolved.kv_memory_bytes < 128 * 20_000  # whole blocks
    assert {choice.reason for choice in resolved.choices} == {"as set"}


def test_cuda_without_cuda_is_an_error() -> None:
    with pytest.raises(ConfigError, match="torch sees no CUDA device") as caught:
        resolve(EngineConfig(device="cuda"), LAPTOP)
    assert "auto" in caught.value.fix


def test_a_context_beyond_the_model_is_an_error() -> None:
    with pytest.raises(ConfigError, match="max_context is 8192, but the model was made for 4096"):
        resolve(EngineConfig(max_context=8192), LAPTOP)


def test_the_context_shrinks_to_what_the_kv_cache_holds_and_says_so() -> None:
    resolved = resolve(EngineConfig(kv_memory="40MB"), LAPTOP)  # 1,000 tokens: 7 blocks of 128
    assert (resolved.max_context, resolved.kv_blocks) == (896, 7)
    assert "4096" in reason(resolved, "max_context")


def test_a_context_that_was_asked_for_never_shrinks() -> None:
    with pytest.raises(CapacityError, match=r"room for 896 tokens; one sequence of 2000 is wanted") as caught:
        resolve(EngineConfig(kv_memory="40MB", max_context=2000), LAPTOP)
    assert "kv_memory" in caught.value.fix


def test_no_room_at_all_is_an_error() -> None:
    with pytest.raises(CapacityError, match="room for 0 tokens"):
        resolve(EngineConfig(), replace(LAPTOP, free_ram_bytes=10**9))


@given(
    free=st.integers(0, 64 * GIB),
    batch=st.integers(1, 64),
    context=st.none() | st.integers(1, 4096),
    parameters=st.integers(0, 10**10),
    dtype=st.sampled_from(["auto", "float32", "bfloat16"]),
)
def test_the_cache_always_holds_one_whole_sequence_and_leaves_room_for_the_weights(
    free: int, batch: int, context: int | None, parameters: int, dtype: str
) -> None:
    facts = replace(LAPTOP, free_ram_bytes=free, resident_parameters=parameters)
    config = EngineConfig(max_batch=batch, max_context=context, dtype=dtype)  # type: ignore[arg-type]
    try:
        resolved = resolve(config, facts)
    except CapacityError:
        return
    item = 4 if resolved.dtype == "float32" else 2
    blocks = -(-resolved.max_context // 128)
    assert blocks <= resolved.kv_blocks <= batch * blocks
    assert resolved.kv_memory_bytes == resolved.kv_blocks * 128 * 10_000 * item
    assert resolved.kv_memory_bytes + parameters * item <= free


def test_a_model_of_small_matrices_gets_one_thread_unless_it_is_told_otherwise() -> None:
    small = replace(LAPTOP, layer_matrix_elements=192 * 192)
    assert resolve(EngineConfig(), small).threads == 1
    assert "small" in reason(resolve(EngineConfig(), small), "threads")
    assert resolve(EngineConfig(threads=3), small).threads == 3
    assert resolve(EngineConfig(), LAPTOP).threads == 4


def test_a_model_larger_than_memory_still_gets_room_for_keys_and_values() -> None:
    large = replace(LAPTOP, resident_parameters=10**9, expert_parameters=10**11)
    resolved = resolve(EngineConfig(), large)
    assert resolved.dtype == "bfloat16"
    assert 0 < resolved.kv_memory_bytes <= (16 * GIB - 2 * 10**9) // 8


def test_keys_and_values_do_not_crowd_out_experts_that_fit() -> None:
    fits = replace(LAPTOP, resident_parameters=10**8, expert_parameters=10**9)
    resolved = resolve(EngineConfig(dtype="float32", max_batch=64), fits)
    assert resolved.kv_memory_bytes + 4 * (10**8 + 10**9) <= 16 * GIB


def test_the_context_that_was_asked_for_is_the_context_that_there_is() -> None:
    resolved = resolve(EngineConfig(max_context=200, max_batch=1), LAPTOP)
    assert (resolved.max_context, resolved.kv_blocks) == (200, 2)
    eight = resolve(EngineConfig(max_context=100, max_batch=8), LAPTOP)
    assert (eight.kv_blocks, reason(eight, "kv_memory")) == (8, "holds 8 sequences of 100 tokens")


def test_less_than_one_block_of_keys_and_values_is_an_error_that_names_its_size() -> None:
    with pytest.raises(CapacityError, match=r"128 tokens take 4\.88 MiB"):
        resolve(EngineConfig(kv_memory="1MiB"), LAPTOP)


@pytest.mark.parametrize("pin", ["0", "1GiB"])
def test_page_locked_memory_without_a_gpu_is_refused(pin: str) -> None:
    with pytest.raises(ConfigError, match="only a GPU copies from page-locked memory") as caught:
        resolve(EngineConfig(pin=pin), LAPTOP)
    assert "leave pin out" in caught.value.fix
    with pytest.raises(ConfigError, match="the device is cpu"):
        resolve(EngineConfig(pin=pin, device="cpu"), WORKSTATION)
    assert resolve(EngineConfig(pin=pin), WORKSTATION).device == "cuda"


def test_on_a_gpu_the_experts_beside_the_cache_count_as_they_are_packed() -> None:
    """12 GB of experts in bfloat16 leave 2 GB less than an eighth; as int4 they leave half of 20 GB."""
    large = replace(WORKSTATION, expert_parameters=10**10, model_context=10**6)
    as_bf16 = resolve(EngineConfig(), large).kv_memory_bytes
    as_int4 = resolve(EngineConfig(), replace(large, expert_block_bytes=53 * 10**8)).kv_memory_bytes
    left = 24 * GIB - 2 * 10**9
    assert as_bf16 <= left // 8 or as_bf16 <= (left - 2 * 10**10) // 2
    assert left // 8 < as_int4 <= (left - 53 * 10**8) // 2
    on_cpu = replace(large, expert_block_bytes=53 * 10**8)
    config = EngineConfig(device="cpu", dtype="bfloat16")
    assert resolve(config, on_cpu).kv_memory_bytes == resolve(config, large).kv_memory_bytes  # compute-ready there
