"""Routing that benchmarks force: its locality is the published one, and what must miss misses."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from steerpipe.bench.routing import PUBLISHED, Routing, curves, generated, never_again, open_routing, recorded
from steerpipe.bench.shapes import Shape, make_shape
from steerpipe.core.errors import ConfigError, InputError
from steerpipe.store.formats import ExpertFormat
from steerpipe.store.policies import make_policy


def shape(name: str) -> Shape:
    return make_shape(name, ExpertFormat.INT4)


def test_the_generators_hit_rates_are_near_the_published_ones() -> None:
    large = shape("qwen3-30b")
    found = curves(generated(large, 600), large, tokens=600, layers=6)
    rates = {
        (curve.policy, share): rate
        for curve in found
        for share, rate in zip((0.25, 0.4, 0.5), curve.rates, strict=True)
    }
    for point, published in PUBLISHED.items():
        assert rates[point] == pytest.approx(published, abs=0.03), point
    beside = {curve.policy: curve.published for curve in found}
    assert beside == {"lru": (0.70, None, None), "lfru": (None, 0.82, None), "belady": (None, 0.901, None)}


def test_rates_rise_with_the_share_and_nobody_beats_belady() -> None:
    small = shape("nano")
    found = {curve.policy: curve.rates for curve in curves(generated(small, 300), small, tokens=300, layers=4)}
    assert all(list(rates) == sorted(rates) for rates in found.values())
    assert all(
        best >= rate for policy in ("lru", "lfru") for rate, best in zip(found[policy], found["belady"], strict=True)
    )


@pytest.mark.parametrize("name", ["qwen3-30b", "qwen1.5-moe", "olmoe", "mixtral", "nano", "tiny"])
def test_generated_routing_has_the_shapes_geometry_and_distinct_experts(name: str) -> None:
    own = shape(name)
    ids = generated(own, 12).ids
    assert ids.shape == (12, own.layers, own.moe.top_k)
    assert ids.min() >= 0 and ids.max() < own.moe.experts
    ordered = np.sort(ids, axis=-1)
    assert (ordered[..., 1:] > ordered[..., :-1]).all()


def test_equal_seeds_give_equal_routing() -> None:
    assert (generated(shape("tiny"), 20, seed=1).ids == generated(shape("tiny"), 20, seed=1).ids).all()
    assert (generated(shape("tiny"), 20, seed=1).ids != generated(shape("tiny"), 20, seed=2).ids).any()


@pytest.mark.parametrize("policy", ["lru", "lfru"])
@pytest.mark.parametrize("name", ["qwen1.5-moe", "olmoe", "tiny"])
def test_what_must_miss_misses_under_either_policy(name: str, policy: str) -> None:
    own = shape(name)
    routing = never_again(own, 64)
    experts, slots = own.moe.experts, 4 * own.moe.top_k if name != "tiny" else 8
    chooser, held, hits = make_policy(policy, own.all_experts), set[int](), 0
    for token, layers in enumerate(routing.ids.tolist()):
        for layer, chosen in enumerate(layers):
            numbers = [layer * experts + expert for expert in chosen]
            now = token + layer / own.layers
            hits += len(held & set(numbers))
            for number in numbers:
                chooser.touch(number, now)
                if number not in held and len(held) >= slots:
                    idle = np.array(sorted(held - set(numbers)))
                    held.remove(chooser.victim(idle, now))
                held.add(number)
    assert hits == 0


def test_rows_of_a_batch_are_at_different_places_of_the_recording() -> None:
    ids = np.arange(40, dtype=np.int64).reshape(10, 2, 2)  # [tokens, layers, k]
    routing = Routing("made up", ids)
    step = routing.step(3, 2)
    assert step.shape == (2, 2, 2) and step.dtype == np.int32
    assert (step[:, 0] == ids[3]).all() and (step[:, 1] == ids[8]).all()
    assert (routing.step(9, 2)[:, 1] == ids[4]).all()  # it goes round
    assert routing.union(10, 1) == 2.0 and routing.union(10, 2) == 4.0


def test_a_recording_is_taken_where_its_geometry_fits(tmp_path: Path) -> None:
    own = shape("tiny")
    ids = generated(own, 16).ids
    file = tmp_path / "trace.safetensors"
    save_file({"routing": ids.astype(np.int16)}, file)
    assert (recorded(own, file).ids == ids).all()
    found = open_routing(str(file), own, 16)
    assert found is not None and found.name == "trace.safetensors"
    with pytest.raises(ConfigError, match="has 2 layers with top-2; nano has 24 with top-4"):
        recorded(shape("nano"), file)
    with pytest.raises(InputError, match="does not exist"):
        open_routing(str(tmp_path / "absent"), own, 16)


def test_the_models_own_routing_forces_nothing() -> None:
    assert open_routing("model", shape("tiny"), 16) is None
