"""What is done about a routed expert that is not in fast memory. Pure.

wait         the exact answer: compute stands still until it has come
commit       the experts and weights that were predicted take the place of the router's, as published
commit-true  the predicted experts, with the router's own weights
surrogate    the expert's default vector (its mean output) times its gate
patch        surrogate now; the difference is added when the expert has come, a few layers later at most
drop         nothing
cpu          the CPU computes it where it lies, in RAM, as far as that is quicker than the link
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

from steerpipe.core.errors import ConfigError


class MissPolicy(StrEnum):
    WAIT = "wait"
    COMMIT = "commit"
    COMMIT_TRUE = "commit-true"
    SURROGATE = "surrogate"
    PATCH = "patch"
    DROP = "drop"
    CPU = "cpu"


class Dial(StrEnum):
    """How much an answer may differ from the exact one."""

    EXACT = "exact"  # not at all: every miss waits
    HIGH = "high"
    BALANCED = "balanced"
    FAST = "fast"  # as much as it takes: decode never waits


# Most mean KL divergence per token from the exact model's distribution, in nats, on the calibration texts.
KL_BOUNDS = {Dial.HIGH: 0.01, Dial.BALANCED: 0.05, Dial.FAST: 0.5}
SAVED_TOKENS = 16  # what an answer has not used of its bound it may use later, for so many tokens

OF_A_LAYER = (MissPolicy.COMMIT, MissPolicy.COMMIT_TRUE)  # replace a layer's whole route: all ranks or none
FIX = "give one of " + ", ".join(MissPolicy)


def parse_policy(text: str) -> MissPolicy:
    try:
        return MissPolicy(text)
    except ValueError:
        raise ConfigError(f"{text!r} is not a miss policy", fix=FIX) from None


COMPUTED_FORMATS = ("bfloat16", "int8")  # blocks that the CPU can compute as they lie


def check_cpu(policies: Iterable[MissPolicy], form: str) -> None:
    """`form`: the format of the experts' blocks."""
    if MissPolicy.CPU in policies and form not in COMPUTED_FORMATS:
        raise ConfigError(
            f"the policy cpu with {form} experts: the CPU computes {' and '.join(COMPUTED_FORMATS)} blocks as they "
            "lie; others have to be unpacked first, which takes longer than the link does",
            fix="steerpipe pack MODEL --experts int8, or use another policy",
        )


def computed_share(misses: int, link_seconds: float, cpu_seconds: float | None) -> int:
    """How many of a layer's misses the CPU computes while the link brings the others: then both end soonest.

    Seconds of one block, as measured; of the CPU None: not yet, so one block is tried.
    """
    if cpu_seconds is None:
        return min(1, misses)
    return min(range(misses + 1), key=lambda own: (max(own * cpu_seconds, (misses - own) * link_seconds), -own))


