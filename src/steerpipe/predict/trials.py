"""Which way to run is quickest here, by trying: the measure that keeps prediction from ever making it slower. Pure.

Way 0 is to predict nothing. Ways take turns of a few tokens; the one with the lowest time per token (the median of its
turns' means: a turn in which something else happened says nothing) then runs alone, and the trial is repeated after a
while, each time later as long as it ends the same way. So a predictor that does not pay costs its share of a trial,
then nothing.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

TURN_TOKENS = 8
TRIAL_ROUNDS = 4
FIRST_REST_TOKENS = 256  # between two trials; doubles while they agree
LONGEST_REST_TOKENS = 4096
WATCH_TOKENS = 16
USUAL_RECALL = 0.8  # of the routed experts one layer ahead
MARGIN = 0.01  # a way has to be better than none by this share: less cannot be told from noise


@dataclass(frozen=True, slots=True)
class Verdict:
    """The end of a trial: seconds per token of each way, and the one that runs from now on."""

    names: tuple[str, ...]
    seconds: tuple[float, ...]
    chosen: int

    def line(self) -> str:
        """For the person who runs it."""
        none, best = self.seconds[0], self.seconds[self.chosen]
        if self.chosen:
            saved, times = f"{1 - best / none:.0%} per token", f"{best * 1e3:.2f} instead of {none * 1e3:.2f} ms"
            return f"prediction by {self.names[self.chosen]} saves {saved} ({times}): on"
        rival = min(range(1, len(self.names)), key=lambda way: self.seconds[way])
        change = self.seconds[rival] / none - 1
        return f"prediction does not pay here ({self.names[rival]}: {change:+.0%} per token): off"

    def line_of_the_past(self) -> str:
        """Of an earlier run, with the same settings, by which this one began."""
        if not self.chosen:
            return "prediction did not pay in an earlier run: off for now"
        saved = 1 - self.seconds[self.chosen] / self.seconds[0]
        return f"prediction by {self.names[self.chosen]} saved {saved:.0%} per token in an earlier run: on"


@dataclass(slots=True)
class Watch:
    """A few tokens without prediction: what it could save at most. Perfect forecasts hide the shorter of compute and
    stall behind the longer.
    """

    tokens: int = 0
    seconds: float = 0.0
    waited: float = 0.0

    @property
    def possible(self) -> float:
        """Seconds per token that perfect forecasts would save."""
        return min(self.waited, self.seconds - self.waited) / self.tokens if self.tokens else 0.0

    def observe(self, seconds: float, waited: float) -> bool:
        """One token took so long, of which it stood still for `waited`. True: enough was seen."""
        self.tokens += 1
        self.seconds += seconds
        self.waited += waited
        return self.tokens >= WATCH_TOKENS

    def promises(self, cost_seconds: float) -> bool:
        """Whether a predictor that takes so long per token could pay: if not, it is not even tried."""
        return self.possible * USUAL_RECALL > cost_seconds + MARGIN * self.seconds / self.tokens


def settled(names: Sequence[str]) -> "Trials":
    """Somebody has asked for the first of `names`: it runs, and nothing is ever tried."""
    return Trials(["none", *names], first_rest_tokens=sys.maxsize, chosen=1)


class Trials:
    """Says which way the next token runs (`way`), and is told what it took (`observe`)."""

    def __init__(
        self, names: Sequence[str], *, turn_tokens: int = TURN_TOKENS, rounds: int = TRIAL_ROUNDS,
        first_rest_tokens: int = FIRST_REST_TOKENS, longest_rest_tokens: int = LONGEST_REST_TOKENS,
        settle_tokens: int = 1, chosen: int | None = None,
    ) -> None:  # fmt: skip
        """`names` of the ways; the first is to predict nothing. The first `settle_tokens` of a turn do not count.
        `chosen` by an earlier trial: it runs, and the first one here comes after a rest.
        """
        assert len(names) >= 2, "a trial needs something to compare with"
        assert turn_tokens > settle_tokens >= 1 and rounds >= 1, "the first token of a turn does not count"
        self._names, self._settle_tokens = tuple(names), settle_tokens
        self._turn, self._rounds = turn_tokens, rounds
        self._rest, self._longest = first_rest_tokens, longest_rest_tokens
        self._chosen = chosen  # None: a trial is on
        self._last = chosen  # what the trial before it chose
        self._token = 0  # of the trial, or of the rest
        self._begin_trial()

    @property
    def way(self) -> int:
        return self._chosen if self._chosen is not None else self._token // self._turn % len(self._names)

    @property
    def trying(self) -> bool:
        return self._chosen is None

    def observe(self, seconds: float) -> Verdict | None:
        """One token ran `way` and took so long. A Verdict at the end of a trial."""
        if self._chosen is not None:
            self._token += 1
            if self._token >= self._rest:
                self._last, self._chosen = self._chosen, None
                self._begin_trial()
            return None
        token = self._token % self._turn
        if token == 0:
            self._turns[self.way].append(0.0)
        if token >= self._settle_tokens:  # what the way before it left in the slots is not this one's merit
            self._turns[self.way][-1] += seconds
        self._token += 1
        return None if self.left else self._settle()

    @property
    def tried(self) -> int:
        """Tokens of the trial that is on."""
        return 0 if self._chosen is not None else self._token

    @property
    def left(self) -> int:
        """Tokens until the trial that is on ends; 0: none is on."""
        return 0 if self._chosen is not None else self._turn * self._rounds * len(self._names) - self._token

    def _begin_trial(self) -> None:
        self._token = 0
        self._turns: list[list[float]] = [[] for _ in self._names]  # seconds of each way's turns

    def _settle(self) -> Verdict:
        counted = self._turn - self._settle_tokens
        found = tuple(median(turns) / counted for turns in self._turns)
        best = min(range(len(found)), key=lambda way: found[way])
        chosen = best if found[best] < found[0] * (1 - MARGIN) else 0
        if chosen == self._last:
            self._rest = min(2 * self._rest, self._longest)
        self._chosen, self._token = chosen, 0
        return Verdict(self._names, found, chosen)
