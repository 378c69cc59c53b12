"""Settles what a person left open, from the facts of the machine and the model. Pure: no torch, no environment."""

from dataclasses import dataclass
from typing import Literal

from steerpipe.core.budget import refuse_pin
from steerpipe.core.config import SHARED, EngineConfig
from steerpipe.core.errors import CapacityError, ConfigError
from steerpipe.core.geometry import KV_BLOCK_TOKENS
from steerpipe.core.units import format_bytes, parse_bytes

# Elements. A 16-row product with so many took 112 us on one core and 77 us on two, but 16 ms where one of the two was
# busy (two EPYC cores, fp32); a one-row product takes 24 us either way.
SMALL_MATRIX = 1 << 18
ITEM_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class Facts:
    """What `resolve` needs to know; whoever has torch and the checkpoint's header fills it in."""

    has_cuda: bool
    has_native_bf16: bool  # the CPU multiplies bf16 in hardware
    core_count: int  # cores that this process may use
    free_ram_bytes: int
    free_cuda_bytes: int  # 0 without CUDA
    stored_dtype: str  # of the checkpoint, "bfloat16" for instance
    resident_parameters: int  # that always lie in the device's memory: all but the routed experts
    model_context: int  # tokens that the model was made for
    kv_elements_per_token: int  # keys and values of all layers
    expert_parameters: int = 0  # of all routed experts, which may come and go
    expert_block_bytes: int | None = None  # all of them as packed, which is how a GPU holds them; None: unknown
    layer_matrix_elements: int = 1 << 20  # the largest matrix inside a layer


