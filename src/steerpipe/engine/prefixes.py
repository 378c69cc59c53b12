"""Prompts that were computed once and are kept for the next turn: keys and values of the past, by scope.

Only what was prefilled is kept. A decoded token's keys differ from a prefilled one's in the last bits, so an answer is
prefilled again when it comes back as part of the next prompt, and reuse changes no bit of anybody's text.
A scope is whoever may share (an API key): a prompt is never looked for in another scope, so that nobody learns from
the time of an answer what somebody else has asked.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from steerpipe.model.cells import CELL
from steerpipe.model.kv_cache import BLOCK, KvPool, KvSequence

_MOST_PREFIXES = 64  # one lookup in 64 prompts of 100,000 tokens takes about a millisecond


@dataclass(frozen=True, slots=True, eq=False)
class _Prefix:
    scope: str
    ids: NDArray[np.int64]
    kv: KvSequence


class PrefixStore:
    """Holds what is left of the KV pool, and gives it back when a request needs the room. One thread."""

    def __init__(self, pool: KvPool) -> None:
        self.pool = pool
        self._kept: list[_Prefix] = []  # used longest ago first
        self.parts = False  # whether a prompt may go on inside a cell, rather than compute the whole cell again
        # of every prompt that is being typed, its scope and what was computed of it: that goes last
        self.typed: Callable[[], Iterable[tuple[str, Items[int]]]] = lambda: ()

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
        new = _Prefix(scope, np.asarray(ids, dtype=np.int64), kv)
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

    def make_room(self, blocks: int, promised: int) -> bool:
        """Whether the pool can give `blocks` beside those `promised` to others. Drops prefixes for it, or none."""
        missing = self.pool.live_blocks + promised + blocks - self.pool.capacity_blocks
        if missing > 0 and missing > self.pool.held_only_by(prefix.kv for prefix in self._kept):
            return False
        order = self._order(self._kept, self._held()) if missing > 0 else []
        while self.pool.live_blocks + promised + blocks > self.pool.capacity_blocks:
            self._drop(order.pop(0))
        return True

    def may_grow(self, scope: str, ids: Items[int], length: int) -> bool:
        """Whether what was computed of a prompt that is being typed, `ids`, may grow to `length` tokens.

        It takes nothing of other such prompts, but from a scope that holds more than its share of the pool, and then
        only to have its own share: else those who type would compute each other's prompts away, again and again.
        """
        pool = self.pool
        wanted, free = -(-length // BLOCK) - self.shared(scope, ids) // BLOCK, pool.capacity_blocks - pool.live_blocks
        if wanted <= free:
            return True
        held = self._held()
        of_scope = self._blocks_by_scope(held)
        free += pool.held_only_by(prefix.kv for prefix in self._kept if prefix not in held)
        if wanted <= free:
            return True
        share = pool.capacity_blocks // len({scope, *(each for each, _ in self.typed())})
        rich = [prefix.kv for prefix in held if prefix.scope != scope and of_scope[prefix.scope] > share]
        return of_scope[scope] + wanted <= share and wanted <= free + pool.held_only_by(rich)

    def clear(self) -> None:
        for prefix in list(self._kept):
            self._drop(prefix)

    def _trim(self) -> None:
        """What is too much goes; the prompt that was kept last stays, and so do those that are being typed."""
        if len(self._kept) <= _MOST_PREFIXES and not self._hold_too_much(self._kept):
            return
        held = self._held()
        order = self._order(self._kept[:-1], held)
        while len(self._kept) > _MOST_PREFIXES:
            self._drop(order.pop(0))
        waiting = [prefix for prefix in order if prefix not in held]
        while waiting and self._hold_too_much([prefix for prefix in self._kept if prefix not in held]):
            self._drop(waiting.pop(0))

    def _order(self, prefixes: list[_Prefix], held: list[_Prefix]) -> list[_Prefix]:
        """Who goes first: what nobody types, the oldest; then prompts of the scope that holds most."""
        of_scope = self._blocks_by_scope(held)
        return sorted(prefixes, key=lambda prefix: (prefix in held, -of_scope[prefix.scope] * (prefix in held)))

    def _blocks_by_scope(self, prefixes: list[_Prefix]) -> Counter[str]:
        blocks = {(prefix.scope, block) for prefix in prefixes for block in prefix.kv.blocks}
        return Counter(scope for scope, _ in blocks)

    def _hold_too_much(self, prefixes: list[_Prefix]) -> bool:
        most = self.pool.keepable_blocks
        return most < self.pool.capacity_blocks and self.pool.held_only_by(prefix.kv for prefix in prefixes) > most

    def _held(self) -> list[_Prefix]:
        """For each prompt that is being typed, the last used of those that have all that was computed of it."""
        held = []
        for scope, ids in self.typed():
            wanted = np.asarray(ids, dtype=np.int64)
            own = (prefix for prefix in reversed(self._kept) if prefix.scope == scope)
            found = next((prefix for prefix in own if _common(prefix.ids, wanted) == len(wanted)), None)
            held += [found] if found is not None and len(wanted) else []
        return held

    def _drop(self, prefix: _Prefix) -> None:
        self._kept.remove(prefix)
        prefix.kv.free()


def _common(first: NDArray[np.int64], second: NDArray[np.int64]) -> int:
    """How many leading ids two prompts share."""
    length = min(len(first), len(second))
    differing = np.flatnonzero(first[:length] != second[:length])
    return int(differing[0]) if len(differing) else length
