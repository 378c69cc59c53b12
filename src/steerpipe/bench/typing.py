"""What typing saves: the same prompts, typed at the same times, with each part of the work that is done meanwhile."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from rich.table import Table

from steerpipe.bench.typing_prompts import TypedPrompt
from steerpipe.bench.typing_run import FIRST_TOKENS, TypedAnswer, TypingClock, Typist, pause_allows
from steerpipe.core.config import EngineConfig
from steerpipe.core.errors import InputError
from steerpipe.core.sampling import SamplingSettings
from steerpipe.runtime.drafts import Drafts, DraftWork
from steerpipe.runtime.pipeline import Pipeline
from steerpipe.transfer.source import LadderSource

NOTHING = DraftWork(prefill=False, ahead_tokens=0, forecast=False, guess=False, promote=False)
ARMS: dict[str, DraftWork] = {
    "nothing": NOTHING,
    "prefill": DraftWork(prefill=True, ahead_tokens=0, forecast=False, guess=False, promote=False),
    "affinity": DraftWork(prefill=False, ahead_tokens=0, forecast=True, guess=False, promote=False),
    "n-gram": DraftWork(prefill=False, ahead_tokens=0, forecast=True, promote=False),
    "promotion": DraftWork(prefill=False, ahead_tokens=0, forecast=False, guess=False),
    "enter": DraftWork(prefill=False, forecast=False, guess=False, promote=False),
    "prefill+enter": DraftWork(forecast=False, guess=False, promote=False),
    "prefill+forecast": DraftWork(ahead_tokens=0),
    "all": DraftWork(),
}


@dataclass(frozen=True, slots=True)
class TypingOptions:
    """`warm`: one engine for all prompts, in their order; else each finds no expert in fast memory."""

    arms: tuple[str, ...] = tuple(ARMS)
    warm: bool = True
    virtual: bool = True
    last_seconds: float | None = None  # what was typed earlier before Enter is there at once

    def __post_init__(self) -> None:
        for arm in self.arms:
            if arm not in ARMS:
                raise InputError(f"{arm!r} is no part of steering", fix=f"give some of {', '.join(ARMS)}")


@dataclass(frozen=True, slots=True)
class ArmResult:
    """All prompts with one way of working."""

    arm: str
    answers: tuple[TypedAnswer, ...]
    changed: int = 0  # answers with other tokens than the first arm's: on a GPU, where chunks may change the last bits

    def first_token_ms(self, *, begun: bool = False) -> float | None:
        """The median; `begun`: of those whose answer was begun before Enter. None: there are none."""
        chosen = [each.first_token_seconds for each in self.answers if each.ahead_tokens or not begun]
        return 1e3 * median(chosen) if chosen else None

    @property
    def stall_ms(self) -> float:
        """Mean, until the 16th token."""
        return 1e3 * sum(each.stall_seconds for each in self.answers) / len(self.answers)

    @property
    def decode_stall_ms(self) -> float:
        """Mean, of those tokens without the prompt."""
        return 1e3 * sum(each.decode_stall_seconds for each in self.answers) / len(self.answers)

    @property
    def misses(self) -> float:
        return sum(each.misses for each in self.answers) / len(self.answers)

    def as_json(self) -> dict[str, Any]:
        hidden = {"token_ids", "name"}  # of other people's texts
        rows = [{k: v for k, v in asdict(each).items() if k not in hidden} for each in self.answers]
        return {
            "arm": self.arm, "first_token_ms": self.first_token_ms(),
            "begun_first_token_ms": self.first_token_ms(begun=True),
            "begun": sum(each.ahead_tokens > 0 for each in self.answers), "stall_ms": self.stall_ms,
            "decode_stall_ms": self.decode_stall_ms, "misses": self.misses, "changed": self.changed, "answers": rows,
        }  # fmt: skip


def run_typing(
    model: str | None, config: EngineConfig, prompts: Sequence[TypedPrompt], options: TypingOptions,
    say: Callable[[str], None], keep: Callable[[Sequence[ArmResult]], None] = lambda _: None,
) -> list[ArmResult]:  # fmt: skip
    """Every arm types every prompt; `keep` gets the results whenever they have grown. Raises AssertionError if any of
    them changes a token on a CPU."""
    if "promotion" in options.arms:
        _check_promotion(model, config)
    typed = [each if options.last_seconds is None else each.last(options.last_seconds) for each in prompts]
    results: list[ArmResult] = []
    for arm in options.arms:
        answers: list[TypedAnswer] = []
        for answer in _run_arm(model, config, typed, ARMS[arm], options):
            answers.append(answer)
            keep([*results, ArmResult(arm, tuple(answers))])
        pairs = zip(results[0].answers if results else answers, answers, strict=True)
        changed = [one.name for one, other in pairs if one.token_ids != other.token_ids]
        assert not changed or device_of(config) == "cuda", f"{arm} has changed the answers to {changed}"
        results.append(ArmResult(arm, tuple(answers), len(changed)))
        say(f"{arm}: first token after {results[-1].first_token_ms():.0f} ms (median of {len(answers)})")
    return results


def device_of(config: EngineConfig) -> str:
    """Where it computes."""
    return "cuda" if config.device != "cpu" and torch.cuda.is_available() else "cpu"


def _check_promotion(model: str | None, config: EngineConfig) -> None:
    """Raises InputError where that arm would do nothing."""
    if config.ram is None:
        raise InputError("promotion fills RAM, and there is none", fix="give --ram, or leave that arm out")
    with Pipeline(model, config=config) as pipe:
        promotes = isinstance(pipe.experts, LadderSource) and pipe.experts.promotion is not None
    if not promotes:
        raise InputError(
            f"with --ram {config.ram} there is nothing to promote: no expert lies on the disk alone",
            fix="give less --ram than all experts take, on a CPU; or leave that arm out",
        )


def _run_arm(
    model: str | None, config: EngineConfig, prompts: Sequence[TypedPrompt], work: DraftWork, options: TypingOptions
) -> Iterator[TypedAnswer]:
    settings = SamplingSettings(temperature=0.0, max_tokens=FIRST_TOKENS, ignore_eos=True)
    for group in [prompts] if options.warm else [[each] for each in prompts]:
        with Pipeline(model, config=config) as pipe:
            drafts = pipe.drafts(work)
            clock = TypingClock(virtual=options.virtual, moving=partial(_moving, pipe, drafts))
            typist = Typist(pipe.engine, drafts, pipe.counters, clock)
            for number, prompt in enumerate(group):
                yield typist.type(prompt, settings, f"person {number}")
                pipe.engine.forget_prefixes()


def _moving(pipe: Pipeline, drafts: Drafts) -> bool:
    return pipe.experts.moving if isinstance(pipe.experts, LadderSource) else drafts.bytes_in_flight > 0


def render_typing(results: Sequence[ArmResult], prompts: Sequence[TypedPrompt], title: str) -> Table:
    allowed, lengths = sum(pause_allows(prompt) for prompt in prompts), [prompt.tokens for prompt in prompts]
    caption = (
        f"{len(prompts)} prompts of {min(lengths)} to {max(lengths)} tokens; the last pause of {allowed} was over "
        f"250 ms. stall and misses: mean from Enter to token {FIRST_TOKENS}; decoding: stall from the first token on"
    )
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
    for heading in (
        "while typing",
        "first token ms",
        "of first arm",
        "answers begun",
        "of these ms",
        "stall ms",
        "decoding",
        "misses",
    ):
        table.add_column(heading, justify="left" if heading == "while typing" else "right")
    base = results[0].first_token_ms() or 0.0
    for result in results:
        first, begun = result.first_token_ms() or 0.0, result.first_token_ms(begun=True)
        table.add_row(
            result.arm, f"{first:.0f}", f"{first / base:.0%}" if base else "",
            str(sum(each.ahead_tokens > 0 for each in result.answers)), "" if begun is None else f"{begun:.0f}",
            f"{result.stall_ms:.0f}", f"{result.decode_stall_ms:.0f}", f"{result.misses:.0f}",
        )  # fmt: skip
    return table
