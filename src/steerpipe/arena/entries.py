"""Who takes part: predictors by name, one for each horizon or one for all."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path

import torch

from steerpipe.core.errors import InputError
from steerpipe.predict.protocol import Cost, RoutingPredictor
from steerpipe.predict.stored import StoredPredictor, Training

SHIPPED = "comes with the model"  # an entry's origin


class Role(Enum):
    CONTESTANT = "contestant"
    BOUND = "bound"  # the oracle, which reads the answer, and random: nothing is claimed for them
    CONTROL = "control"  # trained on shuffled labels: whatever it scores above chance is a leak


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the table."""

    name: str
    by_horizon: Mapping[int, RoutingPredictor]
    role: Role = Role.CONTESTANT
    origin: str = "trained here"  # or a file, or a plugin
    files: Mapping[int, Path] = field(default_factory=dict)  # by horizon, of those that were loaded
    left_out: str = "it answers at none of the horizons that were asked for"  # why, where it has no horizon

    @property
    def predictors(self) -> list[RoutingPredictor]:
        """Each once."""
        return list({id(each): each for each in self.by_horizon.values()}.values())

    def asked(self, horizons: Collection[int]) -> "Entry":
        """The same at these horizons alone; at none of them it has nothing to say."""
        return replace(self, by_horizon={each: found for each, found in self.by_horizon.items() if each in horizons})

    def cost(self) -> Cost:
        """Parameters of all horizons; operations of one decision on average."""
        costs = [each.cost() for each in self.predictors]
        return Cost(sum(each.parameters for each in costs), sum(each.multiply_adds for each in costs) // len(costs))

    def training(self) -> Training | None:
        """Of predictors that know how they came about: tokens of the largest training, seconds of all."""
        known = [each.training for each in self.predictors if isinstance(each, StoredPredictor)]
        trained = [each for each in known if each is not None]
        if not trained:
            return None
        largest = max(trained, key=lambda each: each.tokens)
        return replace(largest, seconds=sum(each.seconds for each in trained))

    def ahead(self) -> list[int]:
        """The horizons that stand for 1, 2 ... layers ahead in the simulator: as many as there are without a gap."""
        steps: list[int] = []
        while len(steps) + 1 in self.by_horizon:
            steps.append(len(steps) + 1)
        return steps or ([0] if 0 in self.by_horizon else [])

    def moved(self, device: torch.device | str) -> "Entry | None":
        """The same on `device`; None if a predictor cannot be moved there."""
        moved = {}
        for each in self.predictors:
            if not isinstance(each, StoredPredictor):
                return None
            moved[id(each)] = each.to(device)
        by_horizon = {horizon: moved[id(each)] for horizon, each in self.by_horizon.items()}
        return replace(self, by_horizon=by_horizon)


def entries_of(predictors: Iterable[tuple[RoutingPredictor, str]], role: Role = Role.CONTESTANT) -> list[Entry]:
    """(predictor, origin): those of one name and origin are one entry if each has horizons of its own."""
    grouped: dict[tuple[str, str], dict[int, RoutingPredictor]] = {}
    for predictor, origin in predictors:
        group = grouped.setdefault((predictor.name, origin), {})
        for horizon in predictor.horizons:
            if horizon in group:
                raise InputError(
                    f"two predictors called {predictor.name!r} answer for horizon {horizon} ({origin})",
                    fix="give one of them another name, or leave one out",
                )
            group[horizon] = predictor
    return [Entry(name, group, role, origin) for (name, origin), group in grouped.items()]


def check_names(entries: Iterable[Entry]) -> None:
    """InputError if two entries could not be told apart in a table."""
    seen: dict[str, Entry] = {}
    for entry in entries:
        if entry.name in seen:
            raise InputError(
                f"two entries are called {entry.name!r}: {seen[entry.name].origin} and {entry.origin}",
                fix="give one of them another name",
            )
        seen[entry.name] = entry
