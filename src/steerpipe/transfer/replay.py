"""A recorded run on a simulated machine. Pure: no clock but the virtual one, no torch.

Per layer: `layer_seconds` of compute, then the router's decision; what is READY is a hit, what is LOADING (a guess on
its way) is late, what is ABSENT is a miss, which takes `ask_seconds` to ask for (as does the rest of a guess that the
router's decision has stopped). Experts are computed in waves, as by a lease: what is there first, then whatever has
landed. Guesses move in the link's idle time.
"""

import math
from collections.abc import Iterable
from dataclasses import replace
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from steerpipe.core.errors import ConfigError
from steerpipe.core.ids import ExpertId
from steerpipe.core.quality import computed_share
from steerpipe.store.policies import HALF_LIFE_TOKENS, ForecastAware, Policy, Reuse, make_policy
from steerpipe.store.residency import Residency
from steerpipe.transfer.forecasts import Predictor, ReuseScores
from steerpipe.transfer.machine import Machine
from steerpipe.transfer.recorded import Recording
from steerpipe.transfer.replay_counts import Counts, Mark, make_report
from steerpipe.transfer.replay_report import ReplayReport
from steerpipe.transfer.simulated import SimulatedLadder
from steerpipe.transfer.throttle import MOST_SILENT, Throttle


class Keep(Enum):
    """What stays in the fast memory after its use."""

    NOTHING = "on demand"  # every expert is moved for every use
    CACHE = "cache"  # as the policy says
    ALL = "resident"  # everything lies there from the start, whatever the slots


def replay(
    recording: Recording,
    machine: Machine,
    policy: str = "lfru",
    *,
    keep: Keep = Keep.CACHE,
    predictor: Predictor | None = None,
    reuse: ReuseScores | None = None,
    throttled: bool = False,
    by_cpu: bool = False,
    half_life_tokens: float = HALF_LIFE_TOKENS,
    warmup_tokens: int = 0,
    name: str = "",
) -> ReplayReport:
    """Runs every token; the first `warmup_tokens` are left out of the report (at least one token is measured).

    A RAM tier has the same policy; with belady it has LRU, for what reaches the RAM depends on the tier above it.
    `reuse` tells the policy of that name how soon experts are used again. `throttled`: nothing is sent while too few of
    the last guesses were used; else a predictor is shown as it is, however bad. `by_cpu`: the miss policy cpu.
    """
    if (policy == "reuse") != (reuse is not None):
        raise ConfigError("the policy reuse and a reuse forecast go together", fix="give both, or the policy lfru")
    if by_cpu and machine.cpu_seconds is None:
        raise ConfigError("the policy cpu on a machine without one", fix="give it cpu_seconds: --cpu-us")
    costs = machine.looking.tap_seconds or any(machine.looking.tap_more)
    silent = MOST_SILENT if costs else math.inf  # who costs nothing may look on
    throttle = Throttle(most_silent=silent) if throttled else None
    told = machine if by_cpu else replace(machine, cpu_seconds=None)
    run = _Run(recording, told, policy, keep, predictor, throttle, half_life_tokens)
    warmup = max(0, min(warmup_tokens, recording.tokens - 1))
    ends = []
    mark = Mark.of(run.ladder)
    for token in range(recording.tokens):
        if token == warmup:
            mark, run.counts = Mark.of(run.ladder), Counts()
        for layer in range(recording.layers):
            run.layer(token, layer)
            if reuse is not None:
                run.expect(reuse.at(token, layer))
        run.end()
        ends.append(run.ladder.time)
    run.ladder.check_integrity()
    seconds = np.diff(np.array([mark.seconds, *ends[warmup:]]))  # [measured tokens]
    shown = name or (policy if keep is Keep.CACHE else keep.value)
    return make_report(shown, run.ladder, mark, run.counts, seconds)


