"""What somebody who looks at a running model sees: where every expert lies, and which the last step used."""

from collections.abc import Collection, Sequence

import numpy as np

from steerpipe.core.events import RoutingRecord
from steerpipe.model.spec import ModelSpec
from steerpipe.transfer.places import Place, Placed

USED = 4  # added to the place of an expert that the last step used
_DIGITS = bytes(range(48, 58)) + bytes(246)  # 0 → "0"


class LastStep:
    """A RoutingSink that remembers whom the last step was routed to."""

    def __init__(self) -> None:
        self._used: dict[int, set[int]] = {}  # by decoder layer

    def observe(self, record: RoutingRecord) -> None:
        self._used[record.layer] = set(np.unique(record.experts).tolist())

    def clear(self) -> None:
        self._used.clear()

    def used(self, layer: int) -> Collection[int]:
        return self._used.get(layer, ())


def draw_map(spec: ModelSpec, source: object, last: LastStep) -> tuple[str, ...]:
    """One row per MoE layer, one digit per expert: its Place, plus USED. A source that says nothing holds all."""
    sizes = {layer: spec.moe(layer).experts for layer in spec.moe_layers}
    whole = source.places() if isinstance(source, Placed) else bytes([Place.FAST]) * sum(sizes.values())
    rows, at = [], 0
    for layer, size in sizes.items():
        row = bytearray(whole[at : at + size])
        for expert in last.used(layer):
            row[expert] += USED
        rows.append(row.translate(_DIGITS).decode())
        at += size
    assert at == len(whole), f"{len(whole)} experts are placed, and the model has {at}"
    return tuple(rows)


def count_places(rows: Sequence[str]) -> dict[str, int]:
    """How many experts lie where, by the place's name in lower case."""
    digits = "".join(rows)
    return {each.name.lower(): sum(digits.count(str(each + used)) for used in (0, USED)) for each in Place}
