"""GpuDecoder on the CPU, with kernels in Triton's interpreter (tests/conftest.py asks for it)."""

import pytest


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes 0.3 ms a program, whatever it computes: one-row products get few and large ones."""
    from steerpipe.kernels import linear
    from steerpipe.kernels.dense_configs import RowTile

    monkeypatch.setattr(linear, "row_tile", lambda *_: RowTile(rows=64, columns=64, warps=1))
