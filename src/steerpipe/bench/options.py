"""What `bench decode` may be asked for, checked before anything is allocated."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from steerpipe.bench.shapes import SHAPES
from steerpipe.core.errors import ConfigError
from steerpipe.store.formats import ExpertFormat, parse_expert_format

Item = TypeVar("Item")
DEVICES = ("auto", "cpu", "cuda")
DRIVERS = {"auto": None, "direct": True, "served": False}  # → CudaSource's `direct`
LONGEST_CONTEXT = 1 << 17  # tokens
MOST_AHEAD = 3  # layers: what is recorded
LARGEST_BATCH = 16  # rows of one cell


@dataclass(frozen=True, slots=True)
class DecodeOptions:
    """One run of the benchmark: every format with every residency, context and batch."""

    shape: str = "qwen3-30b"
    formats: tuple[ExpertFormat, ...] = (ExpertFormat.BFLOAT16,)
    residencies: tuple[float, ...] = (100.0,)  # percent of all experts that have slots; 0: every expert is a miss
    contexts: tuple[int, ...] = (128,)  # tokens that are there before the measured ones
    batches: tuple[int, ...] = (1,)
    routing: str = "auto"  # a file, "generator", "model", or "auto": generator on a GPU, model on a CPU
    tokens: int = 128  # measured in each repeat
    repeats: int = 3
    warmup: int = 32  # tokens before them: graphs are captured and caches filled
    prefill: int = 0  # tokens of a prompt whose prefill is measured too; 0: none
    policy: str = "lfru"
    driver: str = "auto"  # who brings what one row misses: the device by itself (direct) or the host (served)
    predict: str = "none"  # whose forecasts, recorded with the routing, move experts ahead; see bench/forecasts.py
    horizon: int = 2  # layers that they look ahead
    device: str = "auto"
    dtype: str = "auto"  # of dense weights and activations: bfloat16 on a GPU, float32 on a CPU
    seed: int = 0

    def __post_init__(self) -> None:
        _among("shape", self.shape, SHAPES)
        _among("device", self.device, DEVICES)
        _among("policy", self.policy, ("lru", "lfru"))
        _among("driver", self.driver, tuple(DRIVERS))
        _among("dtype", self.dtype, ("auto", "bfloat16", "float32"))
        for residency in self.residencies:
            _within("residency", residency, 0, 100, "percent of all experts")
        for context in self.contexts:
            _within("context", context, 0, LONGEST_CONTEXT, "tokens")
        for batch in self.batches:
            _within("batch", batch, 1, LARGEST_BATCH, "sequences")
        _within("tokens", self.tokens, 1, 100_000, "per repeat")
        _within("repeat", self.repeats, 1, 1000, "times")
        _within("warmup", self.warmup, 0, 100_000, "tokens")
        _within("prefill", self.prefill, 0, LONGEST_CONTEXT, "tokens")
        _within("horizon", self.horizon, 1, MOST_AHEAD, "layers")
        if self.predict != "none":
            self._check_prediction()
        for name in ("formats", "residencies", "contexts", "batches"):
            if not getattr(self, name):
                raise ConfigError(f"{name} is empty", fix="give at least one, such as the default")

    def _check_prediction(self) -> None:
        if self.routing in ("auto", "generator", "model"):
            raise ConfigError(
                f"--predict {self.predict} needs routing and forecasts that were recorded together",
                fix="give --routing a file of benchmarks/record_forecasts.py",
            )
        if self.batches != (1,) or all(each in (0.0, 100.0) for each in self.residencies):
            raise ConfigError(
                "forecasts move experts for one row, within a budget",
                fix="give --batch 1, and a --residency between 0 and 100",
            )
        if self.driver == "direct" and self.horizon > 1:
            raise ConfigError(
                f"what the device sends for by itself is of the next layer, not {self.horizon} ahead",
                fix="give --horizon 1, or leave --driver out",
            )

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that a run has."""
        return max(max(self.contexts) + self.warmup + self.tokens + 1, self.prefill)


def parse_options(
    *, formats: str, residency: str, context: str, batch: str, **others: str | int,
) -> DecodeOptions:  # fmt: skip
    """Options from the words of a command line; lists are divided by commas. `others` are fields as they are."""
    return DecodeOptions(
        formats=_list("format", formats, _format),
        residencies=_list("residency", residency, _percent),
        contexts=_list("context", context, _count),
        batches=_list("batch", batch, _count),
        **others,  # type: ignore[arg-type]
    )


def _list(name: str, text: str, parse: Callable[[str], Item]) -> tuple[Item, ...]:
    parts = [part.strip() for part in text.split(",")]
    try:
        return tuple(parse(part) for part in parts)
    except ValueError:
        raise ConfigError(f"--{name} is {text!r}", fix="give numbers divided by commas, such as 128,4096") from None


def _format(text: str) -> ExpertFormat:
    found = parse_expert_format(text)
    if found is None:
        raise ConfigError("a benchmark has no checkpoint whose native format it could take", fix="give bf16 or int4")
    return found


def _percent(text: str) -> float:
    return float(text.removesuffix("%"))


def _count(text: str) -> int:
    """'4096' or '4k'."""
    if re.fullmatch(r"\d+k", text):
        return int(text[:-1]) * 1024
    return int(text)


def _among(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{value!r} is not a {name}", fix=f"choose one of {', '.join(known)}")


def _within(name: str, value: float, least: float, most: float, unit: str) -> None:
    if not least <= value <= most:
        raise ConfigError(f"{name} is {value:g}", fix=f"give {least:g} to {most:g} {unit}")
