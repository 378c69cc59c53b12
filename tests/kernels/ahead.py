"""Compiles what wrappers would launch, for an H200, on a machine without a GPU: the interpreter does not see types.

    python -m tests.kernels.ahead        prints a line per kernel

Runs in a process of its own, where Triton is not interpreted. Wrappers are called with CPU tensors that hold nothing.
"""

import os
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from steerpipe.kernels.attention import decode_attention, scratch_for
from steerpipe.kernels.attention_prefill import prefill_attention
from steerpipe.kernels.clock import write_time
from steerpipe.kernels.combine import combine
from steerpipe.kernels.foretell import Asked, Correction, HeadInputs, foretell, look
from steerpipe.kernels.history import Kept, TransformerKernels
from steerpipe.kernels.hold import hold
from steerpipe.kernels.linear import gated, row_gated_linear, row_linear
from steerpipe.kernels.norm import rms_norm
from steerpipe.kernels.rotary import rotate_and_store
from steerpipe.kernels.router import Tickets, route
from steerpipe.kernels.tiles import align_tiles, tiles_for
from steerpipe.predict.trajectory_networks import ExpertTransformer

POINTERS = {"bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32", "int32": "*i32", "int64": "*i64"}
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
EPS = 1e-6


def compile_instead(kernel: Any, *given: Any, grid: object, warmup: bool, **named: Any) -> None:
    """Takes the place of JITFunction.run; overlapped launches are compiled too."""
    values = dict(zip(kernel.arg_names, given, strict=False)) | named
    options = {name: values.pop(name) for name in named if name not in kernel.arg_names}
    compile_kernel(kernel, values, options)
    if "OVERLAP" in values:
        compile_kernel(kernel, values | {"OVERLAP": True}, options | {"launch_pdl": True})


def compile_kernel(kernel: Any, values: dict[str, Any], options: dict[str, Any]) -> None:
    """With types and alignment as a launch would find them."""
    signature, constants, hints = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        if isinstance(value, Tensor):
            signature[parameter.name] = POINTERS[str(value.dtype).removeprefix("torch.")]
        elif parameter.is_constexpr or value is None or value == 1:
            signature[parameter.name], constants[index,] = "constexpr", value
            continue
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
        if isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0):
            hints[index,] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, hints)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    print(kernel.__name__, len(compiled.asm["cubin"]), flush=True)


def empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def linears() -> None:
    x, norm, out = empty(1, 2048), empty(2048), empty(1, 2048)
    row_linear(x, empty(5120, 2048), out=empty(1, 5120), norm=norm, eps=EPS, bias=empty(5120))
    row_linear(empty(1, 4096), empty(2048, 4096), out=out, residual=out)
    row_linear(x, empty(60, 2048, dtype=FP32), out=empty(1, 60, dtype=FP32), norm=norm, normed=out, eps=EPS)
    row_linear(empty(1, 5632), empty(577, 5632), out=empty(1, 577))
    row_linear(empty(1, 192, dtype=FP32), empty(1, 192, dtype=FP32), out=empty(1, 1, dtype=FP32))
    row_gated_linear(x, empty(11_264, 2048), out=empty(1, 5632))
    gated(empty(16, 160), out=empty(16, 80))
    rms_norm(empty(16, 2048), norm, EPS, out=empty(16, 2048))


