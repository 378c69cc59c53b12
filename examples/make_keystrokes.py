"""Makes examples/keystrokes.jsonl: a few prompts as somebody might type them, with slips, second thoughts and pauses.

    python examples/make_keystrokes.py > examples/keystrokes.jsonl

Nobody typed these: the texts are ours, the times are drawn so that gaps between keys have the quantiles of real typing
(76, 165, 608 and 6,415 ms at 10, 50, 90 and 99 %). The form is that of `steerpipe.intake.keystrokes`.
"""

import json
import sys
from itertools import pairwise
from random import Random

PROMPTS = {
    "garden": ("My small garden gets sun only in the morning. What should I grow there, and when do I plant it?",
               [("replace", "small", "tiny"), ("paste", " I live near the coast.")]),
    "letter": ("Please write a short letter to my neighbour. His dog is friendly, but it barks every night around two.",
               [("move", "Please ", "end")]),
    "code": ("Why does this fail?\n\nfor i in range(10):\n    total = total + i\nprint(total)\n",
             [("replace", "fail", "raise a NameError")]),
    "trip": ("Can you plan two days in a city that is new to me? I like museums, not queues, and I walk slowly.",
             [("delete", ", and I walk slowly")]),
    "sums": ("A train leaves at 9:40 and arrives at 13:05. It stops for 12 minutes twice. How long does it move?", []),
    "short": ("Do you like dogs?", []),
}  # fmt: skip
_GAPS = ((0.0, 40), (0.1, 76), (0.5, 165), (0.9, 608), (0.99, 6415), (1.0, 20_000))  # share of gaps, milliseconds
_SLIP = 0.055  # of the keys: each is one wrong key and one Backspace, so a tenth of all keys are Backspace
_NEAR = {"a": "s", "e": "r", "i": "o", "n": "m", "o": "p", "r": "t", "s": "d", "t": "y", "u": "i", "l": "k", "h": "j"}


class Typist:
    """Writes events of one text, and keeps the text to know where the cursor is."""

    def __init__(self, seed: str) -> None:
        self._random = Random(seed)
        self._now = 1000
        self.text = ""
        self.events: list[list[object]] = []

    def type(self, text: str) -> None:
        for character in text:
            wrong = _NEAR.get(character)
            if wrong and self._random.random() < _SLIP:
                self._put(len(self.text), wrong, wrong, "Input")
                self.text = self.text[:-1]
                self._event("Backspace", len(self.text), wrong, "Remove/Cut")
            self._put(len(self.text), character, {" ": "Space", "\n": "Enter"}.get(character, character), "Input")

    def paste(self, text: str) -> None:
        self._event("Control", len(self.text), "NoChange", "Nonproduction")
        self._put(len(self.text), text, "v", "Paste")

    def replace(self, old: str, new: str) -> None:
        """Selects `old`, and types over it: the first key replaces it, the others are put in."""
        at = self.text.index(old)
        self._event("Leftclick", at + len(old), "NoChange", "Nonproduction")
        self.text = self.text[:at] + new[0] + self.text[at + len(old) :]
        self._event(new[0], at + 1, f"{_escaped(old)} => {_escaped(new[0])}", "Replace")
        for index, character in enumerate(new[1:], start=1):
            self._put(at + index, character, character, "Input")

    def delete(self, old: str) -> None:
        at = self.text.index(old)
        self._event("Leftclick", at, "NoChange", "Nonproduction")
        self.text = self.text[:at] + self.text[at + len(old) :]
        self._event("Delete", at, _escaped(old), "Remove/Cut")

    def move_to_end(self, span: str) -> None:
        at = self.text.index(span)
        rest = self.text[:at] + self.text[at + len(span) :]
        self.text = rest + span
        activity = f"Move From [{at}, {at + len(span)}] To [{len(rest)}, {len(self.text)}]"
        self._event("Leftclick", len(self.text), _escaped(span), activity)

    def _put(self, at: int, text: str, key: str, activity: str) -> None:
        self.text = self.text[:at] + text + self.text[at:]
        self._event(key, at + len(text), _escaped(text), activity)

    def _event(self, key: str, cursor: int, change: str, activity: str) -> None:
        self._now += self._gap()
        self.events.append([self._now, self._now + self._random.randint(60, 160), key, cursor, change, activity])

    def _gap(self) -> int:
        share = self._random.random()
        for (low, shorter), (high, longer) in pairwise(_GAPS):
            if share <= high:
                return round(shorter * (longer / shorter) ** ((share - low) / (high - low)))
        raise AssertionError("shares end at 1")


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def sessions() -> list[tuple[str, Typist]]:
    made = []
    for name, (text, thoughts) in PROMPTS.items():
        typist = Typist(name)
        typist.type(text)
        for kind, old, *new in thoughts:
            if kind == "replace":
                typist.replace(old, new[0])
            elif kind == "paste":
                typist.paste(old)
            elif kind == "move":
                typist.move_to_end(old)
            else:
                typist.delete(old)
        made.append((name, typist))
    return made


def main() -> None:
    for name, typist in sessions():
        sys.stdout.write(
            json.dumps({"writer": name, "events": typist.events}, ensure_ascii=False, separators=(",", ":")) + "\n"
        )


if __name__ == "__main__":
    main()