class _Run:
    def __init__(
        self, recording: Recording, machine: Machine, policy: str, keep: Keep,
        predictor: Predictor | None, throttle: Throttle | None, half_life_tokens: float,
    ) -> None:  # fmt: skip
        self.machine = replace(machine, slots=_slots(recording, machine, keep, predictor))
        self.keep, self.predictor, self.throttle, self.counts = keep, predictor, throttle, Counts()
        self.ids = [[ExpertId(layer, each) for each in range(recording.experts)] for layer in range(recording.layers)]
        experts = [expert for row in self.ids for expert in row]
        self.policy, ram_policy = (
            _policy(policy if tier == 0 else "lru" if policy == "belady" else policy, recording, half_life_tokens)
            for tier in (0, 1)
        )
        guess_limit = max(1, min(2 * recording.top_k, machine.slots // 4))  # the rest is for demands, always
        transient_limit = guess_limit if keep is Keep.CACHE else self.machine.slots
        self.ladder = SimulatedLadder(self.machine, experts, self.policy, ram_policy, transient_limit)
        self.routed: list[list[list[int]]] = recording.routing.tolist()
        self.sequence: list[int] = recording.sequence.tolist()
        self.layers = recording.layers
        if keep is Keep.ALL:
            for expert in experts:
                self.ladder.table.begin(expert, transient=False, now=0.0)
                self.ladder.table.finish(expert)

    def layer(self, token: int, layer: int) -> None:
        ladder, row = self.ladder, self.ids[layer]
        ladder.run_until(ladder.time + self.machine.layer_seconds)
        ladder.now = token + layer / self.layers
        routed = [row[each] for each in self.routed[token][layer]]
        begin = ladder.time
        ladder.come(float(token * self.layers + layer))
        tap = self._tap(routed)
        if self.machine.ask_seconds and any(self._is_asked_for(each) for each in routed):
            ladder.run_until(ladder.time + self.machine.ask_seconds)
        absent = self._settle(routed)
        if self.predictor is not None:
            wanted = self._expected(token, layer, self.predictor) if self._may_guess(layer, routed) else ()
            ladder.foretell(wanted, begin + self.machine.looking.delay_seconds)
        computed = self._by_cpu(absent)
        done = ladder.time + len(computed) * (self.machine.cpu_seconds or 0.0)
        left = [each for each in routed if each not in computed]
        self._waves(left, [each for each in absent if each not in computed])
        if ladder.time < done:
            ladder.run_until(done)
        own = tap + self.machine.beside_seconds + self.machine.expert_seconds * len(left)
        self.counts.stall_seconds += ladder.time - begin - own

    def _is_asked_for(self, expert: ExpertId) -> bool:
        """Not what is on its way, but where a router's decision has stopped it."""
        state = self.ladder.table.state(expert)
        stopped = self.machine.looking.stops and state is Residency.LOADING and not self.ladder.decodes(expert)
        return state is Residency.ABSENT or stopped

    def end(self) -> None:
        """The token's last layer was computed."""
        ladder, machine = self.ladder, self.machine
        if machine.end_seconds:
            ladder.run_until(ladder.time + machine.end_seconds)
        if machine.looking.stops:
            ladder.stop()
        if machine.between_seconds:
            ladder.run_until(ladder.time + machine.between_seconds)

    def _tap(self, routed: list[ExpertId]) -> float:
        """Seconds that who looks ahead takes of the layer. They pass; who rests takes none."""
        if self.predictor is None or (self.throttle is not None and self.throttle.closed):
            return 0.0
        seconds = self.machine.looking.tap(sum(self._is_asked_for(each) for each in routed))
        if not seconds:
            return 0.0
        self.ladder.run_until(self.ladder.time + seconds, guesses=False)
        return seconds

    def expect(self, scores: NDArray[np.floating] | None) -> None:
        if scores is not None:
            assert isinstance(self.policy, Reuse), "only this policy listens"
            self.policy.expect(scores, self.ladder.now)

    def _settle(self, routed: list[ExpertId]) -> list[ExpertId]:
        """Counts, pins what has a slot, and hurries on what is on its way; returns what has none."""
        ladder, table, counts = self.ladder, self.ladder.table, self.counts
        absent = []
        for expert in routed:
            table.touch(expert, ladder.now)
            state = table.state(expert)
            if state is Residency.ABSENT:
                counts.misses += 1
                absent.append(expert)
                continue
            table.pin(expert)
            if expert in ladder.unused:
                ladder.unused.remove(expert)
                counts.guesses_used += 1
            if self.keep is not Keep.NOTHING:
                table.promote(expert)
            if state is Residency.READY:
                counts.hits += 1
            else:
                counts.late += 1
                ladder.demand(expert, transient=False)
        return absent

    def _by_cpu(self, absent: list[ExpertId]) -> list[ExpertId]:
        """Who of the absent is computed where it lies while the link brings the others: the weakest choices first."""
        machine, ram = self.machine, self.ladder.ram
        if machine.cpu_seconds is None:
            return []
        near = [each for each in absent if ram is None or ram.state(each) is Residency.READY]
        decoding = 0.0 if machine.decoding is None else machine.decoding.seconds
        share = computed_share(len(absent), machine.block_seconds + decoding, machine.cpu_seconds)
        computed = near[::-1][:share]
        self.counts.computed += len(computed)
        return computed

    def _may_guess(self, layer: int, routed: list[ExpertId]) -> bool:
        """A layer has come: its guesses were right or wrong."""
        if self.throttle is None:
            return True
        sent = [expert for expert in self.ladder.sent if expert.layer == layer]
        self.ladder.sent.difference_update(sent)
        self.throttle.settle(len(sent), sum(expert in routed for expert in sent))
        return self.throttle.allows()

    def _waves(self, routed: list[ExpertId], absent: list[ExpertId]) -> None:
        """Computes every routed expert as soon as it is there; a slot is free again when its expert was computed."""
        ladder, table = self.ladder, self.ladder.table
        transient, left = self.keep is Keep.NOTHING, routed
        absent = [expert for expert in absent if not self._begin(expert, transient=transient)]
        ladder.run_until(ladder.time + self.machine.beside_seconds)
        while left:
            absent = [expert for expert in absent if not self._begin(expert, transient=transient)]
            there = table.ready(left)
            if not there:
                ladder.run_until_landing()
                continue
            ladder.run_until(ladder.time + self.machine.expert_seconds * len(there))
            for expert in there:
                table.unpin(expert)
            done = set(there)
            left = [expert for expert in left if expert not in done]

    def _begin(self, expert: ExpertId, *, transient: bool) -> bool:
        begun = self.ladder.demand(expert, transient=transient)
        if begun:
            self.ladder.table.pin(expert)
        return begun

    def _expected(self, token: int, layer: int, predictor: Predictor) -> Iterable[tuple[ExpertId, float]]:
        """(expert, layer step) of the layers ahead, nearest first, within the text."""
        step = token * self.layers + layer
        wanted: dict[ExpertId, float] = {}
        for ahead in range(1, predictor.horizon + 1):
            target, column = divmod(step + ahead, self.layers)
            if target >= len(self.sequence) or self.sequence[target] != self.sequence[token]:
                break
            for each in predictor.predict(target, column, ahead):
                wanted.setdefault(self.ids[column][each], float(step + ahead))
        if isinstance(self.policy, ForecastAware):
            numbers = [expert.layer * len(self.ids[0]) + expert.expert for expert in wanted]
            self.policy.forecast(np.array(numbers, dtype=np.int64), np.array(list(wanted.values())) / self.layers)
        return wanted.items()


def _slots(recording: Recording, machine: Machine, keep: Keep, predictor: Predictor | None) -> int:
    if keep is Keep.CACHE:
        return machine.slots
    if keep is Keep.ALL:
        return max(machine.slots, recording.all_experts)
    return recording.top_k * (2 + (0 if predictor is None else predictor.horizon))  # a layer, guesses, those being cut


def _policy(name: str, recording: Recording, half_life_tokens: float) -> Policy:
    uses = recording.uses() if name == "belady" else None
    return make_policy(name, recording.all_experts, half_life_tokens=half_life_tokens, uses=uses)
