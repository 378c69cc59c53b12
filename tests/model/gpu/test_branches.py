"""Several predictors over one set of slots: whoever speaks in a step, and however they alternate, no bit changes."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from steerpipe.core.ids import SequenceId
from steerpipe.kernels.fetch import NOBODY, WHOLE
from steerpipe.model.gpu.branches import Branches
from steerpipe.model.gpu.direct import Follower, ReadThrough
from steerpipe.model.gpu.experts import Held
from steerpipe.model.gpu.mailbox import LANDED, MISSED, SENT, Mailbox
from steerpipe.model.gpu.predicted import PredictedStep, count
from steerpipe.model.gpu.rows import passes
from steerpipe.model.gpu.tap import Forecaster, Head, Lookahead
from steerpipe.model.kv_cache import KvSequence
from steerpipe.model.step import decode_rows
from tests.model.gpu.test_direct import model, open_direct, tokens
from tests.support.running import CPU, Loaded

LAYERS = 2


class Stepper:
    """What StepGraphs does over a source that lands, without a graph."""

    def __init__(self, loaded: Loaded, source: Any) -> None:
        layers = loaded.spec.moe_layers
        top_k = loaded.spec.moe(layers[0]).top_k
        self._decoder: Any = loaded.decoder
        self._now = torch.zeros(1, dtype=torch.int64)
        self._mailbox = Mailbox(len(layers), top_k, pinned=False)
        self._plain = ReadThrough(source, source.landing, top_k, CPU)
        self._follower = Follower(source, source.landing, layers, self._mailbox)
        self.branches = Branches(self._decoder._network, source, self._now, top_k, CPU)

    def step(self, token: int, kv: KvSequence, who: Forecaster | None) -> Tensor:
        branches, network = self.branches, self._decoder._network
        if branches.fetching is not None:
            branches.fetching.slots.collect()
        branch = branches.of(who)
        branches.turn_to(branch)
        (part,) = passes(decode_rows([SequenceId(0)], [kv], [token], CPU, cell=1))
        self._now += 1
        tap = None if branch is None else branch.tap
        step = replace(self._decoder._eager_step(part, None), mailbox=self._mailbox.words, stamp=self._now, tap=tap)
        logits: list[Tensor] = []

        def run() -> None:
            logits.append(network.head(network.hidden(step, self._plain if branch is None else branch.run)))
            if branch is not None and branch.fetching is not None:
                branch.fetching.join()

        with torch.inference_mode():
            words = None if tap is None else tap.words
            self._follower.run(run, int(self._now), lambda: True, lambda: None, branches.fetching, words)
        return logits[0]


def sure(loaded: Loaded) -> tuple[Forecaster, Forecaster]:
    """A lookahead and a head of noise, both sure of all that they name."""
    layers, hidden = loaded.spec.moe_layers, loaded.spec.hidden
    experts, many = loaded.spec.moe(layers[0]).experts, len(layers)
    one, high = torch.ones(many), torch.full((many,), 9.0)
    drawn = torch.Generator().manual_seed(7)

    def noise(*size: int) -> Tensor:
        return 0.1 * torch.randn(size, generator=drawn, dtype=loaded.decoder.dtype)

    head = Head(
        noise(many, 5, 2 * hidden + 2 * experts), noise(many, 5), noise(many, experts, 5), noise(many, experts),
        one, high,
    )  # fmt: skip
    return Forecaster((Lookahead(one, high),)), Forecaster((head,))


@pytest.mark.parametrize("form", ["int4", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_no_bit_depends_on_who_speaks_in_which_step(form: str) -> None:
    loaded, told = model(form), tokens(8, 1)
    lookahead, head = sure(loaded)
    kv = loaded.pool.sequence()
    want = loaded.one_row(told, kv)
    kv.truncate(0)
    with open_direct(loaded, 10) as source:
        stepper = Stepper(loaded, source)
        who = [None, head, lookahead, None, None, head, head, lookahead]
        found = [stepper.step(token, kv, speaks) for token, speaks in zip(told, who, strict=True)]
        assert torch.equal(torch.cat(found), want)
        source.check_integrity()
        assert source.landing is not None and source.landing.guesses is not None
        assert source.landing.guesses.slots.taken > 4
        assert stepper.branches.of(head) is stepper.branches.of(head) is not stepper.branches.of(lookahead)
    kv.free()


def test_the_host_serves_a_predictor_where_the_device_could_if_it_says_so() -> None:
    loaded = model("int4")
    lookahead, _ = sure(loaded)
    with open_direct(loaded, 10) as source:
        branches = Stepper(loaded, source).branches
        served, direct = branches.of(replace(lookahead, served=True)), branches.of(lookahead)
        assert served is not None and served.steer is not None and served.fetching is None
        assert isinstance(served.run, Held) and not served.resting
        assert direct is not None and direct.steer is None and direct.fetching is branches.fetching is not None
        asked: list[Any] = []
        source.expect, source.attend = asked.append, asked.append  # type: ignore[method-assign]
        for each in (served, direct, served, None, direct):
            branches.turn_to(each)
        assert asked == [served.number, (), direct.number, served.number, (), direct.number]  # () gives guesses up


def test_who_is_not_asked_lends_no_slots_and_is_not_nearer_to_a_rest() -> None:
    loaded = model("int4")
    lookahead, _ = sure(loaded)
    with open_direct(loaded, 10) as source:
        kv, stepper = loaded.pool.sequence(), Stepper(loaded, source)
        stepper.step(1, kv, lookahead)
        throttle, guesses = source._shelf.throttle, source.landing.guesses  # type: ignore[union-attr]
        assert guesses is not None and guesses.slots.lent
        stepper.step(2, kv, None)  # what was said last is settled
        silent = throttle._silent
        stepper.step(3, kv, None)
        assert not guesses.slots.lent and throttle._silent == silent
        kv.free()


def test_everybody_is_throttled_by_his_own_guesses() -> None:
    loaded = model("int4")
    with open_direct(loaded, 10) as source:
        first = source._shelf.throttle
        source.attend(0)
        assert source._shelf.throttle is first
        source.attend(1)
        while source._shelf.throttle.allows():
            source._shelf.throttle.settle(4, 0)
        assert source.throttled
        source.attend(0)
        assert not source.throttled and source._shelf.throttle is first


def words(stamp: int, *rows: list[int]) -> Any:
    return (np.array(rows, dtype=np.int64)) + (stamp << 32)


def share(expert: int, part: float) -> int:
    return int(part * WHOLE) << 16 | expert


def test_steps_are_counted_by_the_layer_that_was_predicted() -> None:
    """Two layers, two experts each: what tap 0 says is of layer 1, what tap 1 says is of the next step's layer 0."""
    first = PredictedStep(
        "a", 5,
        named=words(5, [3, 4, 9], [1, 2, 9]), routed=words(5, [7, 8], [3 | SENT, 6 | MISSED | LANDED]),
        sent=words(5, [share(3, 1.0), share(4, 0.5)], [share(1, 0.25), NOBODY]),
    )  # fmt: skip
    second = PredictedStep(
        "a", 6,
        named=words(6, [0, 5, 9], [0, 0, 0]), routed=words(6, [1 | SENT, 2], [0, 5 | MISSED]),
        sent=words(6, [share(0, 0.0), NOBODY], [NOBODY, NOBODY]),
    )  # fmt: skip
    found = count([first, second])
    assert found.decisions.tolist() == [1, 2]  # of the first step's layer 0 nobody had spoken
    assert found.routed.tolist() == [2, 4] and found.named.tolist() == [2, 3]
    assert found.missing.tolist() == [1, 3] and found.foreseen.tolist() == [1, 2]
    assert found.sent.tolist() == [1, 2]  # what never moved was not sent
    assert found.used.tolist() == [1, 1] and found.ready.tolist() == [0, 1]
    apart = zip(count([first]), count([second], first), strict=True)
    assert [(one + other).tolist() for one, other in apart] == [each.tolist() for each in found]


