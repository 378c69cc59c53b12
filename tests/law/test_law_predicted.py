"""The law with prediction in the running engine: whatever a predictor says, no bit changes and nothing leaks."""

import functools

import pytest
import torch
from torch import Tensor

from steerpipe.core.sampling import SamplingSettings
from steerpipe.engine.request import Request
from steerpipe.predict.protocol import Cost
from steerpipe.predict.records import Geometry
from steerpipe.predict.sight import Sight
from steerpipe.predict.trials import Trials
from steerpipe.runtime.steering import Steering
from steerpipe.transfer.faulty import FaultyLink
from steerpipe.transfer.source import LadderSource
from tests.law.cases import DTYPES, FORMATS, LINKS
from tests.transfer.packs import EXPERTS, LAYERS, tiny_pack
from tests.transfer.running import Run, dense_decoder, prompt, resident, run

LONG = SamplingSettings(temperature=0.0, max_tokens=24, logprobs=2)


class Says:
    """Probabilities of a kind, at horizons 1 to 3 and across the token boundary."""

    horizons = (1, 2, 3)

    def __init__(self, name: str) -> None:
        self.name = name
        self._draw = torch.Generator().manual_seed(3)

    def probabilities(self, sight: Sight) -> Tensor:
        sight.residual(sight.layer)  # is there
        if self.name == "everything":
            return torch.ones(sight.rows, EXPERTS)
        if self.name == "same again":
            return sight.hot(sight.decision.target, back=0 if sight.crosses else 1)
        if self.name == "what was not used":  # adversarial: sends for what is least likely, protects it, never learns
            return 1 - sight.hot(sight.layer)
        return torch.rand(sight.rows, EXPERTS, generator=self._draw)

    def cost(self) -> Cost:
        return Cost(0, 0)


def geometry(family: str) -> Geometry:
    spec = tiny_pack(family).spec
    return Geometry(LAYERS, EXPERTS, spec.moe(spec.moe_layers[0]).top_k, spec.hidden)


def always_on() -> Trials:
    """Never back to none: a trial whose turns never end."""
    trials = Trials(["none", "on"], turn_tokens=2, rounds=1, first_rest_tokens=1 << 30)
    for seconds in (1.0, 1.0, 0.1, 0.1):
        trials.observe(seconds)
    assert trials.way == 1
    return trials


def asked() -> list[Request]:
    return [
        Request(prompt(1, 21), LONG),
        Request(prompt(3, 9), LONG, batched=True),
        Request(prompt(4, 3), LONG, batched=True),
    ]


def predicted(
    family: str, form: str, dtype: str, slots: int, link: str, says: str, trials: Trials
) -> tuple[Run, Steering]:
    pack = tiny_pack(family, FORMATS[form])
    with LadderSource.open(
        pack, slots=slots, dtype=DTYPES[dtype], wrap=lambda below: FaultyLink(below, LINKS[link], seed=7)
    ) as source:
        steering = Steering([Says(says)], geometry(family), pack.spec.moe_layers, source, most_guesses=4, trials=trials)
        found = run(source, family, DTYPES[dtype], asked(), tap=steering)
        source.check_integrity()
        return found, steering


@functools.cache
def all_resident() -> Run:
    return run(resident("qwen3_moe", FORMATS["float32"], torch.float32), asked=asked())


SAYS, FAULTS, SLOTS = (
    ("everything", "same again", "what was not used", "chance"),
    ("plain", "slow", "failing once"),
    (2, 6, 12),
)
# Every two values meet in 12 of the 36 cases; the others are for `make test-slow`.
CASES = [
    pytest.param(says, link, slots, marks=() if (row + column) % len(SLOTS) == rank else pytest.mark.slow)
    for row, says in enumerate(SAYS)
    for column, link in enumerate(FAULTS)
    for rank, slots in enumerate(SLOTS)
]


@pytest.mark.parametrize(("says", "link", "slots"), CASES)
def test_no_bit_changes_whatever_is_predicted(says: str, link: str, slots: int) -> None:
    truth = all_resident()
    found, steering = predicted("qwen3_moe", "float32", "float32", slots, link, says, always_on())
    assert found.same_bits(truth)
    assert steering.scorecard.total(says).decisions > 100


@pytest.mark.parametrize(("family", "form", "dtype"), [
    ("qwen2_moe", "int4", "float32"), ("mixtral", "int8", "bfloat16"), ("olmoe", "bfloat16", "float32"),
])  # fmt: skip
def test_no_bit_changes_in_other_families_and_formats(family: str, form: str, dtype: str) -> None:
    truth = run(resident(family, FORMATS[form], DTYPES[dtype]), family, DTYPES[dtype], asked())
    found, _ = predicted(family, form, dtype, 6, "slow", "chance", always_on())
    assert found.same_bits(truth)


def test_no_bit_changes_while_trials_switch_prediction_on_and_off() -> None:
    truth = all_resident()
    trials = Trials(["none", "chance"], turn_tokens=2, rounds=2, first_rest_tokens=4)
    found, _ = predicted("qwen3_moe", "float32", "float32", 6, "slow", "chance", trials)
    assert found.same_bits(truth)


def test_guesses_are_really_made_and_used() -> None:
    pack = tiny_pack("qwen3_moe", FORMATS["float32"])
    with LadderSource.open(pack, slots=12, dtype=torch.float32) as source:
        says = Says("everything")
        steering = Steering(
            [says], geometry("qwen3_moe"), pack.spec.moe_layers, source, most_guesses=4, trials=always_on()
        )
        run(source, asked=asked(), tap=steering)
        counts, score = source.counters(), steering.scorecard.total(says.name)
    assert counts.prefetch.hits + counts.prefetch.late > 0
    assert score.sent and score.used and score.used <= score.sent
    assert score.foreseen <= score.missing <= score.routed


def test_a_tap_sees_what_the_decoder_computes() -> None:
    """The states that a predictor is given are those that the next router is given."""
    spec = tiny_pack("qwen3_moe").spec
    seen: list[tuple[int, Tensor, Tensor]] = []

    class Watch(Says):
        def probabilities(self, sight: Sight) -> Tensor:
            if sight.decision.horizon == 1 and not sight.crosses:
                seen.append((sight.layer, sight.residual(sight.layer), sight.experts(sight.layer)))
            return super().probabilities(sight)

    with LadderSource.open(tiny_pack("qwen3_moe"), slots=6, dtype=torch.float32) as source:
        steering = Steering(
            [Watch("chance")], geometry("qwen3_moe"), spec.moe_layers, source, most_guesses=2, trials=always_on()
        )
        run(source, asked=[Request(prompt(1, 5), LONG)], tap=steering)
    weights = dense_decoder("qwen3_moe")._weights
    assert len(seen) == 23 * (LAYERS - 1)
    for layer, residual, experts in seen:
        mlp, norm = weights.layers[spec.moe_layers[layer]].mlp, weights.layers[spec.moe_layers[layer]].mlp_norm
        normed = residual * torch.rsqrt(residual.pow(2).mean(-1, keepdim=True) + spec.norm_eps) * norm
        logits = normed @ mlp.router.T  # type: ignore[union-attr]
        assert logits.topk(experts.shape[1]).indices.sort().values.equal(experts.sort().values)