@dataclass(frozen=True, slots=True)
class Choice:
    """One settled value and why; the run logs them."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """Settings with nothing left open."""

    dtype: Literal["float32", "bfloat16"]
    device: Literal["cpu", "cuda"]
    threads: int
    max_context: int
    prefill_chunk: int
    kv_memory_bytes: int  # whole blocks
    kv_blocks: int
    max_batch: int
    choices: tuple[Choice, ...]


def resolve(config: EngineConfig, facts: Facts) -> ResolvedConfig:
    """Raises ConfigError where a setting is impossible here, CapacityError where the memory is too small."""
    device, device_reason = _device(config, facts)
    if device == "cpu":
        refuse_pin(config)
    dtype, dtype_reason = _dtype(config, facts, device)
    threads, threads_reason = _threads(config, facts)
    block_bytes = facts.kv_elements_per_token * ITEM_BYTES[dtype] * KV_BLOCK_TOKENS
    kv_limit, kv_reason = _kv_limit(config, facts, device, dtype)
    blocks = kv_limit // block_bytes
    context, context_reason = _context(config, facts, blocks * KV_BLOCK_TOKENS, block_bytes)
    wanted = config.max_batch * -(-context // KV_BLOCK_TOKENS)
    if config.kv_memory in (None, SHARED) and wanted <= blocks:
        blocks, kv_reason = wanted, f"holds {config.max_batch} sequences of {context} tokens"
    return ResolvedConfig(
        dtype=dtype,
        device=device,
        threads=threads,
        max_context=context,
        prefill_chunk=config.prefill_chunk,
        kv_memory_bytes=blocks * block_bytes,
        kv_blocks=blocks,
        max_batch=config.max_batch,
        choices=(
            Choice("device", device, device_reason),
            Choice("dtype", dtype, dtype_reason),
            Choice("threads", str(threads), threads_reason),
            Choice("max_context", str(context), context_reason),
            Choice("kv_memory", format_bytes(blocks * block_bytes), kv_reason),
        ),
    )


def _device(config: EngineConfig, facts: Facts) -> tuple[Literal["cpu", "cuda"], str]:
    if config.device == "auto":
        return ("cuda", "torch sees a CUDA device") if facts.has_cuda else ("cpu", "torch sees no CUDA device")
    if config.device == "cuda" and not facts.has_cuda:
        raise ConfigError(
            "device is cuda, but torch sees no CUDA device",
            fix="leave device at auto, or let `steerpipe doctor` say what torch lacks",
        )
    return config.device, "as set"


def _dtype(config: EngineConfig, facts: Facts, device: str) -> tuple[Literal["float32", "bfloat16"], str]:
    if config.dtype != "auto":
        return config.dtype, "as set"
    if device == "cuda":
        return "bfloat16", "the native format of CUDA devices"
    need = (facts.resident_parameters + facts.expert_parameters) * ITEM_BYTES["float32"]
    if facts.stored_dtype != "bfloat16":
        return "float32", f"exact for weights stored as {facts.stored_dtype}, and the fastest on most CPUs"
    if need <= facts.free_ram_bytes:
        return "float32", f"the fastest on most CPUs, and {format_bytes(need)} of weights fit in memory"
    speed = "in hardware" if facts.has_native_bf16 else "slowly, by emulation"
    free = format_bytes(facts.free_ram_bytes)
    return "bfloat16", f"as stored: in float32 {format_bytes(need)} would not fit in {free}; the CPU does it {speed}"


def _threads(config: EngineConfig, facts: Facts) -> tuple[int, str]:
    if config.threads is not None:
        return config.threads, "as set"
    if facts.layer_matrix_elements < SMALL_MATRIX:
        return 1, "the model's matrices are so small that a second thread risks more than it saves"
    return facts.core_count, "one per usable core"


def _kv_limit(config: EngineConfig, facts: Facts, device: str, dtype: str) -> tuple[int, str]:
    """The most bytes that the KV cache may take."""
    if config.kv_memory == SHARED:
        asked = _fast_bytes(config, facts, device, dtype)
        if asked is not None:
            return asked // 2, "half of the fast memory, whose pages it shares with experts"
    elif config.kv_memory is not None:
        return parse_bytes(config.kv_memory), "as set"
    free = facts.free_cuda_bytes if device == "cuda" else facts.free_ram_bytes
    left = free - facts.resident_parameters * ITEM_BYTES[dtype]
    beside_all_experts = left - _expert_bytes(facts, device, dtype)
    if beside_all_experts // 2 >= left // 8:
        return max(0, beside_all_experts // 2), "half of the memory that the weights leave free"
    return max(0, left // 8), "an eighth of the memory that experts and keys and values share"


def _fast_bytes(config: EngineConfig, facts: Facts, device: str, dtype: str) -> int | None:
    """What was asked for as memory of experts; None: nothing in particular. On a GPU `ram` lies behind it."""
    if config.fast_memory == "auto":
        return None if config.ram is None or device == "cuda" else parse_bytes(config.ram)
    if config.fast_memory.endswith("%"):
        return int(_expert_bytes(facts, device, dtype) * float(config.fast_memory[:-1]) / 100)
    return parse_bytes(config.fast_memory)


def _expert_bytes(facts: Facts, device: str, dtype: str) -> int:
    """All of them, as the device holds them."""
    packed = facts.expert_block_bytes if device == "cuda" else None
    return packed or facts.expert_parameters * ITEM_BYTES[dtype]


def _context(config: EngineConfig, facts: Facts, tokens_that_fit: int, block_bytes: int) -> tuple[int, str]:
    wanted = facts.model_context if config.max_context is None else config.max_context
    if wanted > facts.model_context:
        raise ConfigError(
            f"max_context is {wanted}, but the model was made for {facts.model_context} tokens",
            fix=f"set max_context to {facts.model_context} or less",
        )
    if wanted <= tokens_that_fit:
        return wanted, "the model's own limit" if config.max_context is None else "as set"
    if config.max_context is not None or tokens_that_fit == 0:
        raise CapacityError(
            f"the KV cache has room for {tokens_that_fit} tokens; one sequence of {wanted} is wanted "
            f"({KV_BLOCK_TOKENS} tokens take {format_bytes(block_bytes)})",
            fix="raise kv_memory (where it is shared: fast_memory), lower max_context, or free memory",
        )
    return tokens_that_fit, f"what the KV cache holds; the model's own limit is {facts.model_context}"
