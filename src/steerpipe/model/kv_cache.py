"""Keys and values in reference-counted blocks: append, truncate, fork, free, and nothing else.

A block holds 128 consecutive positions of every layer, in one allocation: CUDA kernels find it by one address and add
a layer's offset. Drafts, prefix reuse, `n` answers and speculation are all built from forks: a fork shares blocks and
copies one only when it writes into it.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from steerpipe.core.errors import CapacityError
from steerpipe.core.geometry import KV_BLOCK_TOKENS
from steerpipe.model.spec import ModelSpec

BLOCK = KV_BLOCK_TOKENS


@dataclass(slots=True, eq=False)
class _Block:
    """One pool entry. `layers[i]` is [2, kv_heads, BLOCK, head_dim]: keys, then values; all are views of `memory`."""

    memory: Tensor  # [block_bytes / itemsize]
    layers: list[Tensor]
    address: int
    holders: int = 1


@dataclass(slots=True)
class KvPool:
    """All blocks of one model. Blocks are allocated when first needed and reused after that; one thread."""

    spec: ModelSpec
    dtype: torch.dtype
    device: torch.device
    capacity_blocks: int
    _idle: list[_Block] = field(default_factory=list)
    _live: int = 0

    @property
    def block_bytes(self) -> int:
        return sum(self._values) * self.dtype.itemsize

    @property
    def layer_bytes(self) -> tuple[int, ...]:
        """Where each layer begins in a block."""
        ends = itertools.accumulate(self._values, initial=0)
        return tuple(end * self.dtype.itemsize for end in ends)[:-1]

    @property
    def _values(self) -> list[int]:
        """Numbers that one block holds, layer by layer."""
        return [2 * layer.attention.kv_heads * BLOCK * layer.attention.head_dim for layer in self.spec.layers]

    @property
    def live_blocks(self) -> int:
        return self._live

    @property
    def keepable_blocks(self) -> int:
        """How many may stay in use for prompts that nobody asks for or types now, beside the last."""
        return self.capacity_blocks

    def check_integrity(self) -> None:
        """Asserts that every block is live or idle, once."""
        assert len({id(block) for block in self._idle}) == len(self._idle), "a KV block is idle twice"

    def sequence(self) -> "KvSequence":
        return KvSequence(self)

    def take(self) -> _Block:
        """A block of finite values (zeros), held once."""
        if self._live >= self.capacity_blocks:
            raise CapacityError(
                f"all {self.capacity_blocks} KV blocks ({self.capacity_blocks * BLOCK} tokens) are in use",
                fix="wait for an answer to end, ask for a shorter one, or raise kv_memory",
            )
        block = self._spare()
        block.memory.zero_()  # a masked key's probability is 0, and 0 times a stale infinity is not
        block.holders = 1
        self._live += 1
        return block

    def drop(self, block: _Block) -> None:
        assert block.holders > 0, "a KV block was freed twice"
        block.holders -= 1
        if block.holders == 0:
            self._live -= 1
            self._rest(block)

    def held_only_by(self, sequences: "Iterable[KvSequence]") -> int:
        """Blocks that would be free if these sequences were."""
        held = Counter(block for sequence in sequences for block in sequence.blocks)
        return sum(block.holders == times for block, times in held.items())

    def _spare(self) -> _Block:
        """A block that nobody holds, with whatever was left in it."""
        if self._idle:
            return self._idle.pop()
        return self._cut(torch.empty(sum(self._values), dtype=self.dtype, device=self.device))

    def _rest(self, block: _Block) -> None:
        """Nobody holds the block any more."""
        self._idle.append(block)

    def _cut(self, memory: Tensor) -> _Block:
        layers = [
            part.view(2, layer.attention.kv_heads, BLOCK, layer.attention.head_dim)
            for part, layer in zip(memory.split(self._values), self.spec.layers, strict=True)
        ]
        return _Block(memory, layers, memory.data_ptr())


class KvSequence:
    """The past of one sequence. `length` positions are valid; whoever made it frees it."""

    def __init__(self, pool: KvPool) -> None:
        self._pool = pool
        self._blocks: list[_Block] = []
        self.length = 0

    @property
    def blocks(self) -> "tuple[_Block, ...]":
        """In the order of positions. A block is an identity here: nobody but this module looks inside."""
        return tuple(self._blocks)

    def blocks_to_reach(self, length: int) -> int:
        """How many blocks growing to `length` positions takes from the pool, the copy of a shared tail included."""
        return max(0, -(-length // BLOCK) - len(self._blocks)) + (length > self.length and self._shares_tail)

    @property
    def _shares_tail(self) -> bool:
        """Whether the next position lies in a block that others hold too."""
        tail = self.length // BLOCK
        return tail < len(self._blocks) and self._blocks[tail].holders > 1

    def append(self, count: int) -> None:
        """Makes room for `count` more positions, to be filled by `write`. Takes all the blocks or none."""
        end = self.length + count
        tail, shared = self.length // BLOCK, count > 0 and self._shares_tail
        taken: list[_Block] = []
        try:
            taken.extend(self._pool.take() for _ in range(self.blocks_to_reach(end)))
        except BaseException:  # whoever lends a page may fail, too
            for block in taken:
                self._pool.drop(block)
            raise
        if shared:
            own = taken.pop()
            own.memory.copy_(self._blocks[tail].memory)
            self._pool.drop(self._blocks[tail])
            self._blocks[tail] = own
        self._blocks.extend(taken)
        self.length = end

    @property
    def addresses(self) -> list[int]:
        """Where each block begins in the device's memory, in the order of positions."""
        return [block.address for block in self._blocks]

    def write(self, layer: int, start: int, keys: Tensor, values: Tensor) -> None:
        """keys, values: [n, kv_heads, head_dim] for positions start … start + n - 1, which lie in one block."""
        block, offset = self._blocks[start // BLOCK], start % BLOCK
        count = keys.shape[0]
        assert offset + count <= BLOCK, "a write straddles two KV blocks"
        assert block.holders == 1, "a write into a shared KV block"
        block.layers[layer][0, :, offset : offset + count] = keys.transpose(0, 1)
        block.layers[layer][1, :, offset : offset + count] = values.transpose(0, 1)

    def read(self, layer: int, first: int, last: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        """(first position, keys, values) of the blocks that hold positions first … last; [kv_heads, BLOCK, D] each."""
        for index in range(first // BLOCK, last // BLOCK + 1):
            pair = self._blocks[index].layers[layer]
            yield index * BLOCK, pair[0], pair[1]

    def truncate(self, length: int) -> None:
        """Forgets everything from position `length` on."""
        assert 0 <= length <= self.length, f"cannot truncate {self.length} positions to {length}"
        keep = -(-length // BLOCK)
        for block in self._blocks[keep:]:
            self._pool.drop(block)
        del self._blocks[keep:]
        self.length = length

    def fork(self, length: int | None = None) -> "KvSequence":
        """A second sequence with the same first `length` positions, sharing their blocks."""
        length = self.length if length is None else length
        assert 0 <= length <= self.length, f"cannot fork {length} of {self.length} positions"
        other = KvSequence(self._pool)
        other._blocks = self._blocks[: -(-length // BLOCK)]
        for block in other._blocks:
            block.holders += 1
        other.length = length
        return other

    def free(self) -> None:
        """Gives every block back. The sequence is empty afterwards and may be used again."""
        self.truncate(0)
