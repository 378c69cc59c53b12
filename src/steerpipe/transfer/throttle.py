"""Whether guesses are worth sending: they are while enough of the last ones were used, and any are sent. Pure.

A right guess saves the part of its block that moved in idle time; a wrong one delays a demand by the chunk that is
under way and has displaced an expert. With a window of about 50 us, and 20 to 40 us of a chunk still under way, that is
even at a third or more.
Who looks ahead and sends for nobody (he is never sure, or all that he names is there) still costs a layer 7 us.
"""

LEAST_USED = 0.35
ENOUGH_SENT = 32  # guesses before anything is decided
MOST_SILENT = 192  # forecasts in a row of which nothing is sent
FIRST_REST, LONGEST_REST = 192, 192 << 6  # questions that are answered with no before the next try


class Throttle:
    """Counts guesses that were sent and used, newer ones more than older ones. Rests double until enough are used."""

    def __init__(self, least_used: float = LEAST_USED, most_silent: float = MOST_SILENT) -> None:
        self._least_used, self._most_silent = least_used, most_silent
        self._sent = self._used = 0.0
        self._silent = 0  # forecasts since the last guess
        self._resting = 0
        self._next_rest = FIRST_REST

    @property
    def closed(self) -> bool:
        return self._resting > 0

    def settle(self, sent: int, used: int) -> None:
        """The layer of so many guesses has come."""
        self._sent += sent
        self._used += used
        if self._sent >= 2 * ENOUGH_SENT:
            self._sent, self._used = self._sent / 2, self._used / 2
        if sent:
            self.heard()
        if self._sent >= ENOUGH_SENT and self._enough_used:
            self._next_rest = FIRST_REST

    def heard(self) -> None:
        """Guesses were sent; nobody may ever know whether they were right."""
        self._silent = 0

    def allows(self) -> bool:
        """Asked once per forecast."""
        if self._resting:
            self._resting -= 1
            return False
        self._silent += 1
        if self._silent <= self._most_silent and (self._sent < ENOUGH_SENT or self._enough_used):
            return True
        self._resting, self._next_rest = self._next_rest, min(2 * self._next_rest, LONGEST_REST)
        self._sent, self._used, self._silent = 0.0, 0.0, 0  # a new try after the rest
        return False

    @property
    def _enough_used(self) -> bool:
        return self._used >= self._least_used * self._sent
