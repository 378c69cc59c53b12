"""Miss rates of many caches at once: the same as one replay after the other."""

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from torch import Tensor

from steerpipe.store.policies import HALF_LIFE_TOKENS
from steerpipe.train.reuse_cache import (
    BeladyRanking,
    LfruRanking,
    LruRanking,
    Ranking,
    ReuseRanking,
    SightedRanking,
    hot_streams,
    miss_rates,
    streams_of,
)
from steerpipe.transfer.machine import Machine
from steerpipe.transfer.recorded import Recording, draw_recording
from steerpipe.transfer.replay import replay
from steerpipe.transfer.synthetic import SyntheticRouting

SLOTS = (24, 60, 100)
WARMUP = 20
TAPS = (2, 5)


@pytest.fixture(scope="module")
def recording() -> Recording:
    return draw_recording(SyntheticRouting(tokens=160, layers=6, experts=32, top_k=4))


def history_rankings(hot: Tensor, layers: int) -> dict[str, Ranking]:
    return {
        "lru": LruRanking(hot, layers),
        "lfru": LfruRanking(hot, layers, HALF_LIFE_TOKENS),
        "belady": BeladyRanking(hot, layers),
    }


def machine(slots: int) -> Machine:
    return Machine(slots, block_bytes=1, link_bytes_per_second=1.0, layer_seconds=0.0)


def rates_of(recording: Recording, rankings: Mapping[str, Ranking], slots: tuple[int, ...] = SLOTS) -> dict[str, float]:
    experts = torch.from_numpy(recording.routing)[None]  # one stream
    found = miss_rates(experts, recording.experts, list(rankings.values()), slots, WARMUP)
    return dict(zip(rankings, found.tolist(), strict=True))


def hot_of(recording: Recording) -> Tensor:
    return hot_streams(torch.from_numpy(recording.routing)[None], recording.experts)


def test_misses_of_lru_lfru_and_belady_are_those_of_replay(recording: Recording) -> None:
    rates = rates_of(recording, history_rankings(hot_of(recording), recording.layers))
    for policy, row in rates.items():
        reports = [replay(recording, machine(slots), policy, warmup_tokens=WARMUP) for slots in SLOTS]
        assert row == pytest.approx([1 - report.hit_rate for report in reports], abs=1e-12), policy


class Scores:
    """Random, but the same for both."""

    def __init__(self, recording: Recording) -> None:
        random = np.random.default_rng(3)
        self.table = random.normal(0, 2, (recording.tokens, len(TAPS), recording.all_experts))

    def at(self, token: int, layer: int) -> np.ndarray | None:
        return self.table[token, TAPS.index(layer)] if layer in TAPS else None


class StreamScores:
    def __init__(self, scores: Scores) -> None:
        self._scores = scores

    def at(self, number: int, layer: int) -> Tensor | None:
        said = self._scores.at(number, layer)
        return None if said is None else torch.from_numpy(said)[None]


def test_misses_of_the_reuse_policy_are_nearly_those_of_replay(recording: Recording) -> None:
    scores = Scores(recording)
    ranking = ReuseRanking(hot_of(recording), recording.layers, HALF_LIFE_TOKENS, StreamScores(scores))
    row = rates_of(recording, {"reuse": ranking})["reuse"]
    reports = [replay(recording, machine(slots), "reuse", reuse=scores, warmup_tokens=WARMUP) for slots in SLOTS]
    # Counts age by layers there and by tokens here: a hair between experts that are nearly equal.
    assert row == pytest.approx([1 - report.hit_rate for report in reports], abs=5e-3)


def test_streams_have_caches_of_their_own(recording: Recording) -> None:
    routing = torch.from_numpy(recording.routing)
    streams = streams_of(routing, 4)
    together = miss_rates(streams, recording.experts, [LruRanking(hot_streams(streams, 32), 6)], SLOTS)
    alone = [
        miss_rates(each[None], recording.experts, [LruRanking(hot_streams(each[None], 32), 6)], SLOTS)
        for each in streams
    ]
    assert together.numpy() == pytest.approx(torch.stack(alone).mean(0).numpy())


def test_streams_cut_what_is_left_over(recording: Recording) -> None:
    streams = streams_of(torch.from_numpy(recording.routing), 3)
    assert streams.shape == (3, 53, 6, 4)
    assert (streams[2, -1].numpy() == recording.routing[158]).all()


def test_the_farther_somebody_sees_the_less_is_missed(recording: Recording) -> None:
    hot, layers = hot_of(recording), recording.layers
    future = BeladyRanking(hot, layers)
    rankings: dict[str, Ranking] = {"lfru": LfruRanking(hot, layers, 32.0), "belady": future}
    for tokens in (0, 4, 1000):
        rankings[f"sees {tokens}"] = SightedRanking(future, LfruRanking(hot, layers, 32.0), layers, tokens)
    rates = {name: row[1] for name, row in rates_of(recording, rankings).items()}
    assert rates["belady"] == rates["sees 1000"] < rates["sees 4"] < rates["sees 0"] < rates["lfru"]
