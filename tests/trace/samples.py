"""Made-up traces: small, deterministic, of any shape."""

from typing import Any

import numpy as np
import torch

from steerpipe.predict.records import Geometry, States, TracedSequence
from steerpipe.trace.header import ModelIdentity, TraceHeader, TraceOptions

GEOMETRY = Geometry(layers=3, experts=8, top_k=2, hidden=4)


def header(geometry: Geometry = GEOMETRY, vocabulary: int = 100, **options: Any) -> TraceHeader:
    settled = TraceOptions(engine="transformers", dtype="float32", max_tokens=64, **options)
    return TraceHeader(ModelIdentity("tiny", "00ff"), geometry, vocabulary, "steerpipe test", settled)


def sequence(
    number: int,
    length: int | None = None,
    prompt: str | None = None,
    of: TraceHeader | None = None,
    shared: bool = True,
) -> TracedSequence:
    """The same for the same number, whatever was drawn before."""
    about = of or header()
    geometry, draw = about.geometry, np.random.default_rng(number)
    rows = length or int(draw.integers(1, 20))
    experts = np.argsort(draw.random((rows, geometry.layers, geometry.experts)), axis=-1)[..., : geometry.top_k]
    weights = draw.random(experts.shape).astype(np.float16) if about.options.weights else None
    return TracedSequence(
        f"prompt-{number}" if prompt is None else prompt,
        draw.integers(0, about.vocabulary, rows).astype(np.int32),
        int(draw.integers(1, rows + 1)),
        experts.astype(np.uint8 if geometry.experts <= 256 else np.uint16),
        weights,
        _states(rows, number, about, shared) if about.options.states else None,
    )


def _states(rows: int, seed: int, about: TraceHeader, shared: bool) -> States:
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, about.geometry.layers, about.geometry.hidden)
    drawn = [torch.randn(shape, generator=generator).to(torch.bfloat16) for _ in range(3)]
    return States(drawn[0], drawn[1], drawn[2] if shared else None)


def assert_same(left: TracedSequence, right: TracedSequence) -> None:
    assert left.prompt == right.prompt and left.prompt_tokens == right.prompt_tokens
    assert np.array_equal(left.tokens, right.tokens) and left.tokens.dtype == right.tokens.dtype
    assert np.array_equal(left.experts, right.experts) and left.experts.dtype == right.experts.dtype
    assert (left.weights is None) == (right.weights is None) and (left.states is None) == (right.states is None)
    if left.weights is not None and right.weights is not None:
        assert np.array_equal(left.weights, right.weights) and left.weights.dtype == np.float16
    if left.states is not None and right.states is not None:
        assert torch.equal(left.states.entering, right.states.entering)
        assert torch.equal(left.states.residual, right.states.residual)
        assert (left.states.shared is None) == (right.states.shared is None)
        if left.states.shared is not None and right.states.shared is not None:
            assert torch.equal(left.states.shared, right.states.shared)