def test_a_step_after_a_pause_does_not_count_what_was_said_before_it() -> None:
    steps = [
        PredictedStep("a", stamp, words(stamp, [1, 2], [1, 2]), words(stamp, [1, 2], [1, 2]), None) for stamp in (5, 8)
    ]
    found = count(steps)
    assert found.decisions.tolist() == [0, 2] and found.missing.sum() == found.sent.sum() == 0


def test_what_is_said_two_layers_ahead_counts_for_the_layer_that_comes_then() -> None:
    """Three layers: what is said at layer 0 is of layer 2, at 1 and 2 of the next step's layers 0 and 1."""
    named = words(5, [3, 4, 9], [1, 2, 9], [7, 8, 9])
    first = PredictedStep("a", 5, named, words(5, [0, 1], [0, 1], [3, 6]), None, ahead=2)
    unasked = words(6, [1, 2, 9], [0, 0, 9], [0, 0, 9]) - (np.array([[0], [1], [1]]) << 32)  # words of step 5
    second = PredictedStep("a", 6, unasked, words(6, [1, 2], [7, 5], [5, 6]), None, ahead=2)
    found = count([first, second])
    assert found.decisions.tolist() == [1, 1, 2] and found.named.tolist() == [2, 1, 1]
    assert [each.tolist() for each in count([second], first)][:3] == [[1, 1, 1], [2, 2, 2], [2, 1, 0]]


def test_words_of_an_earlier_step_count_nowhere() -> None:
    late = PredictedStep("a", 6, words(5, [1, 2], [1, 2]), words(6, [1, 2], [1, 2]), None)
    assert count([late]).decisions.tolist() == [0, 0]


def test_a_tap_that_says_nothing_has_named_nobody() -> None:
    """Its words are the stamp alone: nobody, and not the expert 0."""
    first = PredictedStep("a", 5, words(5, [0, 0], [0, 0]), words(5, [0, 5], [0, 5]), None)
    second = PredictedStep("a", 6, words(6, [0, 5], [0, 0]), words(6, [0, 5], [0, 5]), None)
    found = count([first, second])
    assert found.decisions.tolist() == [0, 1] and found.named.tolist() == [0, 2]
