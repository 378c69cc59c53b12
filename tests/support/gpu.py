"""Models on the GPU's path: raw blocks and GpuDecoder, on CUDA or, under Triton's interpreter, on the CPU.

Import it only where Triton may be imported (tests/gpu, tests/model/gpu).
"""

import functools
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import torch
from torch import Tensor

from steerpipe.core.blocks import BlockForm, BlockLease
from steerpipe.model.checkpoint import open_checkpoint
from steerpipe.model.gpu.decoder import GpuDecoder
from steerpipe.model.gpu.experts import NoBlocks
from steerpipe.model.kv_cache import KvPool
from steerpipe.model.weights import build_weights
from steerpipe.store.formats import ExpertFormat
from steerpipe.store.pack import write_pack
from steerpipe.store.plan import PackOptions
from steerpipe.store.reader import Pack, open_pack
from steerpipe.transfer.cuda.source import CudaSource
from tests.support.running import CPU, Loaded

MAX_BATCH = 40  # more than two cells


@functools.cache
def pack_of(folder: Path, form: ExpertFormat | None = None) -> Pack:
    """A checkpoint's pack, written once per process."""
    out = Path(tempfile.mkdtemp(dir=folder.parent)) / "pack"
    write_pack(open_checkpoint(folder), out, PackOptions(form))
    return open_pack(out)


def load_gpu(pack: Pack, dtype: torch.dtype = torch.float32, device: torch.device = CPU, blocks: int = 64) -> Loaded:
    """With every expert resident; other sources are given step by step, or by dataclasses.replace."""
    weights = build_weights(pack.spec, pack.family.names, pack.read_dense(), dtype, device)
    pool = KvPool(pack.spec, dtype, device, blocks)
    decoder = GpuDecoder(pack.spec, weights, pool, device, max_batch=MAX_BATCH)
    return Loaded(pack.spec, decoder, resident_blocks(pack, device), pool)


loaded_gpu = functools.cache(load_gpu)  # for tests that leave the pool as they found it


def resident_blocks(pack: Pack, device: torch.device) -> "CudaSource | MemoryBlocks | NoBlocks":
    if not pack.spec.moe_layers:
        return NoBlocks()
    return open_blocks(pack, 1.0, device) if device.type == "cuda" else MemoryBlocks(pack, device)


def open_blocks(pack: Pack, share: float, device: torch.device, pinned: float = 1.0, ram: float = 0.0) -> CudaSource:
    """Slots for a share of all experts (at least two); behind them, pinned memory and RAM for shares of all blocks."""
    count = sum(pack.spec.moe(layer).experts for layer in pack.spec.moe_layers)
    total = count * pack.layout(pack.spec.moe_layers[0]).block_bytes
    return CudaSource.open(
        pack, slots=max(2, round(share * count)), device=device, pinned_bytes=int(pinned * total),
        ram_bytes=int(ram * total),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Waves:
    order: Sequence[tuple[int, ...]]
    show: object

    def waves(self) -> Iterator[tuple[int, ...]]:
        for wave in self.order:
            self.show(wave)  # type: ignore[operator]
            yield wave


@dataclass(slots=True)
class MemoryBlocks:
    """A BlockSource that holds all raw blocks of a pack in device memory.

    With `random`, experts come in random order in waves of random size, and while a wave is out every other expert's
    address is that of a block of NaN: whoever computes with it is found out.
    """

    pack: Pack
    device: torch.device
    random: Random | None = None
    waves: int = 0
    leases: list[tuple[int, tuple[int, ...], frozenset[int] | None]] = field(default_factory=list)
    _memory: dict[int, Tensor] = field(default_factory=dict)
    _true: dict[int, Tensor] = field(default_factory=dict)
    _tables: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for layer in self.pack.spec.moe_layers:
            count, size = self.pack.spec.moe(layer).experts, self.pack.layout(layer).block_bytes
            blocks = [self.pack.read_block(layer, expert) for expert in range(count)]
            nothing = torch.full((size,), 0xFF, dtype=torch.uint8)  # NaN as fp32, bf16 and fp16
            memory = torch.stack([*blocks, nothing]).to(self.device)  # [E + 1, bytes]
            self._memory[layer] = memory
            starts = [memory.data_ptr() + expert * size for expert in range(count + 1)]
            self._true[layer] = torch.tensor(starts, dtype=torch.int64)
            self._tables[layer] = self._true[layer][:-1].to(self.device, copy=True)

    @property
    def resident(self) -> bool:
        return self.random is None

    @property
    def landing(self) -> None:
        return None

    def form(self, layer: int) -> BlockForm:
        return self.pack.layout(layer).form

    def table(self, layer: int) -> Tensor:
        return self._tables[layer]

    @contextmanager
    def lease(self, layer: int, routed: Sequence[int], keep: Collection[int] | None = None) -> Iterator[BlockLease]:
        assert len(set(routed)) == len(routed), f"experts of layer {layer} leased twice at once: {routed}"
        self.leases.append((layer, tuple(routed), None if keep is None else frozenset(keep)))
        order = self._shuffled(routed) if self.random else [tuple(routed)]
        self.waves += len(order)
        yield _Waves(order, lambda wave: self._show(layer, wave))
        self._show(layer, range(len(self._tables[layer])))

    def _shuffled(self, routed: Sequence[int]) -> list[tuple[int, ...]]:
        assert self.random is not None, "somebody decides the order"
        left, order = list(routed), []
        self.random.shuffle(left)
        while left:
            size = self.random.randint(1, len(left))
            order.append(tuple(left[:size]))
            left = left[size:]
        return order

    def _show(self, layer: int, experts: Collection[int]) -> None:
        shown = self._true[layer][-1].repeat(len(self._tables[layer]))
        shown[list(experts)] = self._true[layer][list(experts)]
        self._tables[layer].copy_(shown)

    def serves(self, experts_per_layer: int) -> bool:
        return self.random is None

    def begin(self) -> None:
        raise AssertionError("everything is here: nobody serves")

    def serve(
        self, layer: int, routed: Sequence[int], keep: Collection[int] | None = None,
        meanwhile: Callable[[], None] | None = None, *, ahead: bool = False,
    ) -> None:  # fmt: skip
        raise AssertionError("everything is here: nobody serves")

    def release(self) -> None:
        raise AssertionError("everything is here: nobody waits")
