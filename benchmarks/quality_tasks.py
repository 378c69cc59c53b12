"""Two tasks of four choices, made of texts: the true next turn of a conversation, the next line of a Python file.

python -m benchmarks.quality tasks TEXTS.jsonl OUT.json [items] [dtype]
"""

import argparse
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from steerpipe.engine.tokenizer import TextCodec

LONGEST_CONTEXT, LONGEST_CHOICE = 96, 16
_TURN = re.compile(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>\n?", re.S)


@dataclass(frozen=True)
class Item:
    context: Sequence[int]
    choices: Sequence[Sequence[int]]
    answer: int


def next_turns(lines: Sequence[Mapping[str, Any]], codec: TextCodec, count: int) -> list[Item]:
    """The assistant's true next turn among three of other conversations of the same kind."""
    draw = random.Random(0)
    found: list[tuple[str, str, str]] = []  # kind, context, turn
    for line in lines:
        turns = list(_TURN.finditer(line["text"]))
        spoken = [n for n, turn in enumerate(turns) if n and turn[1] == "assistant" and len(turn[2]) > 20]
        if len(spoken) > 1:
            at = turns[draw.choice(spoken[1:])]
            found.append((line["id"].split("-")[0], line["text"][: at.start(2)], at[2]))
    items = []
    for kind, context, turn in found[:count]:
        others = [each for k, _, each in found if k == kind and each != turn]
        items.append(_item(codec, context, turn, draw.sample(others, 3), draw))
    return items


def next_lines(lines: Sequence[Mapping[str, Any]], codec: TextCodec, count: int) -> list[Item]:
    """The true next line among three others of the same file."""
    draw = random.Random(1)
    files = [line["text"] for line in lines if line["id"].startswith("code_python")]
    items = []
    while len(items) < count:
        rows = draw.choice(files).split("\n")
        long = [n for n, row in enumerate(rows) if n > 8 and len(row.strip()) > 12]
        if len(long) < 8:
            continue
        at = draw.choice(long)
        others = draw.sample([rows[n] for n in long if abs(n - at) > 3 and rows[n] != rows[at]], 3)
        items.append(_item(codec, "\n".join(rows[max(0, at - 24) : at]) + "\n", rows[at], others, draw))
    return items


def _item(codec: TextCodec, context: str, true: str, others: Sequence[str], draw: random.Random) -> Item:
    choices = [true, *others]
    order = draw.sample(range(4), 4)
    encoded = [codec.encode(choices[n], False)[:LONGEST_CHOICE] for n in order]
    return Item(codec.encode(context, False)[-LONGEST_CONTEXT:], encoded, order.index(0))


TASKS: dict[str, Callable[[Sequence[Mapping[str, Any]], TextCodec, int], list[Item]]] = {
    "next turn": next_turns,
    "next line": next_lines,
}


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
