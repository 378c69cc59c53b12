"""How the next token is chosen: settings only. The arithmetic is in `model.sampling`."""

import difflib
import math
from dataclasses import dataclass, fields, replace
from typing import Any

from steerpipe.core.errors import RequestError


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """Order of application: penalties, temperature, top-k, top-p, min-p. `temperature=0` is greedy.

    The defaults change nothing: plain sampling from the model's own distribution.
    """

    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off
    repetition_penalty: float = 1.0  # over prompt and answer, as in Hugging Face
    presence_penalty: float = 0.0  # over the answer, as in OpenAI's API
    frequency_penalty: float = 0.0  # over the answer, as in OpenAI's API
    seed: int | None = None  # None: a fresh one per request
    max_tokens: int | None = None  # None: as far as the context reaches
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # None: off; 0: the chosen token only; n: and the n likeliest

    def __post_init__(self) -> None:
        checks = (
            ("temperature", math.isfinite(self.temperature) and self.temperature >= 0, "a finite number, 0 or more"),
            ("top_k", self.top_k >= 0, "0 (off) or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "between 0 and 1"),
            (
                "repetition_penalty",
                math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0,
                "a finite number above 0",
            ),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "between -2 and 2"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "between -2 and 2"),
            ("seed", self.seed is None or 0 <= self.seed < 2**64, "between 0 and 2**64 - 1"),
            ("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "1 or more"),
            ("stop", all(self.stop), "without empty strings"),
            ("stop_token_ids", all(i >= 0 for i in self.stop_token_ids), "token ids, 0 or more"),
            ("logprobs", self.logprobs is None or 0 <= self.logprobs <= 20, "between 0 and 20"),
        )
        for name, holds, must_be in checks:
            if not holds:
                raise RequestError(f"{name} is {getattr(self, name)!r}", fix=f"{name} must be {must_be}")

    def override(self, **given: Any) -> "SamplingSettings":
        """These settings with every given value that is not None put in its place."""
        known = [f.name for f in fields(self)]
        for name in given.keys() - set(known):
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise RequestError(f"{name} is not a sampling setting", fix=f"{hint}the settings are {', '.join(known)}")
        return replace(self, **{name: value for name, value in given.items() if value is not None})
