"""GpuDecoder on the CPU, with kernels in Triton's interpreter (tests/conftest.py asks for it)."""

from dataclasses import replace

import pytest


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes 2 ms a program, whatever it computes: products of one row get few and large ones.

    tests/kernels tries the sizes that a GPU gets.
    """
    from steerpipe.kernels import configs, linear
    from steerpipe.kernels.dense_configs import RowTile

    monkeypatch.setattr(linear, "row_tile", lambda *_: RowTile(rows=64, columns=64, warps=1))
    for kernel, form in configs.LAUNCHES:
        if kernel.startswith("row_"):
            launch = configs.LAUNCHES[kernel, form]
            monkeypatch.setitem(configs.LAUNCHES, (kernel, form), replace(launch, rows=max(16, launch.rows)))