def attentions() -> None:
    shapes = ((32, 4, 128, BF16, None), (16, 16, 128, BF16, 99), (6, 2, 80, FP16, None), (6, 2, 64, FP32, None))
    for heads, kv_heads, head_dim, dtype, window in shapes:
        place = {"kv_heads": kv_heads, "layer_bytes": 32_768}
        blocks, positions = empty(1, 9, dtype=torch.int64), empty(16, dtype=torch.int64)
        qkv, turn = empty(16, (heads + 2 * kv_heads) * head_dim, dtype=dtype), empty(16, 2, head_dim // 2, dtype=FP32)
        queries, out = empty(16, heads, head_dim, dtype=dtype), empty(16, heads * head_dim, dtype=dtype)
        scratch = scratch_for(16, heads, head_dim, 64, out.device)
        for many in ((0, 0), (1, 1), (heads, kv_heads)):
            norms = [empty(n * head_dim, dtype=dtype) if n else None for n in many]
            rotate_and_store(
                qkv, turn, positions, blocks, heads=heads, queries=queries, query_norm=norms[0], key_norm=norms[1],
                eps=EPS, clip=8.0 if many[0] else None, **place,
            )  # fmt: skip
        decode_attention(queries, positions, blocks, window=window, splits=64, scratch=scratch, out=out, **place)
        prefill_attention(queries, positions, blocks, base=0, window=window, out=out, **place)


def experts() -> None:
    for rows, count, top_k in ((1, 128, 8), (32, 60, 4)):
        chosen, gates = empty(rows, top_k, dtype=torch.int32), empty(rows, top_k, dtype=FP32)
        route(
            empty(rows, count, dtype=FP32), top_k=top_k, renormalise=True, experts=chosen, gates=gates,
            positions=empty(rows, dtype=torch.int64), mailbox=empty(rows * top_k, dtype=torch.int64),
            stamp=empty(1, dtype=torch.int64), forced=chosen,
        )  # fmt: skip
        if rows == 1:
            words = [empty(n, dtype=torch.int64) for n in (count, 64, 1, 1, top_k, top_k)]
            route(
                empty(rows, count, dtype=FP32), top_k=top_k, renormalise=True, experts=chosen, gates=gates,
                positions=empty(rows, dtype=torch.int64), mailbox=empty(rows * top_k, dtype=torch.int64),
                stamp=empty(1, dtype=torch.int64), tickets=Tickets(*words),
            )  # fmt: skip
        x = empty(rows, 2048)
        combine(empty(rows * top_k, 2048, dtype=FP32), chosen, gates, x, out=x, shared=x, shared_switch=empty(rows, 1))
    for rows, count, top_k in ((512, 128, 8), (17, 60, 3)):
        tiles = tiles_for(rows, top_k, count)
        align_tiles(
            empty(rows, top_k, dtype=torch.int32), counts=empty(count, dtype=torch.int32),
            tile_expert=empty(tiles, dtype=torch.int32), tile_pairs=empty(tiles, 16, dtype=torch.int32),
        )  # fmt: skip


def taps() -> None:
    for dtype, rank, shared in ((BF16, 256, True), (FP32, 56, False)):
        x, chosen, gates = empty(1, 2048, dtype=dtype), empty(1, 4, dtype=torch.int32), empty(1, 4, dtype=FP32)
        rows = empty(24, 2 * 2048 + 2 * 60, dtype=dtype)
        given = (x, empty(1, 1, dtype=dtype)) if shared else (None, None)
        look(x, *given, x, chosen, gates, state=x, inputs=HeadInputs(rows, own=1, target=2) if shared else None)
        head = Correction(empty(1, rank, dtype=dtype), empty(60, rank, dtype=dtype), empty(60, dtype=dtype))
        one, stamp = empty(1, dtype=FP32), empty(1, dtype=torch.int64)
        for commits in (False, True):
            calibrated = one if shared or commits else None
            foretell(
                empty(1, 60, dtype=FP32), head if shared else None, top_k=4, renormalise=commits, scale=calibrated,
                bias=calibrated,
                positions=stamp, stamp=stamp, words=empty(8, dtype=torch.int64), forced=empty(8, dtype=torch.int32),
                asked=None if shared else Asked(empty(2, dtype=torch.int64), 1),
                experts=chosen if commits else None, gates=gates if commits else None,
            )  # fmt: skip
    hold(empty(4, dtype=torch.int32), empty(60, dtype=torch.int64), seen=empty(4, dtype=torch.int64))
    write_time(empty(9, dtype=torch.int64), 3)


def history() -> None:
    for dtype, steps in ((BF16, 10), (FP32, 20)):
        kernels = TransformerKernels(ExpertTransformer(60).to(dtype).state_dict(), steps, 4)
        kernels.answer(empty(24, 4).long(), 23)
        when, one = empty(2, dtype=torch.int64), empty(1, dtype=torch.int64)
        kernels.answer(empty(24, 8, dtype=torch.int32)[:, :4], 23, Kept(empty(1, 60, dtype=FP32), when, one, one))


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET", "0") == "0", "the interpreter compiles nothing"
    JITFunction.run = compile_instead
    linears()
    attentions()
    experts()
    taps()
    history()
