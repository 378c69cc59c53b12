"""`trace.json`: whose routing a trace folder holds, in which form. Strict: what is not understood is refused."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from steerpipe.core.errors import DamagedFileError, InputError
from steerpipe.predict.records import Geometry
from steerpipe.trace.fields import checked

SCHEMA = 1
FILE = "trace.json"
_KIND = "steerpipe-trace"
_AGAIN = "trace the prompts again into an empty folder"
_COUNTS = ("layers", "experts", "top_k", "hidden", "vocabulary", "max_tokens", "batch")
_LEAST = dict.fromkeys(_COUNTS, 1) | {"generate": 0}


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """`digest` is of what decides the routing: equal digests, equal weights."""

    name: str
    digest: str


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """How the tokens came about, and what is kept of them."""

    engine: str  # steerpipe or transformers
    dtype: str  # that the model computed in
    max_tokens: int  # longer texts are cut into windows of so many
    generate: int = 0  # most tokens of an answer; 0: prompts alone
    raw: bool = False  # texts as they are, without the chat template
    batch: int = 1  # prompts that were answered together: the last bits of a product depend on it
    seed: int = 0  # of the answers
    weights: bool = False
    states: bool = False


@dataclass(frozen=True, slots=True)
class TraceHeader:
    model: ModelIdentity
    geometry: Geometry
    vocabulary: int
    generator: str  # which program at which version
    options: TraceOptions

    def to_json(self) -> bytes:
        return json.dumps({"kind": _KIND, "schema": SCHEMA, **asdict(self)}, indent=2).encode() + b"\n"

    @classmethod
    def from_json(cls, content: bytes, where: str) -> "TraceHeader":
        """DamagedFileError: not a trace's. InputError: a newer one."""
        try:
            raw = json.loads(content)
            known = raw.pop("kind") == _KIND
            schema = raw.pop("schema")
        except (ValueError, KeyError, AttributeError, TypeError):
            known, raw, schema = False, {}, None
        if not known:
            raise DamagedFileError(f"{where} is not the header of a trace", fix=_AGAIN)
        if schema != SCHEMA:
            raise InputError(
                f"{where} has schema {schema}; this steerpipe reads {SCHEMA}", fix="use the steerpipe that wrote it"
            )
        try:
            parts = {"model": ModelIdentity, "geometry": Geometry, "options": TraceOptions}
            raw |= {name: checked(kind, raw[name], _LEAST) for name, kind in parts.items()}
            header = checked(cls, raw, _LEAST)
            if header.geometry.top_k > header.geometry.experts:
                raise ValueError(f"{header.geometry.top_k} of {header.geometry.experts} experts")
        except (KeyError, TypeError, ValueError) as problem:
            raise DamagedFileError(f"{where} is not a whole header: {problem}", fix=_AGAIN) from None
        return header

    def differences(self, other: "TraceHeader") -> list[str]:
        """What keeps a run with `other` from going on in this one's folder; versions of the program may differ."""
        mine, theirs = _flat(asdict(self)), _flat(asdict(other))
        return [
            f"{key} {mine[key]!r} instead of {theirs[key]!r}"
            for key in mine
            if key != "generator" and mine[key] != theirs[key]
        ]


def _flat(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in nested.items():
        found.update(_flat(value, f"{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value})
    return found
