"""Pairs of a prompt chunk in tiles of 16 by expert, and the way of small integers to the device.

A pair is one row and one of its experts, numbered row by row. Legend: P pairs, E experts, T tiles.
"""

from collections.abc import Collection

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from steerpipe.model.cells import CELL

_ALIGNED = 4  # int32 of 16 bytes: kernels are compiled for pointers that are multiples of that
_TILE_WORDS = 1 + CELL


class Tiles:
    """All pairs of one layer, sorted by expert. An expert's tiles are filled but for the last."""

    def __init__(self, experts: NDArray[np.int32], count: int) -> None:
        """experts [P], -1 where there is nothing to compute; `count` experts in the layer."""
        order = np.argsort(experts.astype(np.int16), kind="stable")  # pairs; five times as quick as of 32 bits
        order = order[np.searchsorted(experts, 0, sorter=order) :]
        of = experts[order]  # ascending
        pairs = np.bincount(of, minlength=count)  # [E]
        tiles = -(-pairs // CELL)  # [E]
        place = np.arange(len(of)) - (np.cumsum(pairs) - pairs)[of]  # within the expert
        self._expert = np.repeat(np.arange(count, dtype=np.int32), tiles)  # [T]
        self._pairs = np.full((len(self._expert), CELL), -1, dtype=np.int32)
        self._pairs[(np.cumsum(tiles) - tiles)[of] + place // CELL, place % CELL] = order
        self._count = count

    def of(self, wave: Collection[int]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """tile_expert [t], tile_pairs [t, 16] of some experts."""
        wanted = np.zeros(self._count, dtype=bool)
        wanted[list(wave)] = True
        own = np.flatnonzero(wanted[self._expert])
        return self._expert[own], self._pairs[own]


class TileStaging:
    """Pinned memory and its copy on the device, filled from the start for each layer. On a CPU both are one.

    Copies are queued on the current stream, so what was sent may be overwritten when the stream has passed it: `reset`
    is called then.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._used = 0
        self._grow(1 << 12)

    def reset(self) -> None:
        self._used = 0

    def send(self, expert: NDArray[np.int32], pairs: NDArray[np.int32]) -> tuple[Tensor, Tensor]:
        """tile_expert [t], tile_pairs [t, 16], with unused tiles (-1) behind."""
        count = -(-len(expert) // _ALIGNED) * _ALIGNED
        words = np.full(count * _TILE_WORDS, -1, dtype=np.int32)
        words[: len(expert)] = expert
        words[count : count + pairs.size] = pairs.reshape(-1)
        sent = self._send(words)
        return sent[:count], sent[count:].view(count, CELL)

    def send_ids(self, experts: NDArray[np.int32]) -> Tensor:
        """[R, k]."""
        words = np.full(-(-experts.size // _ALIGNED) * _ALIGNED, -1, dtype=np.int32)
        words[: experts.size] = experts.reshape(-1)
        return self._send(words)[: experts.size].view(experts.shape)

    def _send(self, words: NDArray[np.int32]) -> Tensor:
        start, end = self._used, self._used + len(words)
        if end > self._host.numel():
            self._grow(2 * len(words))
            start, end = 0, len(words)
        self._numbers[start:end] = words
        self._used = end
        sent = self._memory[start:end]
        if sent.data_ptr() != self._host[start:end].data_ptr():
            sent.copy_(self._host[start:end], non_blocking=True)
        return sent

    def _grow(self, words: int) -> None:
        """New memory; the old lives as long as a queued copy needs it, which torch's allocators see to."""
        pinned = self._device.type == "cuda"
        self._host = torch.empty(words, dtype=torch.int32, pin_memory=pinned)
        self._numbers = self._host.numpy()
        self._memory = torch.empty(words, dtype=torch.int32, device=self._device) if pinned else self._host
