"""Who runs next. Requests join and leave at token boundaries; nothing here computes.

A sequence is admitted when the KV pool can hold all that it may become, so a running answer never runs out of room.
Prefill chunks and decode steps take turns, so a long prompt does not starve the answers that are being written.
Among scopes (users) the one with the fewest running sequences is admitted next, and their prompts take turns.
Background sequences run when there is nothing else to do, and go back into their queue when somebody needs their place.
"""

from collections import Counter, deque
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Literal

from steerpipe.core.ids import SequenceId
from steerpipe.engine.prefixes import PrefixStore
from steerpipe.engine.request import Sequence
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
        self._turns: list[_Turn] = []  # of the groups that have decoded, longest ago first
        self._admitted: list[_Scope] = []  # scopes, longest ago first
        self._prefilled: list[_Scope] = []

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return sum(len(queue) for queue in self._waiting.values()) + len(self._background)

    @property
    def idle(self) -> bool:
        return not self._running and not self._waiting and not self._background

    def add(self, sequence: Sequence) -> None:
        if sequence.request.background:
            self._background.append(sequence)
        else:
            self._waiting.setdefault(sequence.request.scope, deque()).append(sequence)

    def remove(self, sequence: Sequence, *, failed: bool = False) -> None:
        """Ends a sequence, wherever it is. Its prompt is kept for its scope, unless the sequence failed."""
        scope = sequence.request.scope
        if self._running.pop(sequence.id, None) is not None:
            self._turns = [turn for turn in self._turns if turn != sequence.id]
        elif sequence.request.background:
            self._background.remove(sequence)
        else:
            self._waiting[scope].remove(sequence)
            self._forget_empty(scope)
        self._blocked = None
        if scope is None or failed:
            sequence.kv.free()
        else:
            self._keep(scope, sequence)

    def _keep(self, scope: str, sequence: Sequence) -> None:
        """Only what was prefilled: the store takes it over."""
        sequence.kv.truncate(min(sequence.kv.length, len(sequence.request.prompt_ids)))
        self._prefixes.keep(scope, sequence.request.prompt_ids[: sequence.kv.length], sequence.kv)

    def find(self, sequence_id: SequenceId) -> Sequence | None:
        queues = (*self._waiting.values(), self._background)
        waiting = (s for queue in queues for s in queue if s.id == sequence_id)
        return self._running.get(sequence_id) or next(waiting, None)

    def next_step(self) -> PrefillStep | DecodeStep | None:
        self._admit()
        wanted = [s for s in self._running.values() if not s.request.background] or list(self._running.values())
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
                self._admitted = _last(self._admitted, scope)
            elif not self._send_one_back():
                return  # nobody overtakes it: a large request would never be admitted
        while self._background and self._fits(self._background[0]):
            sequence = self._background.popleft()
            self._running[sequence.id] = sequence

    def _fits(self, sequence: Sequence) -> bool:
        """Whether there is a place in the batch and room for all that the sequence may become."""
        if len(self._running) >= self._max_batch or sequence.id == self._blocked:
            return False
        self._reuse(sequence)  # first: the room that is made must not cost the prompt that it would find
        promised = sum(s.kv.blocks_to_reach(final_length(s)) for s in self._running.values())
        for kept in (
            sequence.kv.length,
            sequence.kv.length // BLOCK * BLOCK,
        ):  # a shared tail costs a block for its copy
            self._shorten(sequence, kept)
            if self._prefixes.make_room(sequence.kv.blocks_to_reach(final_length(sequence)), promised):
                return True
        self._shorten(sequence, 0)
        self._blocked = sequence.id  # until somebody leaves
        return False

    @staticmethod
    def _shorten(sequence: Sequence, length: int) -> None:
        """Gives up what was found of its prompt beyond `length`."""
        sequence.kv.truncate(length)
        sequence.cached = min(sequence.cached, length)

    def _reuse(self, sequence: Sequence) -> None:
        """Takes over the longest kept beginning of its prompt, if that is longer than what it has."""
        request = sequence.request
        if request.scope is None or request.prompt_logprobs is not None:
            return
        found = self._prefixes.fork(request.scope, request.prompt_ids)
        if found.length <= sequence.kv.length:
            found.free()
            return
        sequence.kv.free()
        sequence.kv = found
        if not sequence.started:  # else it finds what it computed itself, before it was sent back
            sequence.cached = found.length

    def _send_one_back(self) -> bool:
        """A background sequence gives its place and its room back, and begins again later where it stood, if it can."""
        sequence = next((s for s in reversed(self._running.values()) if s.request.background), None)
        if sequence is None:
            return False
        del self._running[sequence.id]
        self._blocked = None
        if sequence.request.scope is None:
            sequence.kv.free()
        else:
            self._keep(sequence.request.scope, sequence)
            sequence.kv = self._prefixes.pool.sequence()
        self._background.appendleft(sequence)
        return True

    def _next_scope(self) -> _Scope:
        """Whose sequence is admitted next: of those with the fewest running, the one whose turn was longest ago."""
        running = Counter(s.request.scope for s in self._running.values())
        ages = {scope: age for age, scope in enumerate(self._admitted)}
        return min(self._waiting, key=lambda scope: (running[scope], ages.get(scope, -1)))

    def _forget_empty(self, scope: _Scope) -> None:
        if not self._waiting[scope]:
            del self._waiting[scope]

    def _prefill(self, prefilling: Items[Sequence]) -> PrefillStep:
        """The scope whose turn was longest ago; within a scope, the first to come."""
        ages = {scope: age for age, scope in enumerate(self._prefilled)}
        sequence = min(prefilling, key=lambda s: ages.get(s.request.scope, -1))
        self._prefilled = _last(self._prefilled, sequence.request.scope)
        if sequence.kv.length == sequence.cached:  # nothing of its own yet: another choice may have computed the prompt
            self._reuse(sequence)
        waiting = sequence.waiting_prompt
        room = self._chunk - sequence.kv.length % CELL  # ends on a cell's edge, so that no cell is computed twice
        tokens = waiting[:room]
        return PrefillStep(sequence, tokens, last=len(tokens) == len(waiting))

    def _decode(self, decoding: Items[Sequence]) -> DecodeStep:
        """Round robin over the groups: all batched sequences are one group, every one-row sequence is its own."""
        batched = tuple(s for s in decoding if s.request.batched)
        groups = [(s,) for s in decoding if not s.request.batched] + ([batched] if batched else [])
        recent = {turn: age for age, turn in enumerate(self._turns)}
        group = min(groups, key=lambda g: recent.get(_turn_of(g), -1))
        self._turns = [*(turn for turn in self._turns if turn != _turn_of(group)), _turn_of(group)]
        return DecodeStep(group, batched=group[0].request.batched)


def _last(scopes: list[_Scope], scope: _Scope) -> list[_Scope]:
    """`scope` moved to the end. At most 256 are remembered: one that is forgotten is served as if it were new."""
    return [*(each for each in scopes[-255:] if each != scope), scope]


def _turn_of(group: Items[Sequence]) -> _Turn:
    """The batched group keeps its turn whoever is in it: short answers that come and go must not starve the others."""
    return "batched" if group[0].request.batched else group[0].id


def final_length(sequence: Sequence) -> int:
    """Positions of all that the sequence may become; the last token is sampled but never stored."""
    return len(sequence.request.prompt_ids) + max(0, sequence.limit - 1)


def reserved_blocks(sequence: Sequence) -> int:
    return -(-final_length(sequence) // BLOCK)
