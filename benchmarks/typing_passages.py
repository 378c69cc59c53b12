"""Every prefix that drafts pass through while they are typed, with the routing that nano has for it.

    PYTHONPATH=src:. python benchmarks/typing_passages.py LOG OUT.npz [--prompts 8] [--last 2.5] [--most-tokens 90]

For each key of the last seconds before Enter: when it came, which tokens were certain then, what the n-gram model
thought of the unfinished end, and, where the pause after it was long enough for an answer to be begun, the finished
prompt with the first 16 tokens of its answer. `typing_on_gpu.py` plays it on a device at full shape.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.typing_openings import Routings
from steerpipe.bench.typing_prompts import TypedPrompt, read_prompts
from steerpipe.engine.tokenizer import ChatMessage
from steerpipe.intake.draft import Draft
from steerpipe.intake.edits import paste
from steerpipe.intake.guess import Guesser, token_shares
from steerpipe.intake.ngram import CharacterModel
from steerpipe.intake.pauses import before_enter
from steerpipe.predict.openings import FIRST_TOKENS
from steerpipe.runtime.pipeline import Pipeline
from steerpipe.runtime.typed import TypedPrompts

Ids = tuple[int, ...]


@dataclass(frozen=True)
class Moment:
    """After one key. `route`: that of its certain tokens, `complete`: that of the prompt as it stands and its answer;
    -1 where the next key comes before an answer would be begun."""

    seconds: float
    stable: int
    route: int
    complete: int
    quiet_seconds: float
    guessed: tuple[tuple[int, float], ...]  # tokens of the unfinished end, and how often each may come


@dataclass(frozen=True)
class Passage:
    """One prompt. The first moment is what was typed before."""

    enter_seconds: float
    moments: tuple[Moment, ...]


@dataclass(frozen=True)
class Route:
    """`routing` [tokens, L, k] of a prompt of `prompt` tokens and what of an answer follows it."""

    ids: NDArray[np.int32]
    prompt: int
    routing: NDArray[np.uint8]


class Recorder:
    """Runs nano once for each prompt that is nobody's beginning."""

    def __init__(self) -> None:
        self._sink = Routings()
        self.pipe = Pipeline(
            dtype="float32", threads=1, predict="off", profile=False, fast_memory="100%", max_context=512,
            sink=self._sink,
        )  # fmt: skip
        self._prompts = TypedPrompts(self.pipe.codec)
        assert self._prompts.rule is not None, "nano's tokenizer has a rule"
        self._guesser = Guesser(CharacterModel.load(), self._prompts.rule, self._prompts.encode)
        self.routes: list[Route] = []

    def passage(self, prompt: TypedPrompt) -> Passage:
        draft, prefix = Draft(), self._prompts.begin()
        seen: list[tuple[float, Ids, Ids | None, float, tuple[tuple[int, float], ...]]] = []
        edits = ([paste(0, prompt.already, 0.0)] if prompt.already else []) + list(prompt.edits)
        times = [edit.seconds for edit in edits] + [prompt.enter_seconds]
        for number, edit in enumerate(edits):
            prefix.follow(draft, draft.apply(edit).changed_at)
            while prefix.behind:
                prefix.advance()
            quiet = before_enter(draft.text[-8:]).quiet_seconds
            begun = times[number + 1] - edit.seconds > quiet or number + 1 == len(edits)
            whole = self.pipe.encode([ChatMessage("user", draft.text)]) if begun else None
            begins = prefix.tail_begins
            guessed = self._guesser.guess(draft.slice(max(0, begins - 64), begins), prefix.tail)
            shares = tuple(sorted(token_shares(guessed.guesses).items()))
            seen.append((edit.seconds, prefix.first(len(prefix)), whole, quiet, shares))
        moments = [
            Moment(at, len(stable), self._route(stable, whole, seen), self._answered(whole), quiet, shares)
            for at, stable, whole, quiet, shares in seen
        ]
        return Passage(prompt.enter_seconds, tuple(moments))

    def _route(
        self, stable: Ids, whole: Ids | None, seen: Sequence[tuple[float, Ids, Ids | None, float, object]]
    ) -> int:
        """Of a prompt that begins with them: its own, a later one's, or run for itself."""
        for ids in (whole, *(each[2] for each in seen)):
            if ids is not None and ids[: len(stable)] == stable:
                return self._answered(ids)
        return self._answered(stable)

    def _answered(self, ids: Ids | None) -> int:
        if ids is None:
            return -1
        for number, route in enumerate(self.routes):
            if route.prompt == len(ids) and tuple(route.ids[: len(ids)].tolist()) == ids:
                return number
        self._sink.layers.clear()
        done = self.pipe.generate(list(ids), temperature=0.0, max_tokens=FIRST_TOKENS + 1, ignore_eos=True)
        layers = self._sink.layers
        routing = np.stack([np.concatenate(layers[layer]) for layer in sorted(layers)], axis=1)
        everything = np.array([*ids, *done.token_ids], np.int32)[: len(routing)]
        self.routes.append(Route(everything, len(ids), routing))
        return len(self.routes) - 1


def save(file: Path, passages: Sequence[Passage], routes: Sequence[Route]) -> None:
    arrays: dict[str, NDArray[np.generic]] = {
        "passages": np.frombuffer(json.dumps([asdict(each) for each in passages]).encode(), np.uint8),
        "prompts": np.array([route.prompt for route in routes]),
    }
    for number, route in enumerate(routes):
        arrays |= {f"ids{number}": route.ids, f"routing{number}": route.routing}
    np.savez_compressed(file, **arrays)  # type: ignore[arg-type]


def load(file: Path) -> tuple[list[Passage], list[Route]]:
    with np.load(file, allow_pickle=False) as found:
        raw = json.loads(found["passages"].tobytes())
        routes = [
            Route(found[f"ids{number}"], int(prompt), found[f"routing{number}"])
            for number, prompt in enumerate(found["prompts"])
        ]
    passages = [Passage(each["enter_seconds"], tuple(Moment(**moment) for moment in each["moments"])) for each in raw]
    return passages, routes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--last", type=float, default=2.5)
    parser.add_argument("--most-tokens", type=int, default=90)
    given = parser.parse_args()
    recorder = Recorder()
    codec = recorder.pipe.codec
    every = read_prompts(given.log, lambda text: len(codec.encode_part(text)), 10 * given.prompts)
    chosen = [each for each in every if each.tokens <= given.most_tokens][: given.prompts]
    passages = [recorder.passage(each.last(given.last)) for each in chosen]
    recorder.pipe.close()
    save(given.out, passages, recorder.routes)
    print(json.dumps({"prompts": len(passages), "routes": len(recorder.routes), "bytes": given.out.stat().st_size}))


if __name__ == "__main__":
    main()
