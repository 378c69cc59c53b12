"""Default vectors that are learnt while a model answers are those of all tokens at once."""

import torch
from torch import Tensor

from steerpipe.predict.records import Geometry
from steerpipe.predict.running_defaults import LEAST_MET, PSEUDO_TOKENS, RunningDefaults

LAYERS, EXPERTS, TOP_K, HIDDEN = 2, 5, 2, 3
GEOMETRY = Geometry(LAYERS, EXPERTS, TOP_K, HIDDEN)


def routed(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Experts [V, k], the last one never; outputs [V, k, H]."""
    draw = torch.Generator().manual_seed(seed)
    experts = torch.stack([torch.randperm(EXPERTS - 1, generator=draw)[:TOP_K] for _ in range(rows)])
    return experts, torch.randn(rows, TOP_K, HIDDEN, generator=draw)


def learnt(passes: list[tuple[Tensor, Tensor]], known: RunningDefaults | None = None) -> RunningDefaults:
    running = known or RunningDefaults.nothing(GEOMETRY)
    for experts, outputs in passes:
        for layer in range(LAYERS):
            running.add(layer, experts, outputs * (layer + 1))
    return running


def test_a_vector_is_the_mean_of_what_its_expert_gave() -> None:
    passes = [routed(7, 0), routed(1, 1)]
    running = learnt(passes)
    experts, outputs = (torch.cat(each) for each in zip(*passes, strict=True))
    for layer in range(LAYERS):
        for expert in range(EXPERTS - 1):
            own = outputs[experts == expert] * (layer + 1)
            assert int(running.counts[layer, expert]) == len(own) > 0
            torch.testing.assert_close(running.means().vectors[layer, expert], own.mean(0))
    assert running.tokens(TOP_K) == 8


def test_who_was_never_seen_is_the_mean_of_the_layer() -> None:
    running = learnt([routed(9, 2)])
    layer = running.sums[0].sum(0) / running.counts[0].sum()
    torch.testing.assert_close(running.means().vectors[0, -1], layer)
    torch.testing.assert_close(running.drawn().vectors[0, -1], layer)


def test_who_was_seen_seldom_is_drawn_to_the_mean_of_the_layer() -> None:
    running = learnt([routed(9, 3)])
    own, count = running.means().vectors[1, 0], float(running.counts[1, 0])
    layer = running.sums[1].sum(0) / running.counts[1].sum()
    expected = (own * count + layer * PSEUDO_TOKENS) / (count + PSEUDO_TOKENS)
    torch.testing.assert_close(running.drawn().vectors[1, 0], expected)


def test_a_run_goes_on_where_the_one_before_ended() -> None:
    first, second = routed(6, 4), routed(5, 5)
    again = learnt([second], RunningDefaults.of(learnt([first]).means()))
    whole = learnt([first, second])
    torch.testing.assert_close(again.means().vectors, whole.means().vectors)
    assert torch.equal(again.counts, whole.counts)


def test_nothing_is_nothing_and_no_division_by_it() -> None:
    nothing = RunningDefaults.nothing(GEOMETRY)
    assert nothing.tokens(TOP_K) == 0
    assert not nothing.means().vectors.any() and not nothing.drawn().vectors.any()


def test_who_was_seen_seldom_is_not_kept() -> None:
    running = learnt([routed(15, 6)])
    kept, means = running.often(), running.means()
    known = running.counts >= LEAST_MET
    assert known.any() and not known[:, :-1].all()
    assert torch.equal(kept.counts, running.counts * known) and torch.equal(kept.vectors[known], means.vectors[known])
