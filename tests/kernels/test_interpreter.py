"""The interpreter that spares work (tests/support/interpreter.py) computes what Triton's own computes."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from steerpipe.kernels.experts import expert_row
from steerpipe.kernels.router import route
from tests.kernels.expert_slots import fill_slots, poisoned
from tests.support.interpreter import spare_vain_work


def computed(kind: str) -> list[Tensor]:
    """Sums, largest ones, integers and every conversion of a format."""
    torch.manual_seed(3)
    slots, experts, gates = fill_slots(kind, 48, 24, 4), torch.zeros(1, 2, dtype=torch.int32), torch.zeros(1, 2)
    route(
        torch.randn(1, 4),
        top_k=2,
        renormalise=True,
        experts=experts,
        gates=gates,
        positions=torch.zeros(1, dtype=torch.int64),
    )
    act, part = poisoned(2, 24), poisoned(2, 48)
    expert_row(torch.randn(1, 48), experts[0], slots.table, slots.form, act=act, part=part)
    return [experts, gates, act, part]


def compare(kinds: list[str]) -> None:
    """In a process of its own, whose interpreter is Triton's until we change it."""
    own = [computed(kind) for kind in kinds]
    spare_vain_work()
    for before, kind in zip(own, kinds, strict=True):
        assert all(map(torch.equal, before, computed(kind))), kind
        assert not any(each.isnan().any() for each in before), "something was computed"


def test_no_bit_depends_on_what_the_interpreter_is_spared() -> None:
    command = [
        sys.executable,
        "-c",
        "from tests.kernels.test_interpreter import compare; compare(['bfloat16', 'int4'])",
    ]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_it_is_spared_here() -> None:
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    assert not interpreter.interpreter_builder.options.sanitize_overflow
    assert not interpreter._patch_lang(computed)._changes
