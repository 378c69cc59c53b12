"""The arithmetic of the data benchmarks on cases that can be counted by hand."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.predictor_corpora import Corpus, draw, taken
from benchmarks.routing_agreement import agreement
from tests.arena.traces import draw as draw_traces
from tests.arena.traces import packed


def test_agreement_counts_experts_sets_and_weight_in_common() -> None:
    (one,) = draw_traces(prompts=1, tokens=2)
    experts = np.array([[[0, 1]] * 4, [[2, 3]] * 4], dtype=np.uint8)  # [2 tokens, 4 layers, 2]
    weights = np.array([[[0.6, 0.2]] * 4, [[0.5, 0.5]] * 4], dtype=np.float16)
    first = replace(one, experts=experts, weights=weights)
    other = experts.copy()
    other[0, 3] = [9, 0]  # layer 3 of token 0: expert 0 stays and is no longer first, expert 1 is gone
    found = agreement({"p": first}, {"p": replace(one, experts=other)})
    assert found["experts_in_common"] == pytest.approx(15 / 16)
    assert found["equal_sets"] == pytest.approx(7 / 8)
    assert found["first_expert_equal"] == pytest.approx(7 / 8)
    assert found["weight_in_common"] == pytest.approx((7 + 0.75) / 8, abs=1e-3)
    assert found["experts_in_common_by_layer"] == [1.0, 1.0, 1.0, 0.75]


def test_rows_are_drawn_from_the_prompts_that_were_named_alone() -> None:
    trace = packed(draw_traces(prompts=3, tokens=10, states=True))
    corpus = Corpus(trace, trace.sequence, ["a", "b", "c"])
    rows = corpus.rows_of(["a", "c"], 8, seed=1)
    assert len(rows) == 8 and len(rows.unique()) == 8
    assert set(trace.sequence[rows].tolist()) <= {0, 2}
    assert torch.equal(rows, corpus.rows_of(["a", "c"], 8, seed=1))
    assert len(corpus.rows_of(["b"], 1 << 60, seed=0)) == 10
    part = taken(trace, draw(rows, 4, seed=0))
    assert part.rows == 4 and part.states is not None
