"""Every field that a client may send, in three lists; what is in none of them is refused with the nearest name.

applied: the fields of the request models in `schema`.
neutral: would change the output, and are not computed here: accepted only with values that change nothing.
inert:   change nothing here: accounts, storage, routing between datacentres, hints about speed.
"""

import difflib
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from steerpipe.server.faults import ApiError

INERT_CHAT = frozenset({
    "metadata", "parallel_tool_calls", "prediction", "prompt_cache_key", "prompt_cache_retention", "safety_identifier",
    "service_tier", "store", "user",
})  # fmt: skip
INERT_COMPLETION = frozenset({"user"})
NEUTRAL_CHAT: dict[str, tuple[object, ...]] = {
    "audio": (), "function_call": ("none", "auto"), "functions": ([],), "logit_bias": ({},), "modalities": (["text"],),
    "moderation": (), "reasoning_effort": (), "response_format": ({"type": "text"},),
    "tool_choice": ("none", "auto"), "tools": ([],), "verbosity": (), "web_search_options": (),
}  # fmt: skip
NEUTRAL_COMPLETION: dict[str, tuple[object, ...]] = {"best_of": (1,), "logit_bias": ({},), "suffix": ("",)}
# of a message: what clients send back as they received it
INERT_MESSAGE = frozenset({"annotations", "reasoning_content"})
NEUTRAL_MESSAGE: dict[str, tuple[object, ...]] = {
    "audio": (), "function_call": (), "name": (), "refusal": (), "tool_call_id": (), "tool_calls": ([],),
}  # fmt: skip


def applied_fields(
    raw: Mapping[str, Any],
    model: type[BaseModel],
    *,
    neutral: Mapping[str, tuple[object, ...]],
    inert: frozenset[str] = frozenset(),
    where: str = "",
) -> dict[str, Any]:
    """`raw` without what changes nothing. Raises ApiError for what would, and for what nobody knows."""
    kept: dict[str, Any] = {}
    for name, value in raw.items():
        if name in model.model_fields:
            kept[name] = value
        elif name in neutral:
            if value is not None and not any(_same(value, each) for each in neutral[name]):
                raise _unsupported(where + name, neutral[name])
        elif name not in inert:
            raise _unknown(name, where, [*model.model_fields, *neutral, *inert])
    return kept


def _same(value: object, neutral: object) -> bool:
    """Equal as JSON has it, where true is not 1."""
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral


def _unsupported(name: str, neutral: tuple[object, ...]) -> ApiError:
    allowed = " or ".join(["null", *(repr(value) for value in neutral)])
    return ApiError(
        400,
        f"{name} is not supported with this value, and would change the output; leave it out, or send {allowed}",
        param=name,
        code="unsupported_parameter",
    )


def _unknown(name: str, where: str, known: list[str]) -> ApiError:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {where}{near[0]}?" if near else "; leave it out"
    shown = name if len(name) <= 80 else name[:80] + "…"
    return ApiError(400, f"{where}{shown} is not a field{hint}", param=where + shown, code="unknown_parameter")
