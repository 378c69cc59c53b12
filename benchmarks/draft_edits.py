"""A million edits in one draft: does an edit cost the same at the end as at the beginning?

    python benchmarks/draft_edits.py [--edits 1000000]

Four ways to edit: typing at the end with one key in nine a backspace; the same with the stable tokens followed through
nano's tokenizer; insertions at random places; and typing at random places with deletions. Prints microseconds per edit
(processor time) for each eighth of the run, then one JSON line.
"""

import argparse
import json
import random
import time
import tracemalloc
from collections.abc import Callable, Iterator

from steerpipe.engine.tokenizer import TextCodec
from steerpipe.intake.draft import Draft
from steerpipe.intake.edits import DraftEdit, delete, insert
from steerpipe.intake.frame import PromptFrame
from steerpipe.intake.tokens import StablePrefix
from steerpipe.runtime.models import EMBEDDED
from steerpipe.runtime.typed import TypedPrompts

WORDS = "the quick brown fox jumps over a lazy dog, and then it rests. "
FRAME = PromptFrame("<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n")
PARTS = 8


def typing(draft: Draft, edits: int) -> Iterator[DraftEdit]:
    for number in range(edits):
        if number % 9 == 8:
            yield delete(len(draft) - 1, 1, number / 5)
        else:
            yield insert(len(draft), WORDS[number % len(WORDS)], number / 5)


def scattered(draft: Draft, edits: int, deletes: bool) -> Iterator[DraftEdit]:
    draw = random.Random(1)
    for number in range(edits):
        at = draw.randrange(len(draft) + 1)
        if deletes and number % 3 == 2 and at < len(draft):
            yield delete(at, 1, number / 5)
        else:
            yield insert(at, WORDS[number % len(WORDS)], number / 5)


def measure(edits: Callable[[Draft, int], Iterator[DraftEdit]], count: int, prefix: StablePrefix | None) -> list[float]:
    """Microseconds per edit, by eighths."""
    draft, found, part = Draft(), [], count // PARTS
    began = time.thread_time()
    for number, edit in enumerate(edits(draft, part * PARTS), start=1):
        change = draft.apply(edit)
        if prefix is not None:
            prefix.follow(draft, change.changed_at)
        if number % part == 0:
            now = time.thread_time()
            found.append(round((now - began) / part * 1e6, 2))
            began = now
    return found


def memory_after(drafts: int) -> int:
    """Bytes that so many abandoned drafts, each followed, leave behind."""
    prompts = TypedPrompts(TextCodec.load(EMBEDDED))

    def abandon(count: int) -> None:
        for _ in range(count):
            draft, prefix = Draft(), prompts.begin()
            for edit in typing(draft, 60):
                prefix.follow(draft, draft.apply(edit).changed_at)

    abandon(20)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    abandon(drafts)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return after - before


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--edits", type=int, default=1_000_000)
    count = words.parse_args().edits
    prompts = TypedPrompts(TextCodec.load(EMBEDDED))
    prefix = StablePrefix(FRAME, prompts.rule, prompts.encode)
    ways: dict[str, tuple[Callable[[Draft, int], Iterator[DraftEdit]], StablePrefix | None]] = {
        "typing at the end": (typing, None),
        "the same, tokens followed": (typing, prefix),
        "insertions anywhere": (lambda draft, edits: scattered(draft, edits, deletes=False), None),
        "edits anywhere": (lambda draft, edits: scattered(draft, edits, deletes=True), None),
    }
    figures: dict[str, object] = {"edits": count}
    for name, (edits, followed) in ways.items():
        figures[name] = measure(edits, count, followed)
        print(f"{name:<28}", *(f"{each:6.2f}" for each in figures[name]), flush=True)  # type: ignore[attr-defined]
    figures["bytes left by 1000 drafts"] = memory_after(1000)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
