"""Who runs next. Requests join and leave at token boundaries; nothing here computes.

A sequence is admitted when the KV pool can hold all that it may become, so a running answer never runs out of room.
Prefill chunks and decode steps take turns, so a long prompt does not starve the answers that are being written.
Among scopes (users) the one with the fewest running sequences is admitted next, and their prompts take turns.
Background sequences run when there is nothing else to do, and go back into their queue when somebody needs their place.
Answers that nobody has asked for yet are parked when they have come as far as they should; they hold room that nobody
else wants, and are dropped when somebody does.
"""

from collections import Counter, deque
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Literal

from steerpipe.core.ids import SequenceId
from steerpipe.engine.beginnings import leave, reuse, shorten, take_over
from steerpipe.engine.prefixes import PrefixStore
from steerpipe.engine.request import Sequence
from steerpipe.engine.turns import Turns
from steerpipe.model.cells import CELL
from steerpipe.model.kv_cache import BLOCK

_Turn = SequenceId | Literal["batched"]
_Scope = str | None


@dataclass(frozen=True, slots=True)
class PrefillStep:
    """The next tokens of one prompt; `last` when the prompt is complete with them."""

    sequence: Sequence
    tokens: tuple[int, ...]
    last: bool


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """One token of each sequence; one sequence of the one-row class, or several of the batched class."""

    sequences: tuple[Sequence, ...]
    batched: bool


