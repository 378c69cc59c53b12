"""From a draft to a forecast: the tokens that its unfinished end may become, and how the others were routed."""

from collections import OrderedDict
from collections.abc import Mapping

from steerpipe.engine.tokenizer import TextCodec
from steerpipe.intake.guess import Guesser, token_shares
from steerpipe.intake.ngram import CharacterModel
from steerpipe.intake.pauses import FORECAST
from steerpipe.intake.person import PersonalModel
from steerpipe.runtime.draft_forecast import DraftForecast, Readiness
from steerpipe.runtime.draft_routing import Routing
from steerpipe.runtime.draft_session import Cell, DraftSession, DraftWork
from steerpipe.runtime.typed import TypedPrompts

_MOST_PEOPLE = 8  # whose habits are remembered, at up to 12 MB each
_AGAIN_SECONDS = 0.01  # until it is looked whether transfers have landed


class DraftForesight:
    """`guesser` None: the unfinished end says nothing. The draft that was typed in last is the one that counts."""

    def __init__(self, forecast: DraftForecast, guesser: Guesser | None) -> None:
        self._forecast = forecast
        self._guesser = guesser
        self._people: OrderedDict[str, PersonalModel] = OrderedDict()
        self._latest: DraftSession | None = None

    def typed_in(self, draft: DraftSession) -> None:
        self._latest = draft

    def watch(self, cell: Cell) -> None:
        self._forecast.routing.watch(cell.sequence)

    def take(self, cell: Cell) -> Routing | None:
        """How a cell was routed."""
        return self._forecast.routing.take(cell.sequence)

    def look(self, now: float) -> None:
        """Forecasts for the latest draft, if there is anything new and no key is due; else goes on with the last."""
        draft = self._latest
        if draft is None or draft.too_long:
            return
        seen = (draft.typed.version, len(draft.computed))
        if draft.foreseen == seen or now < draft.last_seconds + FORECAST.quiet_seconds:
            self._forecast.go_on()
            return
        draft.foreseen = seen
        known = [(filled.routing, filled.tokens) for filled in draft.filled.values() if filled.routing is not None]
        routed, tokens = [routing for routing, _ in known], sum(count for _, count in known)
        self._forecast.expect(routed, self._tail(draft), tokens)

    def next_wake(self, now: float) -> float | None:
        draft = self._latest
        if draft is None or draft.too_long:
            return None
        if draft.foreseen != (draft.typed.version, len(draft.computed)):
            return draft.last_seconds + FORECAST.quiet_seconds
        return now + _AGAIN_SECONDS if self._forecast.pending else None

    def readiness(self, draft: DraftSession) -> Readiness:
        return self._forecast.readiness if draft is self._latest else Readiness(0, 0, 0)

    @property
    def bytes_in_flight(self) -> int:
        return self._forecast.bytes_in_flight

    def ended(self, draft: DraftSession, *, sent: bool) -> None:
        """Only what was sent teaches anything, and promotes nothing more; what was given up takes its transfers with
        it."""
        if sent and self._guesser is not None:
            self._guesser.person = self._person(draft.scope)
            self._guesser.learn(draft.typed.text)
        if draft is self._latest:
            self._latest = None
            if sent:
                self._forecast.stop_promoting()
            else:
                self._forecast.withdraw()

    def _tail(self, draft: DraftSession) -> Mapping[int, float]:
        """Tokens that were not computed yet: the stable ones for certain, then those that the end may become."""
        shares: dict[int, float] = {}
        for token in draft.prefix.ids_from(len(draft.computed)):
            shares[token] = shares.get(token, 0.0) + 1.0
        if self._guesser is not None:
            self._guesser.person = self._person(draft.scope)
            begins = draft.prefix.tail_begins
            guesses = self._guesser.guess(draft.typed.slice(max(0, begins - 64), begins), draft.prefix.tail)
            for token, share in token_shares(guesses.guesses).items():
                shares[token] = shares.get(token, 0.0) + share
        return shares

    def _person(self, scope: str) -> PersonalModel:
        person = self._people.pop(scope, None) or PersonalModel()
        self._people[scope] = person
        if len(self._people) > _MOST_PEOPLE:
            self._people.popitem(last=False)
        return person


def foresight_of(forecast: DraftForecast | None, codec: TextCodec, work: DraftWork) -> DraftForesight | None:
    """None: nothing is moved, because every expert is resident or nobody wants it."""
    if forecast is None or not (work.forecast or work.promote):
        return None
    forecast.moves, forecast.promotes = work.forecast, work.promote
    prompts = TypedPrompts(codec)
    guesser = None
    if work.guess and prompts.rule is not None:
        guesser = Guesser(CharacterModel.load(), prompts.rule, prompts.encode)
    return DraftForesight(forecast, guesser)
