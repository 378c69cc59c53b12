"""Settings of the engine: strict, frozen, and read in one place.

A value comes from a flag, else from the environment (`STEERPIPE_DTYPE`), else from the `[engine]` table of a TOML file,
else from the defaults below. An unknown name or a wrong value is a ConfigError wherever it comes from.
`core.resolve` settles what is left open ("auto" or None).
"""

import difflib
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from steerpipe.core.cover import MOST_TOKENS, is_cover
from steerpipe.core.errors import ConfigError
from steerpipe.core.geometry import CELL_ROWS
from steerpipe.core.quality import Dial, MissPolicy
from steerpipe.core.units import parse_bytes

Dtype = Literal["auto", "float32", "bfloat16"]
Device = Literal["auto", "cpu", "cuda"]
Policy = Literal["auto", "lru", "lfru", "reuse"]
Predict = Literal["auto", "on", "off"]

SHARED = "shared"  # kv_memory: no memory of its own
PREFIX = "STEERPIPE_"
API_KEY = "STEERPIPE_API_KEY"  # of the server; a secret, so it is no setting that is shown or kept in a file
# Kubernetes sets these in every pod beside a service that is called steerpipe; they are not ours.
_OF_KUBERNETES = re.compile(r"STEERPIPE_(SERVICE_(HOST|PORT)|PORT)(_.*)?")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What a person may choose. Every value is checked on creation."""

    dtype: Dtype = "auto"
    device: Device = "auto"
    threads: int | None = None  # CPU threads; None: one per usable core
    max_context: int | None = None  # tokens per sequence; None: the model's own limit, or what the memory holds
    prefill_chunk: int = 256  # tokens per prefill step
    # Keys and values: "512MiB"; "shared": pages of fast_memory, which experts have when keys and values do not; None:
    # what the batch needs, within the memory that is free.
    kv_memory: str | None = None
    max_batch: int = 8  # sequences decoded together
    fast_memory: str = "auto"  # slots for experts: "auto", bytes ("4GiB") or a share of all experts ("25%")
    # Bytes for experts in RAM. Without a GPU the slots are among them, and None means the slots alone; with one it is
    # what lies behind the slots, and None means all that fits.
    ram: str | None = None
    pin: str = "auto"  # of that, page-locked for a GPU: "auto" (all of it), bytes, or "0" (none)
    pace: str | None = None  # bytes per second to which the link to the experts is slowed; None: not slowed
    # Which expert leaves when a slot is needed; "auto": reuse where the model comes with a forecast of it, else lfru.
    policy: Policy = "auto"
    # What is done about an expert that is not there: a position of the dial (exact, high, balanced, fast), one miss
    # policy for all (surrogate …), or the path of a plan (.json). core.quality, docs/quality.md.
    quality: str = "exact"
    quality_profile: str | None = None  # what `steerpipe calibrate` wrote; None: the one beside the model
    # So many first tokens of an answer do not wait for experts, which come meanwhile: "4", or "auto". Changes text.
    cover: str | None = None
    predict: Predict = "auto"  # move experts before they are needed: where that is measured to pay, always, or never
    profile: bool = True  # what one run learnt about the experts warms the next
    cache_dir: str | None = None  # where checkpoints are kept as packs; None: steerpipe/ in the user's cache

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (value is None and field.default is None):
                _RULES[field.name].check(field.name, value)


@dataclass(frozen=True, slots=True)
class _Rule:
    """What a value must be, and how text (the environment has nothing else) becomes one."""

    expected: str
    holds: Callable[[Any], bool]
    from_text: Callable[[str], object] = str

    def check(self, label: str, value: object) -> None:
        if not self.holds(value):
            kind = type(value).__name__
            raise ConfigError(f"{label} is {value!r} ({kind})", fix=f"{label} must be {self.expected}")


def _one_of(*choices: str) -> _Rule:
    return _Rule("one of " + ", ".join(choices), lambda value: isinstance(value, str) and value in choices)


def _count(unit: int = 1, most: int | None = None) -> _Rule:
    def holds(value: object) -> bool:  # True is an int to Python, but nobody means 1 by it
        whole = isinstance(value, int) and not isinstance(value, bool) and value >= unit and value % unit == 0
        return whole and (most is None or value <= most)  # type: ignore[operator]

    expected = "an integer, 1 or more" if unit == 1 else f"a positive multiple of {unit}"
    expected = f"an integer from 1 to {most}" if most else expected
    return _Rule(expected, holds, lambda text: int(text) if re.fullmatch(r"\d{1,18}", text) else text)


def _is_amount(value: object) -> bool:
    try:
        return isinstance(value, str) and parse_bytes(value) > 0
    except ConfigError:
        return False


def _is_auto_or_bytes(value: object) -> bool:
    return value in ("auto", "0") or _is_amount(value)


def _truth(text: str) -> object:
    return {"true": True, "1": True, "false": False, "0": False}.get(text.strip().lower(), text)


def _is_share_or_amount(value: object) -> bool:
    if isinstance(value, str) and re.fullmatch(r"\d+(\.\d+)?%", value):
        return 0 < float(value[:-1]) <= 100
    return value == "auto" or _is_amount(value)


def _is_quality(value: object) -> bool:
    return isinstance(value, str) and (value in (*Dial, *MissPolicy) or value.endswith(".json"))


_RULES: dict[str, _Rule] = {
    "dtype": _one_of("auto", "float32", "bfloat16"),
    "device": _one_of("auto", "cpu", "cuda"),
    "threads": _count(most=256),  # torch crashes when the system refuses it a thread
    "max_context": _count(),
    "prefill_chunk": _count(CELL_ROWS),
    "kv_memory": _Rule(
        'an amount of bytes as text, such as "512MiB", or "shared"', lambda value: value == SHARED or _is_amount(value)
    ),
    "max_batch": _count(),
    "fast_memory": _Rule('"auto", an amount of bytes such as "4GiB", or a share such as "25%"', _is_share_or_amount),
    "ram": _Rule('an amount of bytes as text, such as "512MiB"', _is_amount),
    "pin": _Rule('"auto", an amount of bytes such as "8GiB", or "0"', _is_auto_or_bytes),
    "pace": _Rule('bytes per second as text, such as "2GB"', _is_amount),
    "policy": _one_of("auto", "lru", "lfru", "reuse"),
    "quality": _Rule(f"one of {', '.join((*Dial, *MissPolicy))}, or the path of a plan (.json)", _is_quality),
    "quality_profile": _Rule("the path of a file", lambda value: isinstance(value, str) and bool(value.strip())),
    "cover": _Rule(f'"auto", or a number of tokens as text, "1" to "{MOST_TOKENS}"', is_cover),
    "predict": _one_of("auto", "on", "off"),
    "profile": _Rule("true or false", lambda value: isinstance(value, bool), _truth),
    "cache_dir": _Rule("the path of a folder", lambda value: isinstance(value, str) and bool(value.strip())),
}
assert _RULES.keys() == {f.name for f in fields(EngineConfig)}, "every setting has one rule"


def load_config(
    flags: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
    file: Path | None = None,
) -> EngineConfig:
    """The settings from all sources; a flag that is None was not given.

    `environ` is the process's environment where it is None. The result has not been resolved.
    """
    given = {name: value for name, value in (flags or {}).items() if value is not None}
    _check_all(given, label=str)
    from_file = {} if file is None else _read_file(file)
    from_environment = _read_environment(os.environ if environ is None else environ)
    return EngineConfig(**(from_file | from_environment | given))


def cache_folder(config: EngineConfig, environ: Mapping[str, str] | None = None) -> Path:
    """Where packs of checkpoints are kept: as set, else in the user's cache (XDG_CACHE_HOME, or ~/.cache)."""
    if config.cache_dir is not None:
        return Path(config.cache_dir).expanduser()
    base = (os.environ if environ is None else environ).get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "steerpipe"


