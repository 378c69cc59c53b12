"""`bench decode` on a GPU, at shapes that take seconds: every residency, format and batch; figures that must agree."""

import pytest
import torch

from steerpipe.bench.decode import run_decode
from steerpipe.bench.options import DecodeOptions
from steerpipe.bench.results import Findings
from steerpipe.bench.shapes import make_shape
from steerpipe.store.formats import ExpertFormat

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def keep(findings: Findings) -> None:
    """Nobody wants the file."""


@pytest.mark.parametrize(("shape", "names"), [("tiny", ("bfloat16", "int8", "int4")), ("nano", ("int4",))])
def test_every_residency_format_and_batch(shape: str, names: tuple[str, ...]) -> None:
    options = DecodeOptions(
        shape=shape, formats=tuple(ExpertFormat(name) for name in names), residencies=(100.0, 50.0, 0.0),
        batches=(1, 3), contexts=(300,), tokens=4, repeats=2, warmup=2, prefill=64,
    )  # fmt: skip
    findings = run_decode(options, lambda text: None, keep)
    assert len(findings.runs) == len(names) * 3 * (2 + 1)
    for run in findings.runs:
        assert run.times.median_ms > 0 and run.floor_ms > 0
        block = make_shape(shape, ExpertFormat(run.format)).layout.block_bytes
        if run.residency == 0 and run.batch == 1 and run.test.startswith("tg") and shape == "nano":
            # the tiny shape's layers are so few that a round of them fits in the slots
            spec = make_shape(shape, ExpertFormat(run.format))
            assert run.hit_rate == 0.0
            assert run.missed_bytes == spec.layers * spec.moe.top_k * block
        assert (run.hit_rate is None) == (run.residency == 100) == (run.driver == "resident")
        if shape == "nano" and run.residency == 50:
            wanted = {"tg4 @ d300": "direct" if run.batch == 1 else "served", "pp64": "leased"}
            assert run.driver == wanted[run.test]
    assert findings.memory_rate > 1e11


def test_the_models_own_routing_runs_too() -> None:
    options = DecodeOptions(shape="nano", residencies=(100.0, 50.0), routing="model", tokens=4, repeats=1, warmup=2)
    assert [run.routing for run in run_decode(options, lambda text: None, keep).runs] == ["model", "model"]
