"""Dataclasses from JSON that somebody may have damaged: every field by its own type, none too many, none too few."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

Made = TypeVar("Made")


def checked(kind: type[Made], raw: Any, least: Mapping[str, int] | None = None) -> Made:
    """`kind` from `raw`, whose fields may not lie below `least`. TypeError or ValueError: not such an object."""
    made = kind(**raw)
    for field in fields(kind):  # type: ignore[arg-type]  # there is no name for the type of dataclasses
        value = getattr(made, field.name)
        if isinstance(field.type, type) and type(value) is not field.type:
            raise TypeError(f"{field.name} is {value!r}, not {field.type.__name__}")
        if field.name in (least or {}) and value < (least or {})[field.name]:
            raise ValueError(f"{field.name} is {value}")
    return made