def read_api_keys(environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """The server's API keys in the environment, divided by commas; none where the variable is not set."""
    text = (os.environ if environ is None else environ).get(API_KEY, "")
    return tuple(key.strip() for key in text.split(",") if key.strip())


def _read_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    texts = {
        name.removeprefix(PREFIX).lower(): text
        for name, text in environ.items()
        if name.startswith(PREFIX) and name != API_KEY and not _OF_KUBERNETES.fullmatch(name)
    }
    values = {name: _RULES[name].from_text(text) if name in _RULES else text for name, text in texts.items()}
    _check_all(values, label=lambda name: PREFIX + name.upper())
    return values


def _read_file(file: Path) -> dict[str, Any]:
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}", fix="give --config a file that exists") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not UTF-8 text: {error}", fix="save the file as UTF-8") from error
    except tomllib.TOMLDecodeError as error:  # its message ends with the line and column
        raise ConfigError(f"{file} is not valid TOML: {error}", fix="correct that line of the file") from error
    for name in tables:
        if name != "engine":
            raise ConfigError(f"{file} has {name!r}, which means nothing here", fix="put every setting under [engine]")
    engine = tables.get("engine", {})
    if not isinstance(engine, dict):
        raise ConfigError(f"{file}: engine is {engine!r}", fix="make engine a table: [engine]")
    _check_all(engine, label=lambda name: f"{file}: {name}")
    return engine


def refuse_lossy(config: EngineConfig, what: str) -> None:
    """Raises ConfigError if answers may differ from the model's: `what` is of an exact run."""
    for name, value in (("quality", config.quality), ("cover", config.cover)):
        if value not in (Dial.EXACT, MissPolicy.WAIT, None):
            raise ConfigError(
                f"{name} is {value}, and {what} is of exact answers", fix=f"leave {name} out: STEERPIPE_{name.upper()}"
            )


def _check_all(values: Mapping[str, object], label: Callable[[str], str]) -> None:
    """`label` says how a name is spelt where the values come from."""
    for name, value in values.items():
        if name not in _RULES:
            raise _unknown(label(name), near=difflib.get_close_matches(name, _RULES, n=1), label=label)
        _RULES[name].check(label(name), value)


def _unknown(spelt: str, near: list[str], label: Callable[[str], str]) -> ConfigError:
    guess = f"did you mean {label(near[0])}? " if near else ""
    return ConfigError(f"{spelt} is not a setting", fix=f"{guess}the settings are {', '.join(_RULES)}")
