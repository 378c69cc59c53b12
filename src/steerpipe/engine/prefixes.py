"""Prompts that were computed once and are kept for the next turn: keys and values of the past, by scope.

Only what was prefilled is kept. A decoded token's keys differ from a prefilled one's in the last bits, so an answer is
prefilled again when it comes back as part of the next prompt, and reuse changes no bit of anybody's text.
A scope is whoever may share (an API key): a prompt is never looked for in another scope, so that nobody learns from
the time of an answer what somebody else has asked.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from steerpipe.model.cells import CELL
from steerpipe.model.kv_cache import KvPool, KvSequence

_MOST_PREFIXES = 64  # that nobody types: one lookup in 64 prompts of 100,000 tokens takes about a millisecond


_Draft = tuple[str | None, Items[int]]  # scope and prompt


@dataclass(frozen=True, slots=True, eq=False)
class _Prefix:
    scope: str
    ids: NDArray[np.int64]
    raw: bytes  # of the ids: whether one prompt begins with another is asked of hundreds at once
    kv: KvSequence


class PrefixStore:
    """Holds what is left of the KV pool, and gives it back when a request needs the room. One thread."""

    def __init__(self, pool: KvPool) -> None:
        self.pool = pool
        self._kept: list[_Prefix] = []  # used longest ago first
        self.parts = False  # whether a prompt may go on inside a cell, rather than compute the whole cell again
        # of every prompt that is being typed, its scope and, `as_bytes`, what was computed of it: that goes last
        self.typed: Callable[[], Iterable[tuple[str, bytes]]] = lambda: ()

    @property
    def held_blocks(self) -> int:
        """Distinct KV blocks that kept prefixes refer to, those of running sequences among them."""
        return len({block for prefix in self._kept for block in prefix.kv.blocks})

    def fork(self, scope: str, ids: Items[int]) -> KvSequence:
        """The longest beginning of `ids` that is there and usable, without the last token; maybe empty.

        The last token is computed again: its logits choose the first token of the answer.
        """
        wanted = np.asarray(ids, dtype=np.int64)[:-1]
        own = [prefix for prefix in self._kept if prefix.scope == scope]
        best = max(own, key=lambda prefix: _common(prefix.ids, wanted), default=None)
        length = 0 if best is None else self.usable(_common(best.ids, wanted))
        if best is None or not length:
            return self.pool.sequence()
        self._kept.remove(best)
        self._kept.append(best)
        return best.kv.fork(length)

    def usable(self, length: int) -> int:
        """How many of so many computed tokens a prompt may go on behind."""
        return length if self.parts else length // CELL * CELL

    def keep(self, scope: str, ids: Items[int] | NDArray[np.int64], kv: KvSequence) -> None:
        """Takes `kv`, which holds exactly `ids`, over. What it makes superfluous goes."""
        new = _Prefix(scope, np.asarray(ids, dtype=np.int64), as_bytes(ids), kv)
        assert kv.length == len(new.ids), f"{kv.length} positions are kept for {len(new.ids)} tokens"
        for old in [prefix for prefix in self._kept if prefix.scope == scope]:
            common = _common(old.ids, new.ids)
            if common == len(old.ids):
                self._drop(old)
            elif common == len(new.ids):  # there is more of it already
                kv.free()
                return
        if not kv.length:
            return
        self._kept.append(new)
        self._trim()

    def hand_over(self, scope: str, ids: Items[int]) -> bool:
        """Whether exactly `ids` were kept: whoever has forked them owns them now."""
        raw = as_bytes(ids)
        own = next((prefix for prefix in self._kept if prefix.scope == scope and prefix.raw == raw), None)
        if own is not None:
            self._drop(own)
        return own is not None

    def shared(self, scope: str, ids: Items[int]) -> int:
        """How many of the first tokens of `ids` are there."""
        wanted = np.asarray(ids, dtype=np.int64)
        return max((_common(prefix.ids, wanted) for prefix in self._kept if prefix.scope == scope), default=0)

    def cut(self, scope: str, ids: Items[int], length: int) -> None:
        """Of beginnings of `ids` only the first `length` tokens stay; a prompt that goes on otherwise is another's."""
        whole = np.asarray(ids, dtype=np.int64)
        for prefix in [each for each in self._kept if each.scope == scope and len(each.ids) > length]:
            if _common(prefix.ids, whole) == len(prefix.ids):
                self._kept.remove(prefix)
                prefix.kv.truncate(length)
                self.keep(scope, prefix.ids[:length], prefix.kv)

    def make_room(self, blocks: int, promised: int, draft: _Draft | None = None) -> bool:
        """Whether the pool can give `blocks` beside those `promised` to others. Drops prefixes for it, or none.

        For a `draft` none that another draft rests on: those who type would compute each other's prompts away, again
        and again.
        """
        missing = self.pool.live_blocks + promised + blocks - self.pool.capacity_blocks
        order = self._order(draft) if missing > 0 else []
        if missing > 0 and missing > self.pool.held_only_by(prefix.kv for prefix in order):
            return False
        while self.pool.live_blocks + promised + blocks > self.pool.capacity_blocks:
            self._drop(order.pop(0))
        return True

    def clear(self) -> None:
        for prefix in list(self._kept):
            self._drop(prefix)

    def _trim(self) -> None:
        """Of what nobody types the oldest goes where it is too much; the prompt that was kept last stays."""
        if len(self._kept) <= _MOST_PREFIXES and not self._hold_too_much(self._kept):
            return
        typed = self._typed()
        idle = [prefix for prefix in self._kept if prefix not in typed]
        last = self._kept[-1]
        for prefix in [each for each in idle if each is not last]:
            if len(idle) <= _MOST_PREFIXES and not self._hold_too_much(idle):
                return
            idle.remove(prefix)
            self._drop(prefix)

    def _order(self, draft: _Draft | None) -> list[_Prefix]:
        """Who goes first: what nobody types, then the others, the oldest of each. A draft takes nothing of others."""
        typed = self._typed(draft)
        order = sorted(self._kept, key=lambda prefix: prefix in typed)
        return order if draft is None else order[: -len(typed) or None]

    def _hold_too_much(self, prefixes: list[_Prefix]) -> bool:
        most = self.pool.keepable_blocks
        return most < self.pool.capacity_blocks and self.pool.held_only_by(prefix.kv for prefix in prefixes) > most

    def _typed(self, draft: _Draft | None = None) -> set[_Prefix]:
        """For each prompt that is being typed, but those that the `draft` begins with, the last used of those that
        have all that was computed of it.
        """
        by_scope: dict[str, list[_Prefix]] = {}
        for prefix in reversed(self._kept):
            by_scope.setdefault(prefix.scope, []).append(prefix)
        asks, own = (None, b"") if draft is None else (draft[0], as_bytes(draft[1]))
        others = [(scope, raw) for scope, raw in self.typed() if raw and not (scope == asks and own.startswith(raw))]
        found = (next((p for p in by_scope.get(scope, ()) if p.raw.startswith(raw)), None) for scope, raw in others)
        return {prefix for prefix in found if prefix is not None}

    def _drop(self, prefix: _Prefix) -> None:
        self._kept.remove(prefix)
        prefix.kv.free()


def as_bytes(ids: Items[int] | NDArray[np.int64]) -> bytes:
    """Tokens as `PrefixStore.typed` gives them: a prompt begins with another exactly if its bytes do."""
    return np.asarray(ids, dtype=np.int64).tobytes()


def _common(first: NDArray[np.int64], second: NDArray[np.int64]) -> int:
    """How many leading ids two prompts share."""
    length = min(len(first), len(second))
    differing = np.flatnonzero(first[:length] != second[:length])
    return int(differing[0]) if len(differing) else length
