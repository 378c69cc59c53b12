"""Carries what was learnt about a pack's experts from one run to the next."""

import math
import os
from dataclasses import asdict
from pathlib import Path

import numpy as np

from steerpipe.core.config import EngineConfig
from steerpipe.core.resolve import ResolvedConfig
from steerpipe.model.weights import ModelWeights
from steerpipe.predict.trials import LONGEST_REST_TOKENS, Verdict
from steerpipe.runtime.experts import Ladder
from steerpipe.runtime.learning import Learning, open_learning
from steerpipe.runtime.models import EMBEDDED
from steerpipe.store.policies import Lfru
from steerpipe.store.profile import Profile, load_profile, profile_file, save_profile
from steerpipe.store.reader import Pack


class ProfileKeeper:
    """Knows what earlier runs have learnt, warms a ladder when a run starts, and keeps what it learnt when it ends."""

    def __init__(self, pack: Pack, cache: Path, setting: str = "", file: Path | None = None) -> None:
        """`setting`: under which prediction is found to pay or not. `file`: instead of the usual one."""
        self._pack, self._setting = pack, setting
        self._identity = f"{pack.manifest.source}-{pack.manifest.expert_format.value}"
        self.file = file or profile_file(pack.folder, self._identity, cache, embedded=pack.folder == EMBEDDED)
        experts = sum(pack.spec.moe(layer).experts for layer in pack.spec.moe_layers)
        self._past = load_profile(self.file, self._identity, experts)
        self.learning: Learning | None = None

    @property
    def verdict(self) -> Verdict | None:
        """How trials of prediction ended when the setting was the same; None: nobody knows, or it is too long ago."""
        raw = None if self._past is None else self._past.verdicts.get(self._setting)
        return _verdict_in(raw) if _tokens_since(raw) < LONGEST_REST_TOKENS else None

    def learn(self, weights: ModelWeights) -> Learning | None:
        """From now on, while the model answers."""
        pack = self._pack
        self.learning = open_learning(self.file, pack.manifest.source, pack.folder, pack.spec, weights)
        return self.learning

    def warm(self, source: Ladder, slots: int) -> int:
        """Restores the counts and sends for the old residents, behind any demand; how many are on their way."""
        if self._past is None:
            return 0
        if isinstance(source.policy, Lfru):
            source.policy.restore(np.array(self._past.counts), source.tokens)
        return source.warm(self._past.warmest(slots, source.experts))

    def keep(self, source: Ladder, verdict: Verdict | None = None) -> bool:
        """Saves the profile; False where it could not be written. A run without a token leaves the old one alone."""
        if not source.tokens:
            return False
        counts = [0.0] * len(source.experts)
        if isinstance(source.policy, Lfru):
            counts = source.policy.counts(source.tokens).tolist()
        verdicts = {} if self._past is None else dict(self._past.verdicts)
        if verdict is not None:
            old = verdicts.pop(self._setting, None)
            since = _tokens_since(old) if verdict == self.verdict else 0.0
            verdicts[self._setting] = asdict(verdict) | {"tokens": since + source.tokens}
        kept = save_profile(self.file, Profile(self._identity, tuple(counts), tuple(source.residents), verdicts))
        if kept and self.learning is not None:
            self.learning.keep()
        return kept


def setting_of(config: EngineConfig, resolved: ResolvedConfig) -> str:
    """What decides whether prediction pays, as it was asked for: amounts of memory that are found out differ a little
    from run to run."""
    memory = ("fast_memory", "ram", "pin", "pace", "kv_memory")
    asked = {name: getattr(config, name) for name in (*memory, "policy", "quality", "cover")}
    found = {name: getattr(resolved, name) for name in ("device", "dtype", "threads", "max_batch")}
    return ", ".join(f"{name} {value}" for name, value in (found | asked | {"cores": os.cpu_count()}).items())


def _tokens_since(raw: object) -> float:
    """That were decoded by a verdict, in all runs since: short ones never come to a trial of their own."""
    tokens = raw.get("tokens", 0.0) if isinstance(raw, dict) else 0.0
    return float(tokens) if type(tokens) in (int, float) and 0 <= tokens < LONGEST_REST_TOKENS else LONGEST_REST_TOKENS


def _verdict_in(raw: object) -> Verdict | None:
    """None: it is none."""
    try:
        names, seconds, chosen = (raw[name] for name in ("names", "seconds", "chosen"))  # type: ignore[index]
        times = tuple(float(each) for each in seconds)
        fits = len(names) == len(times) >= 2 and type(chosen) is int and 0 <= chosen < len(names)
        positive = all(math.isfinite(each) and each > 0 for each in times)
        return Verdict(tuple(map(str, names)), times, chosen) if fits and positive else None
    except (TypeError, KeyError, ValueError, OverflowError):
        return None


def open_profile(config: EngineConfig, resolved: ResolvedConfig, pack: Pack, cache: Path) -> ProfileKeeper | None:
    """None: a run is to learn nothing, and to leave nothing behind."""
    return ProfileKeeper(pack, cache, setting_of(config, resolved)) if config.profile else None
