"""RMS norm of several rows against torch."""

import pytest
import torch

from steerpipe.kernels import reference
from steerpipe.kernels.norm import rms_norm


@pytest.mark.parametrize("hidden", [16, 96, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_of_each_row_is_that_of_the_reference(hidden: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(3, hidden).to(dtype), torch.randn(hidden).to(dtype)
    out = torch.full_like(x, torch.nan)
    rms_norm(x, weight, 1e-6, out=out)
    torch.testing.assert_close(out, reference.rms_norm(x, weight, 1e-6))


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    x, weight = torch.randn(2, 96), torch.randn(96)
    alone, beside = torch.empty(1, 96), torch.empty(2, 96)
    rms_norm(x[:1], weight, 1e-6, out=alone)
    x[1] *= 1e6
    rms_norm(x, weight, 1e-6, out=beside)
    assert torch.equal(alone[0], beside[0])