class Scheduler:
    """First come, first admitted, within a scope. One thread."""

    def __init__(self, prefixes: PrefixStore, *, max_batch: int, prefill_chunk: int) -> None:
        assert prefill_chunk % CELL == 0, "prefill chunks are whole cells"
        self._prefixes = prefixes
        self._max_batch = max_batch
        self._chunk = prefill_chunk
        self._waiting: dict[_Scope, deque[Sequence]] = {}
        self._background: deque[Sequence] = deque()  # waiting, too
        self._running: dict[SequenceId, Sequence] = {}
        self._blocked: SequenceId | None = None  # whose turn it is to be admitted, and for whom there was no room
        self._decoded_last = True
        self._decoded: Turns[_Turn] = Turns()  # groups
        self._admitted: Turns[_Scope] = Turns()
        self._prefilled: Turns[_Scope] = Turns()
        self._parked: dict[SequenceId, Sequence] = {}  # longest ago first

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return sum(len(queue) for queue in self._waiting.values()) + len(self._background)

    @property
    def wanted(self) -> bool:
        """Whether there is anything to do that is no background."""
        return bool(self._waiting) or any(not sequence.background for sequence in self._running.values())

    @property
    def parked_blocks(self) -> int:
        """KV blocks of parked sequences that nobody else holds."""
        return self._prefixes.pool.held_only_by(sequence.kv for sequence in self._parked.values())

    @property
    def idle(self) -> bool:
        return not self._running and not self._waiting and not self._background

    def add(self, sequence: Sequence) -> None:
        if sequence.background:
            self._background.append(sequence)
        else:
            self._waiting.setdefault(sequence.request.scope, deque()).append(sequence)

    def offer(self, sequence: Sequence) -> bool:
        """Adds to the background, or runs it where nothing else is wanted. False: there is no room for it."""
        if self.wanted or len(self._running) >= self._max_batch:
            self._background.append(sequence)
        elif self._fits(sequence):
            self._running[sequence.id] = sequence
        else:
            return False
        return True

    def remove(self, sequence: Sequence, *, failed: bool = False) -> None:
        """Ends a sequence, wherever it is. Its prompt is kept for its scope, unless the sequence failed."""
        scope = sequence.request.scope
        if self._running.pop(sequence.id, None) is not None:
            self._decoded.forget(sequence.id)
        elif self._parked.pop(sequence.id, None) is not None:
            pass
        elif sequence.background:
            self._background.remove(sequence)
        else:
            self._waiting[scope].remove(sequence)
            self._forget_empty(scope)
        self._blocked = None
        if failed:
            sequence.kv.free()
        else:
            leave(self._prefixes, sequence)

    def park(self, sequence: Sequence) -> None:
        """It has come as far as it should before anybody asks for it: it keeps its KV and runs no further."""
        del self._running[sequence.id]
        self._decoded.forget(sequence.id)
        self._blocked = None
        self._parked[sequence.id] = sequence

    def claim(self, sequence: Sequence) -> bool:
        """Somebody has asked for an answer that was begun ahead: it runs like any other from now on.

        False, and it is gone: there is no place or no room for all of it, or others wait for them.
        """
        if sequence in self._background or self._waiting:
            self.remove(sequence)
            return False
        self._running.pop(sequence.id, None)
        self._parked.pop(sequence.id, None)
        sequence.quiet, sequence.ahead = False, 0
        while not (fits := self._has_room(sequence)) and self._send_one_back():
            pass
        if fits:
            self._running[sequence.id] = sequence
        else:
            sequence.kv.free()
        self._blocked = None
        return fits

    def find(self, sequence_id: SequenceId) -> Sequence | None:
        queues = (*self._waiting.values(), self._background)
        waiting = (s for queue in queues for s in queue if s.id == sequence_id)
        return self._running.get(sequence_id) or self._parked.get(sequence_id) or next(waiting, None)

    def next_step(self) -> PrefillStep | DecodeStep | None:
        self._admit()
        wanted = [s for s in self._running.values() if not s.background] or list(self._running.values())
        prefilling = [s for s in wanted if s.waiting_prompt]
        decoding = [s for s in wanted if not s.waiting_prompt]
        if prefilling and (self._decoded_last or not decoding):
            self._decoded_last = False
            return self._prefill(prefilling)
        self._decoded_last = True
        return self._decode(decoding) if decoding else None

    def _admit(self) -> None:
        while self._waiting:
            scope = self._next_scope()
            sequence = self._waiting[scope][0]
            if self._fits(sequence):
                self._waiting[scope].popleft()
                self._forget_empty(scope)
                self._running[sequence.id] = sequence
                self._admitted.take(scope)
            elif not self._send_one_back():
                return  # nobody overtakes it: a large request would never be admitted
        while self._background and not self.wanted and len(self._running) < self._max_batch:
            sequence = self._background.popleft()
            if not self.offer(sequence) and not sequence.quiet:  # else it is given up: others have typed meanwhile
                self._background.appendleft(sequence)
                return

    def _fits(self, sequence: Sequence) -> bool:
        """Whether there is a place in the batch and room for all that the sequence may become."""
        if len(self._running) >= self._max_batch or sequence.id == self._blocked:
            return False
        reuse(self._prefixes, sequence)  # first: the room that is made must not cost the prompt that it would find
        if self._has_room(sequence):
            return True
        if not take_over(self._prefixes, sequence):  # a shared tail costs a block for its copy
            shorten(sequence, sequence.kv.length // BLOCK * BLOCK)
        if self._has_room(sequence):
            return True
        leave(self._prefixes, sequence)  # what it has taken over goes back
        shorten(sequence, 0)
        self._blocked = sequence.id  # until somebody leaves
        return False

    def _has_room(self, sequence: Sequence) -> bool:
        """Whether it could run now, with all that it may become. Kept prompts and parked answers make room for it."""
        if len(self._running) >= self._max_batch:
            return False
        wanted = sequence.kv.blocks_to_reach(sequence.final_length)
        promised = sum(s.kv.blocks_to_reach(s.final_length) for s in self._running.values())
        draft = (sequence.request.scope, sequence.request.prompt_ids) if sequence.quiet else None
        while not (made := self._prefixes.make_room(wanted, promised, draft)) and self._parked:
            self._parked.pop(next(iter(self._parked))).kv.free()
        return made

    def _send_one_back(self) -> bool:
        """A background sequence gives its place and its room back, and begins again later where it stood, if it can."""
        sequence = next((s for s in reversed(self._running.values()) if s.background), None)
        if sequence is None:
            return False
        del self._running[sequence.id]
        self._blocked = None
        leave(self._prefixes, sequence)
        if not sequence.ahead:  # an answer that nobody asked for is given up: its text may change before there is time
            self._background.appendleft(sequence)
        return True

    def _next_scope(self) -> _Scope:
        """Whose sequence is admitted next: of those with the fewest running, the one whose turn was longest ago."""
        running = Counter(s.request.scope for s in self._running.values())
        return min(self._waiting, key=lambda scope: (running[scope], self._admitted.rank(scope)))

    def _forget_empty(self, scope: _Scope) -> None:
        if not self._waiting[scope]:
            del self._waiting[scope]

    def _prefill(self, prefilling: Items[Sequence]) -> PrefillStep:
        """The scope whose turn was longest ago; within a scope, the first to come."""
        sequence = min(prefilling, key=lambda s: self._prefilled.rank(s.request.scope))
        self._prefilled.take(sequence.request.scope)
        if sequence.kv.length == sequence.cached:  # nothing of its own yet: another choice may have computed the prompt
            reuse(self._prefixes, sequence)
        waiting = sequence.waiting_prompt
        chunk = CELL if sequence.quiet else self._chunk  # whoever asks while it runs waits for one cell at most
        room = chunk - sequence.kv.length % CELL  # ends on a cell's edge, so that no cell is computed twice
        tokens = waiting[:room]
        return PrefillStep(sequence, tokens, last=len(tokens) == len(waiting))

    def _decode(self, decoding: Items[Sequence]) -> DecodeStep:
        """Round robin over the groups: all batched sequences are one group, every one-row sequence is its own."""
        batched = tuple(s for s in decoding if s.request.batched)
        groups = [(s,) for s in decoding if not s.request.batched] + ([batched] if batched else [])
        group = min(groups, key=lambda g: self._decoded.rank(_turn_of(g)))
        self._decoded.take(_turn_of(group))
        return DecodeStep(group, batched=group[0].request.batched)


def _turn_of(group: Items[Sequence]) -> _Turn:
    """The batched group keeps its turn whoever is in it: short answers that come and go must not starve the others."""
    return "batched" if group[0].request.batched else group[0].id
