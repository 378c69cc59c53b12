"""What is done about a routed expert that is not in fast memory. Pure.

wait         the exact answer: compute stands still until it has come
commit       the experts and weights that were predicted take the place of the router's, as published
commit-true  the predicted experts, with the router's own weights
surrogate    the expert's default vector (its mean output) times its gate
patch        surrogate now; the difference is added when the expert has come, a few layers later at most
drop         nothing
cpu          computed where it lies
"""

from collections.abc import Iterator, Mapping, Sequence
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


OF_A_LAYER = (MissPolicy.COMMIT, MissPolicy.COMMIT_TRUE)  # replace a layer's whole route: all ranks or none
FIX = "give one of " + ", ".join(MissPolicy)


def parse_policy(text: str) -> MissPolicy:
    try:
        return MissPolicy(text)
    except ValueError:
        raise ConfigError(f"{text!r} is not a miss policy", fix=FIX) from None


@dataclass(frozen=True, slots=True)
class QualityPlan:
    """A policy for each MoE layer and rank (0: the router's first choice)."""

    policies: tuple[tuple[MissPolicy, ...], ...]  # [layers][ranks]
    patch_layers: int = 2  # a patch that comes later than so many layers after its own is left out

    def __post_init__(self) -> None:
        if not self.policies or len({len(ranks) for ranks in self.policies}) != 1 or not self.policies[0]:
            raise ConfigError("a quality plan without a policy for every layer and rank", fix="give [layers][ranks]")
        for layer, ranks in enumerate(self.policies):
            for policy in OF_A_LAYER:
                if policy in ranks and set(ranks) != {policy}:
                    raise ConfigError(f"layer {layer} has {policy} for some of its ranks", fix="give it to all or none")
        if MissPolicy.COMMIT in self.policies[0] or MissPolicy.COMMIT_TRUE in self.policies[0]:
            raise ConfigError("nothing is predicted before the first layer", fix="give layer 0 another policy")
        if self.patch_layers < 1:
            raise ConfigError(f"patch_layers is {self.patch_layers}", fix="give 1 or more")

    @classmethod
    def uniform(cls, policy: MissPolicy, layers: int, ranks: int, *, exact_layers: Sequence[int] = ()) -> Self:
        """One policy everywhere but in `exact_layers`, which wait; the first layer waits where it must."""
        waits = {*exact_layers, *([0] if policy in OF_A_LAYER else [])}
        return cls(tuple((MissPolicy.WAIT if layer in waits else policy,) * ranks for layer in range(layers)))

    @property
    def exact(self) -> bool:
        return all(policy is MissPolicy.WAIT for ranks in self.policies for policy in ranks)

    @property
    def used(self) -> frozenset[MissPolicy]:
        return frozenset(policy for ranks in self.policies for policy in ranks)

    def rows(self) -> Iterator[tuple[int, tuple[MissPolicy, ...]]]:
        return enumerate(self.policies)

    def as_json(self) -> dict[str, Any]:
        return {
            "policies": [[str(each) for each in ranks] for ranks in self.policies],
            "patch_layers": self.patch_layers,
        }

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Self:
        policies = tuple(tuple(parse_policy(each) for each in ranks) for ranks in raw["policies"])
        return cls(policies, int(raw["patch_layers"]))


@dataclass(frozen=True, slots=True)
class Substituted:
    """Expert uses so far, and those that were not the routed expert's own output."""

    uses: int = 0
    substituted: int = 0
    patched: int = 0  # of the substituted: made good later

    @property
    def share(self) -> float:
        return self.substituted / self.uses if self.uses else 0.0

    def __sub__(self, before: Self) -> Self:
        return type(self)(self.uses - before.uses, self.substituted - before.substituted, self.patched - before.patched)
