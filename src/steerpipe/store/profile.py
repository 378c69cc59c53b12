"""What was learnt about a model: how often each expert was used of late, which were in the slots at the end, whether
prediction paid.

Saved when a run ends and loaded when the next one starts, so that a cache does not start cold. It changes when experts
move, never what is computed; a profile that is damaged or of another pack is left aside.
"""

import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from steerpipe.core.ids import ExpertId

SCHEMA = 1
NAME = "profile.json"
MOST_VERDICTS = 8  # of so many settings, the newest


@dataclass(frozen=True, slots=True)
class Profile:
    """`counts`: decayed uses of each expert, in the pack's order. `warm`: who was ready in a slot. `verdicts`: by
    settings, what was found out about prediction; whoever reads one checks it.
    """

    source: str  # identity of the pack
    counts: tuple[float, ...]
    warm: tuple[ExpertId, ...]
    verdicts: Mapping[str, Any] = field(default_factory=dict)

    def warmest(self, slots: int, experts: tuple[ExpertId, ...]) -> list[ExpertId]:
        """Whom to load first, the most used first: the old residents, then others that were used."""
        used = dict(zip(experts, self.counts, strict=True))
        residents = sorted(set(self.warm) & used.keys(), key=lambda e: (-used[e], e))
        others = sorted((e for e in experts if used[e] > 0 and e not in set(residents)), key=lambda e: (-used[e], e))
        return [*residents, *others][:slots]


def profile_file(pack_folder: Path, source: str, cache: Path, *, embedded: bool) -> Path:
    """Beside the pack; in the cache for the embedded model and for a folder that cannot be written."""
    if not embedded and os.access(pack_folder, os.W_OK):
        return pack_folder / NAME
    return cache / "profiles" / f"{source}.json"


def load_profile(file: Path, source: str, experts: int) -> Profile | None:
    """The profile of that pack, or None: there is none, it cannot be read, or it is of another pack."""
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
        counts = tuple(float(count) for count in raw["counts"])
        warm = tuple(ExpertId(int(layer), int(expert)) for layer, expert in raw["warm"])
        verdicts = dict(raw.get("verdicts", {}))
        fits = raw["schema"] == SCHEMA and raw["source"] == source and len(counts) == experts
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    if not fits or not all(math.isfinite(count) and count >= 0 for count in counts):
        return None
    return Profile(source, counts, warm, verdicts)


def save_profile(file: Path, profile: Profile) -> bool:
    """Written beside and renamed: whole or not at all. False where it cannot be written, which is no reason to fail.

    The cache is made where it is missing; a pack that was removed or renamed meanwhile is not.
    """
    content = {
        "schema": SCHEMA,
        "source": profile.source,
        "counts": [round(count, 4) for count in profile.counts],
        "warm": [list(expert) for expert in profile.warm],
        "verdicts": dict(list(profile.verdicts.items())[-MOST_VERDICTS:]),
    }
    partial = file.with_name(f"{file.name}.{os.getpid()}.partial")
    try:
        if file.name != NAME:
            file.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(content, separators=(",", ":")), encoding="utf-8")
        partial.replace(file)
    except OSError:
        with suppress(OSError):
            partial.unlink()
        return False
    return True
