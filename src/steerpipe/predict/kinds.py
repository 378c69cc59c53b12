"""Every kind of predictor that a file can hold."""

from collections.abc import Mapping
from types import MappingProxyType

from steerpipe.core.errors import ConfigError
from steerpipe.predict.affinity import TokenAffinity
from steerpipe.predict.blend import Blend
from steerpipe.predict.estimator import Estimator, Hybrid
from steerpipe.predict.frequency import Frequency
from steerpipe.predict.head import ResidualHead
from steerpipe.predict.lookahead import RouterLookahead
from steerpipe.predict.preattention import PreAttention
from steerpipe.predict.previous import PreviousToken
from steerpipe.predict.stored import StoredPredictor
from steerpipe.predict.trajectory import Trajectory
from steerpipe.predict.transition import Transition

_ALL: tuple[type[StoredPredictor], ...] = (
    Frequency, PreviousToken, Transition, TokenAffinity, Trajectory, RouterLookahead, Estimator, Hybrid, PreAttention,
    ResidualHead, Blend,
)  # fmt: skip
KINDS: Mapping[str, type[StoredPredictor]] = MappingProxyType({each.kind: each for each in _ALL})


def class_of(kind: str) -> type[StoredPredictor]:
    found = KINDS.get(kind)
    if found is None:
        raise ConfigError(
            f"there is no predictor of kind {kind!r}",
            fix=f"it can be one of {', '.join(KINDS)}: is the file a newer one?",
        )
    return found
