"""The golden comparison over random configurations. The quick sweep is seeded; the slow one draws anew each time."""

from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, event, given, settings
from hypothesis import strategies as st

from tests.golden.configurations import Configuration, configurations
from tests.support import reference, tiny
from tests.support.running import Recorder, load

FP32 = 1e-4
no_explanation = tuple(phase for phase in Phase if phase is not Phase.explain)  # it takes minutes here
thorough = settings(max_examples=1500, suppress_health_check=list(HealthCheck), phases=no_explanation)
quick = settings(thorough, max_examples=60, derandomize=True, database=None)
lengths = st.integers(1, 100)
seeds = st.integers(0, 2**32 - 1)


def check(configuration: Configuration, length: int, seed: int) -> None:
    family, keys = configuration
    event(family)
    random = Random(seed)
    with TemporaryDirectory() as folder:
        written = tiny.write(tiny.config_of(family, **keys), Path(folder), seed)
        model = load(Path(folder), blocks=4)
    tokens = written.tokens(length, seed)
    want = reference.compute(written.reference, tokens)
    # where two experts tie within rounding, either choice is right and everything after it differs
    assume(all(bool(want.clear_rows(layer, margin=3e-6).all()) for layer in want.experts))
    splits = random.sample(range(length), random.randint(0, length - 1))
    kv, begun = model.pool.sequence(), random.randint(0, length)
    ways = {"whole": lambda sink: model.prefill(tokens, sink=sink)}
    ways["in chunks"] = lambda sink: model.prefill(tokens, splits, sink=sink)
    ways["token by token"] = lambda sink: model.one_row(tokens, sink=sink)
    ways["a prompt, then the batched class"] = lambda sink: torch.cat(
        ([model.prefill(tokens[:begun], kv=kv, sink=sink)] if begun else [])
        + [model.batch([kv], [token], sink=sink) for token in tokens[begun:]]
    )
    for way, run in ways.items():
        sink = Recorder()
        difference = float((run(sink) - want.logits).abs().max())
        assert difference < FP32, f"{way}: logits differ by {difference:.1e}"
        for layer, experts in want.experts.items():
            np.testing.assert_array_equal(sink.experts(layer), experts.numpy(), f"{way}, layer {layer}")


@given(configurations(), lengths, seeds)
@quick
def test_any_configuration_gives_the_logits_and_routing_of_transformers(
    configuration: Configuration, length: int, seed: int
) -> None:
    check(configuration, length, seed)


@pytest.mark.slow
@given(configurations(), lengths, seeds)
@thorough
def test_many_configurations_give_the_logits_and_routing_of_transformers(
    configuration: Configuration, length: int, seed: int
) -> None:
    check(configuration, length, seed)
