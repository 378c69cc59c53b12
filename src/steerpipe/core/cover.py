"""What cover tokens were: an answer's first tokens, run on the experts that were there while the others came."""

import re
from dataclasses import dataclass
from typing import Any

from steerpipe.core.quality import Substituted

AUTO = "auto"
MOST_TOKENS = 64  # of an answer that may be covered
MOST_AUTO_TOKENS = 16  # of them, where nobody gave a number


@dataclass(frozen=True, slots=True)
class Covered:
    """Of one answer. `seconds`: the link's time for the experts that were gone without, each counted once."""

    tokens: int
    seconds: float
    experts: int
    uses: Substituted
    calibrated: bool  # whether `uses.nats` is what a calibration expects; else nobody knows

    @property
    def nats_per_token(self) -> float | None:
        """Expected KL of a covered token; None: this model has no profile."""
        return self.uses.nats / self.tokens if self.calibrated and self.tokens else None

    def line(self) -> str:
        """What a person is told beside an answer."""
        if not self.tokens:
            return "cover: no token was covered"
        nats = self.nats_per_token
        cost = "KL unknown: the model has no profile" if nats is None else f"KL of about {nats:.2f} nats per token"
        return (
            f"cover: {self.tokens} tokens ran without {self.experts} experts that were not there "
            f"({self.seconds * 1e3:.0f} ms of transfers, {self.uses.share:.0%} of uses, {self.uses.patched} made good "
            f"later), {cost}"
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens, "covered_ms": self.seconds * 1e3, "experts": self.experts, "uses": self.uses.uses,
            "substituted": self.uses.substituted, "patched": self.uses.patched,
            "expected_nats_per_token": self.nats_per_token,
        }  # fmt: skip


def is_cover(value: object) -> bool:
    """Whether it is what `--cover` takes: "auto", or a number of tokens as text."""
    number = isinstance(value, str) and re.fullmatch("[1-9][0-9]?", value) is not None and int(value) <= MOST_TOKENS
    return number or value == AUTO
