"""Who is evicted first. Pure; over dense numbers (positions in the table's list of experts). `now` counts tokens.

A policy hears of every use, also of experts that have no slot, so what it learnt outlives an eviction.
With a quarter of 24 x 60 experts (top-4) resident, LRU hits 46 %, LFRU 52 % and Belady, who knows the future, 73 %.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from steerpipe.core.errors import ConfigError

HALF_LIFE_TOKENS = 32.0  # of a use's weight in LFRU
LEAST_COUNT = 2.0**-4  # added to the counts that a reuse forecast is weighed against: who was not used lately is equal
POLICIES = ("lru", "lfru", "forecast", "reuse", "belady")


class Policy(Protocol):
    """Knows the uses so far; names the one that is missed least."""

    def touch(self, number: int, now: float) -> None:
        """A use. `now` never goes back. O(1)."""
        ...

    def touch_many(self, numbers: Sequence[int], now: float) -> None:
        """As `touch` for each, all different; of eight at once for little more than the price of one."""
        ...

    def victims(self, candidates: NDArray[np.int64], count: int, now: float) -> list[int]:
        """Whom `victim` would name one after the other if nothing were used meanwhile: at most `count`."""
        ...

    def victim(self, candidates: NDArray[np.int64], now: float) -> int:
        """One of `candidates` (ascending, at least one); of equals the lowest number. Changes nothing."""
        ...


class _Ranked:
    """Every expert has a score: the lowest goes first, of equals the lowest number."""

    def scores(self, candidates: NDArray[np.int64], now: float) -> NDArray[np.float64]:
        raise NotImplementedError

    def victim(self, candidates: NDArray[np.int64], now: float) -> int:
        return int(candidates[self.scores(candidates, now).argmin()])

    def victims(self, candidates: NDArray[np.int64], count: int, now: float) -> list[int]:
        scores = self.scores(candidates, now).copy()
        chosen: dict[int, None] = {}
        for _ in range(min(count, len(candidates))):  # ten times the least of 2,000: half of what a partition takes
            lowest = scores.argmin()
            chosen[int(candidates[lowest])] = None
            scores[lowest] = np.inf
        return list(chosen)


class Lru(_Ranked):
    """The one whose last use is longest ago."""

    def __init__(self, experts: int) -> None:
        self._last: NDArray[np.float64] = np.full(experts, -np.inf)

    def touch(self, number: int, now: float) -> None:
        self._last[number] = now

    def touch_many(self, numbers: Sequence[int], now: float) -> None:
        self._last[list(numbers)] = now

    def scores(self, candidates: NDArray[np.int64], now: float) -> NDArray[np.float64]:
        return self._last[candidates]


class Lfru(_Ranked):
    """The least frequently used, where a use's weight halves every `half_life_tokens`.

    Held as log2 of sum(2 ** (time / half life)): ages alike for all experts, so nothing is ever aged, and nothing
    overflows. The decayed count at `now` is 2 ** (held - now / half life).
    """

    def __init__(self, experts: int, half_life_tokens: float = HALF_LIFE_TOKENS) -> None:
        assert half_life_tokens > 0, f"a half-life of {half_life_tokens} tokens"
        self._half_life = half_life_tokens
        self._weight: NDArray[np.float64] = np.full(experts, -np.inf)

    def touch(self, number: int, now: float) -> None:
        held, added = float(self._weight[number]), now / self._half_life
        larger, smaller = (held, added) if held > added else (added, held)
        self._weight[number] = larger + math.log2(1.0 + 2.0 ** (smaller - larger))

    def touch_many(self, numbers: Sequence[int], now: float) -> None:
        those = np.array(numbers, dtype=np.int64)
        self._weight[those] = np.logaddexp2(self._weight[those], now / self._half_life)

    def scores(self, candidates: NDArray[np.int64], now: float) -> NDArray[np.float64]:
        return self._weight[candidates]

    def counts(self, now: float) -> NDArray[np.float64]:
        """[experts]: decayed number of uses at `now` (no use later than that): what a profile keeps."""
        return np.exp2(self._weight - now / self._half_life)

    def restore(self, counts: NDArray[np.float64], now: float) -> None:
        """Takes over what `counts` gave in an earlier run, as if it were of `now`."""
        assert counts.shape == self._weight.shape, f"counts of {counts.shape} for {len(self._weight)} experts"
        with np.errstate(divide="ignore"):  # log2(0): never used
            self._weight[:] = np.log2(counts) + now / self._half_life

    def anticipate(self, numbers: NDArray[np.int64], uses: NDArray[np.floating], now: float) -> None:
        """So many uses are expected soon: they count as if they had been, where fewer were. Twice is once."""
        with np.errstate(divide="ignore"):
            told = np.log2(uses) + now / self._half_life
        self._weight[numbers] = np.maximum(self._weight[numbers], told)

    def expected_use(self, candidates: NDArray[np.int64], now: float) -> NDArray[np.float64]:
        """When each is used next if uses go on at their decayed rate: a rate r gathers r * half life / ln 2 counts."""
        gap = np.exp2(np.minimum(now / self._half_life - self._weight[candidates], 512.0))
        return now + gap * (self._half_life / math.log(2.0))


class ForecastAware(_Ranked):
    """The one whose next use is expected last: as somebody forecast it, else as LFRU's rate says.

    A forecast holds until its expert is used or its time has passed, and is replaced by a later one.
    """

    def __init__(self, experts: int, half_life_tokens: float = HALF_LIFE_TOKENS) -> None:
        self._past = Lfru(experts, half_life_tokens)
        self._next: NDArray[np.float64] = np.full(experts, -np.inf)  # in the past: unknown

    def forecast(self, numbers: NDArray[np.int64], next_use: NDArray[np.float64]) -> None:
        """Expected time of the next use of each of `numbers`, on the clock of `now`; inf: not in sight."""
        self._next[numbers] = next_use

    def touch(self, number: int, now: float) -> None:
        self._past.touch(number, now)
        self._next[number] = -np.inf

    def touch_many(self, numbers: Sequence[int], now: float) -> None:
        self._past.touch_many(numbers, now)
        self._next[list(numbers)] = -np.inf

    def scores(self, candidates: NDArray[np.int64], now: float) -> NDArray[np.float64]:
        told = self._next[candidates]
        return -np.where(told >= now, told, self._past.expected_use(candidates, now))


class Reuse(Lfru):
    """LFRU, corrected by a forecast of when each expert is used next: the sum of its log2 count and what was told.

    A forecast (predict.reuse) holds until the next one. While nobody has said anything it is LFRU.
    """

    def __init__(self, experts: int, half_life_tokens: float = HALF_LIFE_TOKENS) -> None:
        super().__init__(experts, half_life_tokens)
        self._told: NDArray[np.float64] | None = None
        self._score: NDArray[np.float64] = np.zeros(experts)

    def expect(self, scores: NDArray[np.floating], now: float) -> None:
        """[experts]: how soon each is used again, in doublings of its count. One pass over all experts."""
        assert scores.shape == self._weight.shape, f"scores of {scores.shape} for {len(self._weight)} experts"
        self._told = scores.astype(np.float64)
        self._score = self._told + np.log2(self.counts(now) + LEAST_COUNT)

    def forget(self) -> None:
        """What was told is of a text that has ended: LFRU until somebody says something new."""
        self._told = None

    def touch(self, number: int, now: float) -> None:
        self.touch_many([number], now)

    def touch_many(self, numbers: Sequence[int], now: float) -> None:
        those, age = np.array(numbers, dtype=np.int64), now / self._half_life
        weight = self._weight[those] = np.logaddexp2(self._weight[those], age)
        if self._told is not None:
            self._score[those] = self._told[those] + np.log2(np.exp2(weight - age) + LEAST_COUNT)

    def scores(self, candidates: NDArray[np.int64], now: float) -> NDArray[np.float64]:
        return super().scores(candidates, now) if self._told is None else self._score[candidates]


class Belady(_Ranked):
    """The one whose next use is farthest, from a recorded future: the bound that no policy beats. For replay."""

    def __init__(self, experts: int, uses: Iterable[tuple[int, float]]) -> None:
        """`uses`: (number, time) of every use to come, in order of time; `touch` is told of the same ones."""
        self._later: list[list[float]] = [[math.inf] for _ in range(experts)]
        for number, time in uses:
            self._later[number].append(time)
        for times in self._later:  # soonest last, so that a use is a pop; at the bottom stands "never again"
            times[1:] = times[:0:-1]
        self._next: NDArray[np.float64] = np.array([times[-1] for times in self._later], dtype=np.float64)

    def touch(self, number: int, now: float) -> None:
        times = self._later[number]
        while times[-1] <= now:
            times.pop()
        self._next[number] = times[-1]

    def touch_many(self, numbers: Sequence[int], now: float) -> None:
        for number in numbers:
            self.touch(number, now)

    def scores(self, candidates: NDArray[np.int64], now: float) -> NDArray[np.float64]:
        return -self._next[candidates]


def make_policy(
    name: str,
    experts: int,
    *,
    half_life_tokens: float = HALF_LIFE_TOKENS,
    uses: Iterable[tuple[int, float]] | None = None,
) -> Policy:
    """The policy called `name`, for a table of that many experts. `uses`: the recorded future, which belady needs."""
    if half_life_tokens <= 0:
        raise ConfigError(f"a half-life of {half_life_tokens} tokens", fix="give a half-life above 0, such as 32")
    match name:
        case "lru":
            return Lru(experts)
        case "lfru":
            return Lfru(experts, half_life_tokens)
        case "forecast":
            return ForecastAware(experts, half_life_tokens)
        case "reuse":
            return Reuse(experts, half_life_tokens)
        case "belady" if uses is not None:
            return Belady(experts, uses)
        case "belady":
            raise ConfigError("belady needs the future", fix="use it with a recorded trace, or lfru on a live system")
    raise ConfigError(f"{name!r} is not an eviction policy", fix=f"give one of {', '.join(POLICIES)}")
