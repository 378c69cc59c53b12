"""From the unfinished end of a prompt to the tokens that it is likely to become.

Best first: the likeliest unfinished piece of text is drawn out by a character until the tokenizer must cut before the
next one (`boundaries`). Finished pieces are made into tokens by the tokenizer itself, so a guess is never a token that
the text could not have there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

from steerpipe.intake.alphabet import END, OTHER, START
from steerpipe.intake.ngram import CharacterModel, Context
from steerpipe.intake.person import LENGTHS, PersonalModel
from steerpipe.intake.rules import BoundaryRule
from steerpipe.intake.tokens import Encode

_EXPANSIONS = 16  # pieces drawn out per guess; 24 raised top-5 by 0.2 points and the time by 40 %
_LEAST = 0.004  # a piece less likely than this is not drawn out
_LONGEST_TAIL = 64  # characters: a longer tail is no word, or text that was not looked at yet
_REMEMBERED = 4096  # pieces whose tokens are kept
_KNOWN = max(LENGTHS)


@dataclass(frozen=True, slots=True)
class Guess:
    """That the tail becomes `token_ids`, which end where the tokenizer must cut."""

    token_ids: tuple[int, ...]
    probability: float


@dataclass(frozen=True, slots=True)
class Guesses:
    """The likeliest first; what is missing from 1 is text that was not worth drawing out.

    `enter`: the probability that the text is complete as it stands.
    """

    guesses: tuple[Guess, ...]
    enter: float

    def first_tokens(self) -> list[tuple[int, float]]:
        """(token, probability) of the token right after the stable ones, the likeliest first."""
        totals: dict[int, float] = {}
        for guess in self.guesses:
            totals[guess.token_ids[0]] = totals.get(guess.token_ids[0], 0.0) + guess.probability
        return sorted(totals.items(), key=lambda item: -item[1])


class _Piece(NamedTuple):  # made sixteen times per key: a frozen dataclass takes three times as long
    text: str
    last: int  # its last code
    context: Context
    before: tuple[int, ...]  # the codes that a person's own habits are looked up by


class Guesser:
    """One per tokenizer, for any number of drafts; keeps tokens of pieces, and what a person's sent texts taught it."""

    def __init__(self, model: CharacterModel, rule: BoundaryRule, encode: Encode) -> None:
        self._model = model
        self._rule = rule
        self._encode = encode
        self._ends: dict[int, frozenset[int]] = {}
        self._tokens: dict[str, tuple[int, ...]] = {}
        self.person = PersonalModel()

    def learn(self, text: str) -> None:
        """From a prompt that was sent."""
        self.person.learn(self._model.alphabet.encode(text))

    def forget(self) -> None:
        """All that was learnt from this person, and the tokens of what they typed."""
        self.person.forget()
        self._tokens.clear()

    def guess(self, before: str, tail: str) -> Guesses:
        """`tail`: what follows the stable tokens; `before`: the typed text that ends where the tail begins.

        Where the tail begins in a template's head, `before` is empty, and the head's part of the tail is not typed.
        """
        typed = before + tail
        codes = self._model.alphabet.encode(typed[-_KNOWN:])
        piece = _Piece(tail, codes[-1] if codes else START, self._model.context(typed), tuple(codes))
        following = self._following(piece)
        enter = sum(share for code, share in following if code == END)
        finished = self._draw_out(piece) if 0 < len(tail) <= _LONGEST_TAIL else {}
        guesses = [Guess(self._tokens_of(text), share) for text, share in finished.items()]
        guesses.sort(key=lambda guess: -guess.probability)
        return Guesses(tuple(guess for guess in guesses if guess.token_ids), enter)

    def _draw_out(self, piece: _Piece) -> dict[str, float]:
        """Finished pieces and their probabilities."""
        finished: dict[str, float] = {}
        heap: list[tuple[float, int, _Piece, int | None]] = [(-1.0, 0, piece, None)]
        pushed = 0
        for _ in range(_EXPANSIONS):
            if not heap:
                break
            share, _, piece, code = heappop(heap)
            piece = piece if code is None else self._longer(piece, code)
            ends, done = self._ends_after(piece.last), 0.0
            for code, each in self._following(piece):
                if code in ends:
                    done -= share * each
                elif -share * each > _LEAST and code not in (OTHER, START):
                    pushed += 1
                    heappush(heap, (share * each, pushed, piece, code))
            if done:
                finished[piece.text] = done
        return finished

    def _following(self, piece: _Piece) -> list[tuple[int, float]]:
        return self.person.blend(piece.before, self._model.likely(piece.context))

    def _longer(self, piece: _Piece, code: int) -> _Piece:
        return _Piece(
            piece.text + self._model.alphabet.characters[code],
            code,
            self._model.follow(piece.context, code),
            (*piece.before[1 - _KNOWN :], code),
        )

    def _ends_after(self, code: int) -> frozenset[int]:
        """The codes before which a piece that ends with `code` is finished."""
        if code not in self._ends:
            alphabet = self._model.alphabet
            last = alphabet.characters[code]
            cut = (after for character, after in alphabet.codes.items() if self._rule.cuts(last, character))
            self._ends[code] = frozenset((END, *cut))
        return self._ends[code]

    def _tokens_of(self, text: str) -> tuple[int, ...]:
        if text not in self._tokens:
            if len(self._tokens) >= _REMEMBERED:
                self._tokens.clear()
            self._tokens[text] = tuple(self._encode(self._rule.part(text)))
        return self._tokens[text]


def token_shares(guesses: Sequence[Guess]) -> dict[int, float]:
    """How often each token is expected among the tail's tokens: what an affinity table is asked with."""
    shares: dict[int, float] = {}
    for guess in guesses:
        for token in guess.token_ids:
            shares[token] = shares.get(token, 0.0) + guess.probability
    return shares
