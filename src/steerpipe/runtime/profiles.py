"""Carries what was learnt about a pack's experts from one run to the next."""

from pathlib import Path

import numpy as np

from steerpipe.runtime.experts import Ladder
from steerpipe.runtime.models import EMBEDDED
from steerpipe.store.policies import Lfru
from steerpipe.store.profile import Profile, load_profile, profile_file, save_profile
from steerpipe.store.reader import Pack


class ProfileKeeper:
    """Warms a ladder when a run starts, and keeps what it learnt when the run ends."""

    def __init__(self, source: Ladder, pack: Pack, cache: Path) -> None:
        self._source = source
        self._identity = f"{pack.manifest.source}-{pack.manifest.expert_format.value}"
        self.file = profile_file(pack.folder, self._identity, cache, embedded=pack.folder == EMBEDDED)

    def warm(self, slots: int) -> int:
        """Restores the counts and sends for the old residents, behind any demand; how many are on their way."""
        source = self._source
        profile = load_profile(self.file, self._identity, len(source.experts))
        if profile is None:
            return 0
        if isinstance(source.policy, Lfru):
            source.policy.restore(np.array(profile.counts), source.tokens)
        return source.warm(profile.warmest(slots, source.experts))

    def keep(self) -> bool:
        """Saves the profile; False where it could not be written. A run without a token leaves the old one alone."""
        source = self._source
        if not source.tokens:
            return False
        counts = [0.0] * len(source.experts)
        if isinstance(source.policy, Lfru):
            counts = source.policy.counts(source.tokens).tolist()
        return save_profile(self.file, Profile(self._identity, tuple(counts), tuple(source.residents)))
