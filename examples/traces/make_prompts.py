"""Writes the prompts of the example trace: openings of texts, and questions for a chat. All of them are ours.

    python examples/traces/make_prompts.py prompts.jsonl
    steerpipe trace embedded prompts.jsonl nano-50k --generate 200 --batch 16

An opening is continued as it is ("text"), a question is answered through the chat template ("prompt").
"""

import json
import sys
from itertools import product
from pathlib import Path

from steerpipe.trace.combinatorial import combinatorial_prompts

QUESTIONS = 101  # with them the trace passes 50,000 tokens
OPENINGS = (
    "{} was first seen in the village on a cold morning in March. Nobody knew",
    "The history of {} begins long before the first books were written. In those days",
    "There are three things that everybody should know about {}. The first is",
    "When I was ten years old, my grandmother told me about {}. She said that",
    "A new report on {} was published this week. According to its authors,",
    "Once upon a time there was a girl who dreamt of {}. Every night she",
    "To understand {}, it helps to start with a simple example. Suppose that",
    "\"I have never cared for {},\" said the captain, and looked out of the window.",
    "In the last chapter we looked at {}. Now we turn to",
    "Last summer we travelled to the coast because of {}. On the first day",
)  # fmt: skip
SUBJECTS = (
    "the old lighthouse", "a red balloon", "the northern railway", "the clock maker", "wild horses",
    "the winter market", "a silver key", "the long bridge", "the school orchestra", "a game of cards",
    "the river ferry", "an apple orchard", "the travelling circus", "a map of the stars", "the night train",
    "the stone garden", "a letter from Lisbon", "the deep forest", "the first snow", "a broken radio",
)  # fmt: skip


def lines() -> list[dict[str, str]]:
    openings = [
        {"id": f"opening-{form:02d}-{subject:02d}", "text": OPENINGS[form].format(SUBJECTS[subject])}
        for form, subject in product(range(len(OPENINGS)), range(len(SUBJECTS)))
    ]
    questions = [{"id": each.id, "prompt": str(each.content)} for each in combinatorial_prompts()[:QUESTIONS]]
    return openings + questions


if __name__ == "__main__":
    Path(sys.argv[1]).write_text("".join(json.dumps(line) + "\n" for line in lines()), encoding="utf-8")
