"""How often the tokens that the character model expects are the ones that come, by typed length; and what a key costs.

    python benchmarks/ngram_accuracy.py prompts.jsonl [essays.jsonl.gz] [--corpus DIR] [--nano DIR] [--json FILE]

A .jsonl file has lines of {"prompt"} or {"turns": [...]}; a .jsonl.gz file is a keystroke log, of which the texts as
they were left are taken. Every text's first --characters are typed one by one through nano's chat template. After each
key the target is the first token of the finished prompt that is not stable yet; "typed" counts the characters of the
tail, with which that token begins. Baselines: the commonest token that fits what is typed (--corpus, to count tokens
in), and nano itself, with what is typed as a condition (--nano, a folder that `steerpipe unpack` made of
src/steerpipe/assets/nano).
"""

import argparse
import json
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from ngram_baselines import NanoBaseline, UnigramBaseline

from steerpipe.engine.tokenizer import TextCodec
from steerpipe.intake.draft import Draft
from steerpipe.intake.edits import DraftEdit, insert
from steerpipe.intake.guess import Guesser
from steerpipe.intake.keystrokes import read_sessions
from steerpipe.intake.ngram import CharacterModel
from steerpipe.intake.rules import BoundaryRule
from steerpipe.runtime.models import EMBEDDED
from steerpipe.runtime.prompts import encode_prompt
from steerpipe.runtime.typed import TypedPrompts

LONGEST = 8  # typed characters from which on rows are one
Ranked = list[int]


@dataclass
class Score:
    """Of one predictor: by typed length, how often it was asked, right at once, and right among five."""

    rows: dict[int, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0, 0]))

    def add(self, typed: int, ranked: Ranked, target: int) -> None:
        row = self.rows[min(typed, LONGEST)]
        row[0] += 1
        row[1] += target in ranked[:1]
        row[2] += target in ranked[:5]

    def shares(self) -> dict[str, tuple[int, float, float]]:
        rows = {str(typed): tuple(self.rows[typed]) for typed in sorted(self.rows)}
        rows["all"] = tuple(sum(column) for column in zip(*self.rows.values(), strict=True))
        return {name: (asked, first / asked, five / asked) for name, (asked, first, five) in rows.items()}


@dataclass(frozen=True)
class Moment:
    """After one key: the stable tokens, what is typed behind them, and the token that the text will have there."""

    ids: tuple[int, ...]
    before: str
    tail: str
    target: int


def moments(text: str, prompts: TypedPrompts, codec: TextCodec, seconds: list[float]) -> Iterator[Moment]:
    """Types `text`; `seconds` gets the processor time of the draft and of its tokens, per key."""
    draft, prefix, final = Draft(), prompts.begin(), encode_prompt(text, codec, raw=False)
    for at, character in enumerate(text):
        began = time.thread_time()
        prefix.follow(draft, draft.apply(insert(at, character, at / 5)).changed_at)
        tail, begins = prefix.tail, prefix.tail_begins
        seconds.append(time.thread_time() - began)
        ids = prefix.ids
        yield Moment(ids, draft.slice(max(0, begins - 16), begins), tail, final[len(ids)])


def read_texts(file: Path) -> list[str]:
    if file.suffix == ".gz":
        return [_left(session.edits) for session in read_sessions(file) if session.contradiction is None]
    records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [record["prompt"] if "prompt" in record else record["turns"][0] for record in records]


def _left(edits: tuple[DraftEdit, ...]) -> str:
    draft = Draft()
    for edit in edits:
        draft.apply(edit)
    return draft.text


