"""Held-out streams for the reuse forecast: who misses how much, at four residencies.

S streams of T tokens, L layers, n experts of all layers.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.predictor_material import CONTEXT
from steerpipe.predict.records import PackedTrace
from steerpipe.predict.reuse import LiveReuse, ReuseForecast, normed, tap_inputs
from steerpipe.store.policies import Reuse
from steerpipe.trace.live import TokenSequence, windows
from steerpipe.train.reuse import gather_states
from steerpipe.train.reuse_cache import Ranking, hot_streams, miss_rates, streams_of

SHARES = (0.125, 0.25, 0.4, 0.5)
WARMUP_TOKENS = 200


def answer_rows(trace: PackedTrace, sequences: Sequence[TokenSequence], openings: Mapping[str, int]) -> Tensor:
    """[N] bool: tokens that nano generated; the others are documents and prompts."""
    pieces = list(windows(sequences, CONTEXT))
    first = [piece.prompt_tokens - openings[piece.prompt] if piece.prompt in openings else CONTEXT for piece in pieces]
    return trace.place >= torch.tensor(first, device=trace.device)[trace.sequence]


def document_rows(trace: PackedTrace, sequences: Sequence[TokenSequence], openings: Mapping[str, int]) -> Tensor:
    """[N] bool: tokens of documents, as if each had been decoded."""
    chat = [piece.prompt in openings for piece in windows(sequences, CONTEXT)]
    return ~torch.tensor(chat, device=trace.device)[trace.sequence]


@dataclass(frozen=True)
class CacheStreams:
    """Some rows of a trace, as equal streams: each is one person's, whose cache goes on from text to text."""

    trace: PackedTrace
    rows: Tensor  # [S, T]
    experts: Tensor  # [S, T, L, k]
    hot: Tensor  # [S, T, n]

    @classmethod
    def of(cls, trace: PackedTrace, rows: Tensor, streams: int, tokens: int) -> "CacheStreams":
        """The first `streams` x `tokens` rows of the mask, or as many as there are."""
        chosen = torch.nonzero(rows).flatten()[: streams * tokens]
        experts = streams_of(trace.experts[chosen], streams)
        numbers = chosen[: streams * experts.shape[1]].view(streams, -1)
        return cls(trace, numbers, experts, hot_streams(experts, trace.geometry.experts))

    @property
    def layers(self) -> int:
        return self.trace.geometry.layers

    @property
    def tokens(self) -> int:
        return self.rows.numel()

    def rates(self, rankings: Mapping[str, Ranking]) -> dict[str, list[float]]:
        """Miss rates by ranking, at SHARES."""
        per_layer = self.trace.geometry.experts
        slots = [round(share * self.layers * per_layer) for share in SHARES]
        warmup = min(WARMUP_TOKENS, self.rows.shape[1] // 4)
        found = miss_rates(self.experts, per_layer, list(rankings.values()), slots, warmup).tolist()
        return dict(zip(rankings, found, strict=True))


class StreamForecasts:
    """What a forecast says along the streams, made when asked for."""

    def __init__(self, forecast: ReuseForecast, streams: CacheStreams) -> None:
        self._forecast, self._rows = forecast, streams.rows
        self._states, self._means = gather_states(streams.trace, forecast.config)

    def at(self, number: int, layer: int) -> Tensor | None:
        if layer not in self._states:
            return None
        rows = self._rows[:, number]
        inputs = tap_inputs(normed(self._states[layer][rows]), self._means[layer][rows])
        return self._forecast.scores(self._forecast.config.taps.index(layer), inputs)


def closed_shares(rates: Mapping[str, Sequence[float]], lfru: Sequence[float]) -> dict[str, list[float]]:
    """How much of the gap between LFRU and Belady each ranking closes, at SHARES."""
    return {
        name: [
            round((past - own) / (past - best), 4) for past, own, best in zip(lfru, row, rates["belady"], strict=True)
        ]
        for name, row in rates.items()
    }


def microseconds(forecast: ReuseForecast, rounds: int = 200) -> dict[str, float]:
    """Median of one token: all taps on the forecast's own device and on one CPU thread, and telling a policy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    found = {"policy": 0.0}
    for device in {"cpu", forecast.bias.device.type}:
        live = LiveReuse(forecast.to(device))
        residual = torch.randn(1, forecast.config.hidden, device=device)
        policy = Reuse(forecast.bias.shape[1], forecast.config.count_tokens)
        forecasting, telling = [], []
        for _ in range(rounds):
            begin = time.perf_counter()
            said = torch.stack([told for tap in live.taps if (told := live.at(tap, residual)) is not None]).cpu()
            middle = time.perf_counter()
            for number, each in enumerate(said.numpy()):
                policy.expect(each, float(number))
            forecasting.append(middle - begin)
            telling.append(time.perf_counter() - middle)
        found[device] = round(1e6 * statistics.median(forecasting), 1)
        found["policy"] = round(1e6 * statistics.median(telling), 1)
    torch.set_num_threads(threads)
    return found
