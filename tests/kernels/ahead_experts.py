"""Compiles one-row expert kernels for an H200 without a GPU: plain, with direct reads, and with blocks partly here.

    python -m tests.kernels.ahead_experts        prints a JSON line per kernel

Runs in a process of its own, where Triton is not interpreted. Bits are the same if both reduce in the same layouts: how
threads share a sum is the compiler's choice, and a load or a store more may change it.
"""

import json
import os
import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from steerpipe.core.blocks import BlockForm
from steerpipe.kernels.configs import launch_for
from steerpipe.kernels.experts_launch import row_constants
from steerpipe.kernels.experts_row import down_row_kernel, gate_up_row_kernel
from steerpipe.store.formats import ExpertFormat
from steerpipe.store.layout import plan_block

OPTIONS = ("num_warps", "num_stages", "launch_pdl")
TYPES = {"x": "*bf16", "act": "*bf16", "experts": "*i32", "part": "*fp32", "running": "*i32"}
TOOL = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
SHAPES = ((2048, 768), (2048, 1408))


READS = ("origin", "target", "since", "stamp", "running")


def compiled(form: BlockForm, *, down: bool, given: int, pairs: int = 4) -> Any:
    kernel = down_row_kernel if down else gate_up_row_kernel
    values = dict(row_constants(form, launch_for("row_down" if down else "row_gate_up", form), down=down, native=True))
    options = {name: values.pop(name) for name in OPTIONS if name in values}
    values |= {"FOLLOWED": given == 5, "EARLY": given != 5, "PAIRS": pairs}
    signature, constants, hints = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        absent = parameter.name in READS[given:]
        if parameter.is_constexpr or absent:
            signature[parameter.name], constants[index,] = "constexpr", values.get(parameter.name)
        else:
            signature[parameter.name] = TYPES.get(parameter.name, "*i64")
            hints[index,] = [["tt.divisibility", 16]]
    return triton.compile(
        ASTSource(kernel, signature, constants, hints), target=GPUTarget("cuda", 90, 32), options=options
    )


def reductions(ttgir: str) -> list[str]:
    """What is summed, with its layout written out."""
    layouts = dict(re.findall(r"^(#\w+) = (#ttg.*)$", ttgir, re.MULTILINE))
    found = re.findall(r'"tt\.reduce".*?\}\) : \((.*?)\) ->', ttgir, re.DOTALL)
    return [re.sub(r"#\w+(?=[>}])", lambda name: layouts.get(name[0], name[0]), each) for each in found]


def stack_bytes(cubin: bytes) -> int:
    """Registers that did not reach."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        told = subprocess.run([TOOL, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return max(int(size) for size in re.findall(r"STACK:(\d+)", told))


def accesses(ptx: str) -> Counter[str]:
    return Counter(re.findall(r"\b((?:ld|st)(?:\.volatile)?\.global[.\w]*)", ptx))


def released(ptx: str) -> list[int]:
    """Of a kernel that releases the next one: 16-byte loads and stores before each time."""
    found, loads, stores = [], 0, 0
    for each in re.findall(r"griddepcontrol\.launch_dependents|(?:ld|st)\.global\.v4\.b32", ptx):
        if each.startswith("grid"):
            found += [loads, stores]
        loads, stores = loads + each.startswith("ld"), stores + each.startswith("st")
    return found


def main() -> None:
    many = compiled(plan_block(ExpertFormat.BFLOAT16, *SHAPES[0]).form, down=False, given=5, pairs=33).asm["ptx"]
    print(json.dumps({"pairs": "%ctaid.y" in many and "trap" not in many}), flush=True)
    for hidden, width in SHAPES:
        for kind in ExpertFormat:
            form = plan_block(kind, hidden, width).form
            for down in (False, True):
                ways = [compiled(form, down=down, given=each) for each in (0, 2, 5)]  # plain, direct, partly fetched
                line = {
                    "kernel": f"{kind.value} {width} {'down' if down else 'gate_up'}",
                    "reductions": [reductions(each.asm["ttgir"]) for each in ways],
                    "stack": [stack_bytes(each.asm["cubin"]) for each in ways],
                    "accesses": [accesses(each.asm["ptx"]) for each in ways],
                    "released": [] if down else released(ways[2].asm["ptx"]),
                }
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET", "0") == "0", "the interpreter compiles nothing"
    main()