def measure(
    texts: list[str], prompts: TypedPrompts, codec: TextCodec, guesser: Guesser,
    others: dict[str, Callable[[Moment], Ranked]],
) -> dict[str, object]:  # fmt: skip
    scores: dict[str, Score] = defaultdict(Score)
    follow_seconds: list[float] = []
    guess_seconds: list[float] = []
    for text in texts:
        for moment in moments(text, prompts, codec, follow_seconds):
            began = time.thread_time()
            guesses = guesser.guess(moment.before, moment.tail)
            guess_seconds.append(time.thread_time() - began)
            ranked = [token for token, _ in guesses.first_tokens()]
            scores["n-gram"].add(len(moment.tail), ranked, moment.target)
            for name, other in others.items():
                scores[name].add(len(moment.tail), other(moment), moment.target)
    return {
        "texts": len(texts),
        "keys": len(guess_seconds),
        "accuracy": {name: score.shares() for name, score in scores.items()},
        "follow_us": percentiles(follow_seconds),
        "guess_us": percentiles(guess_seconds),
    }


def personal(
    texts: list[str], prompts: TypedPrompts, codec: TextCodec, model: CharacterModel, length: int
) -> dict[str, object]:
    """The second half of each long text, with and without having learnt from the first."""
    found = {}
    for learns in (False, True):
        score: Score = Score()
        for text in texts:
            guesser = Guesser(model, _rule(prompts), prompts.encode)
            half = len(text) // 2
            if learns:
                guesser.learn(text[:half])
            for moment in moments(text[half : half + length], prompts, codec, []):
                ranked = [token for token, _ in guesser.guess(moment.before, moment.tail).first_tokens()]
                score.add(len(moment.tail), ranked, moment.target)
        found["learnt" if learns else "not learnt"] = score.shares()["all"]
    return found


def real_keys(file: Path, prompts: TypedPrompts, guesser: Guesser, sessions: int, edits: int) -> dict[str, float]:
    """Processor time of whole keys (draft, tokens and guess) as people typed, deleted and moved about."""
    seconds = []
    for session in islice(read_sessions(file), sessions):
        draft, prefix = Draft(), prompts.begin()
        for edit in session.edits[:edits]:
            began = time.thread_time()
            prefix.follow(draft, draft.apply(edit).changed_at)
            begins = prefix.tail_begins
            guesser.guess(draft.slice(max(0, begins - 16), begins), prefix.tail)
            seconds.append(time.thread_time() - began)
    return percentiles(seconds) | {"keys": len(seconds)}


def percentiles(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {name: 1e6 * ordered[int(share * (len(ordered) - 1))] for name, share in (("p50", 0.5), ("p99", 0.99))}


def _rule(prompts: TypedPrompts) -> BoundaryRule:
    assert prompts.rule is not None, "nano's tokenizer has a rule"
    return prompts.rule


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("files", type=Path, nargs="+")
    words.add_argument("--corpus", type=Path)
    words.add_argument("--nano", type=Path)
    words.add_argument("--texts", type=int, default=60, help="per file, drawn with seed 0")
    words.add_argument("--characters", type=int, default=200, help="of each text that are typed")
    words.add_argument("--json", type=Path, dest="figures_to")
    given = words.parse_args()
    codec = TextCodec.load(EMBEDDED)
    prompts, model = TypedPrompts(codec), CharacterModel.load()
    figures: dict[str, object] = {}
    others: dict[str, Callable[[Moment], Ranked]] = {}
    if given.corpus:
        unigram = UnigramBaseline.count(codec, given.corpus)
        others["unigram"] = lambda moment: unigram.rank(moment.tail)
    if given.nano:
        nano = NanoBaseline(codec, given.nano)
        others["nano"] = lambda moment: nano.rank(moment.ids, moment.tail)
    for file in given.files:
        texts = [text for text in read_texts(file) if len(text) > 20]
        random.Random(0).shuffle(texts)
        texts = texts[: given.texts]
        shown = [text[: given.characters] for text in texts]
        figures[file.name] = found = measure(
            shown, prompts, codec, Guesser(model, _rule(prompts), prompts.encode), others
        )
        if file.suffix == ".gz":
            found["real_keys_us"] = real_keys(file, prompts, Guesser(model, _rule(prompts), prompts.encode), 20, 1500)
            found["personal"] = personal(texts[:30], prompts, codec, model, given.characters)
        print(file.name, json.dumps(found, indent=1), flush=True)
    if given.figures_to:
        given.figures_to.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