@dataclass(frozen=True, slots=True)
class QualityPlan:
    """A policy for each MoE layer and rank (0: the router's first choice)."""

    policies: tuple[tuple[MissPolicy, ...], ...]  # [layers][ranks]
    patch_layers: int = 2  # a patch that comes later than so many layers after its own is left out
    horizon: int = 1  # so many layers before its own the route of a layer is committed to

    def __post_init__(self) -> None:
        if not self.policies or len({len(ranks) for ranks in self.policies}) != 1 or not self.policies[0]:
            raise ConfigError("a quality plan without a policy for every layer and rank", fix="give [layers][ranks]")
        for layer, ranks in enumerate(self.policies):
            for policy in OF_A_LAYER:
                if policy in ranks and set(ranks) != {policy}:
                    raise ConfigError(f"layer {layer} has {policy} for some of its ranks", fix="give it to all or none")
        if MissPolicy.COMMIT in self.policies[0] or MissPolicy.COMMIT_TRUE in self.policies[0]:
            raise ConfigError("nothing is predicted before the first layer", fix="give layer 0 another policy")
        if self.patch_layers < 1 or self.horizon < 1:
            raise ConfigError(
                f"patch_layers is {self.patch_layers} and horizon {self.horizon}", fix="give 1 or more for both"
            )

    @classmethod
    def uniform(cls, policy: MissPolicy, layers: int, ranks: int, *, exact_layers: Sequence[int] = ()) -> Self:
        """One policy everywhere but in `exact_layers`, which wait; the first layer waits where it must."""
        waits = {*exact_layers, *([0] if policy in OF_A_LAYER else [])}
        return cls(tuple((MissPolicy.WAIT if layer in waits else policy,) * ranks for layer in range(layers)))

    @property
    def exact(self) -> bool:
        return all(policy is MissPolicy.WAIT for ranks in self.policies for policy in ranks)

    @property
    def shape(self) -> tuple[int, int]:
        """Layers and ranks."""
        return len(self.policies), len(self.policies[0])

    @property
    def used(self) -> frozenset[MissPolicy]:
        return frozenset(policy for ranks in self.policies for policy in ranks)

    def rows(self) -> Iterator[tuple[int, tuple[MissPolicy, ...]]]:
        return enumerate(self.policies)

    def as_json(self) -> dict[str, Any]:
        return {
            "policies": [[str(each) for each in ranks] for ranks in self.policies],
            "patch_layers": self.patch_layers,
            "horizon": self.horizon,
        }

    @classmethod
    def from_json(cls, raw: object) -> Self:
        """ConfigError names what is wrong with it."""
        if not isinstance(raw, Mapping) or not set(raw) <= {"policies", "patch_layers", "horizon"}:
            raise ConfigError("not a quality plan", fix="give policies, and perhaps patch_layers and horizon")
        try:
            policies = tuple(tuple(parse_policy(each) for each in ranks) for ranks in raw["policies"])
        except (KeyError, TypeError):
            raise ConfigError("not a quality plan", fix="give policies as [layers][ranks]") from None
        layers, horizon = raw.get("patch_layers", 2), raw.get("horizon", 1)
        if type(layers) is not int or type(horizon) is not int:
            raise ConfigError(f"patch_layers is {layers!r} and horizon {horizon!r}", fix="give whole numbers for both")
        return cls(policies, layers, horizon)


@dataclass(frozen=True, slots=True)
class Allowance:
    """What substitutions cost by a calibration, in nats of KL, and what a token may cost; None: whatever it takes."""

    costs: tuple[tuple[float, ...], ...]  # [layers][ranks], per substituted use
    mended: tuple[tuple[float, ...], ...]  # the same, of a use that a patch has made good
    per_token: float | None


class Purse:
    """What may still be spent: every token adds its allowance, up to that of SAVED_TOKENS."""

    def __init__(self, per_token: float | None) -> None:
        self._per_token = per_token
        self._held = 0.0

    def earn(self, tokens: int) -> None:
        if self._per_token is not None:
            self._held = min(self._held + tokens * self._per_token, SAVED_TOKENS * self._per_token)

    def refund(self, cost: float) -> None:
        self._held += cost

    def spend(self, cost: float) -> bool:
        """False: there is not enough, and nothing is taken."""
        if self._per_token is not None:
            if cost > self._held:
                return False
            self._held -= cost
        return True


@dataclass(frozen=True, slots=True)
class Substituted:
    """Expert uses so far, and those that were not the routed expert's own output."""

    uses: int = 0
    substituted: int = 0
    patched: int = 0  # of the substituted: made good later
    nats: float = 0.0  # KL that a calibration expects of them
    computed: int = 0  # not substituted: by the CPU, where they lie

    @property
    def share(self) -> float:
        return self.substituted / self.uses if self.uses else 0.0

    def __add__(self, other: Self) -> Self:
        return type(self)(
            self.uses + other.uses, self.substituted + other.substituted, self.patched + other.patched,
            self.nats + other.nats, self.computed + other.computed,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class AnswerQuality:
    """What a lossy engine says of an answer, in one form wherever it is told."""

    quality: str  # as it was asked for; of a plan the name of its file
    counts: Substituted
    calibrated: bool  # whether `counts.nats` is what a calibration expects; else nobody knows

    def as_json(self) -> dict[str, Any]:
        counts = self.counts
        return {
            "quality": self.quality, "uses": counts.uses, "substituted": counts.substituted,
            "patched": counts.patched, "computed": counts.computed, "share": counts.share,
            "expected_nats": counts.nats if self.calibrated else None,
        }  # fmt: skip
