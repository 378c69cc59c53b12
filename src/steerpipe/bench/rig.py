"""A model of made-up weights on one device, and how a step of it is run and timed: as the engine does it.

A step is `decode_rows`, a forward pass and the greedy token read back, which waits for the device.
"""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from steerpipe.bench.routing import Routing
from steerpipe.bench.shapes import Shape
from steerpipe.bench.weights import draw_dense
from steerpipe.core.errors import NumericsError
from steerpipe.core.ids import SequenceId
from steerpipe.model.cells import CELL, padded
from steerpipe.model.decoder import Decoder
from steerpipe.model.kv_cache import BLOCK, KvPool, KvSequence
from steerpipe.model.step import StepRows, decode_rows, prefill_rows

if TYPE_CHECKING:
    import steerpipe.model.gpu.decoder as gpu
    from steerpipe.model.gpu.apart import ApartForecaster
    from steerpipe.model.gpu.tap import Forecaster


class Rig:
    """Dense weights, KV blocks and a decoder. `kernels`: that of the GPU; on a CPU it needs Triton's interpreter."""

    def __init__(
        self, shape: Shape, device: torch.device, dtype: torch.dtype, *, sequences: int, tokens: int, kernels: bool,
        seed: int = 0,
    ) -> None:  # fmt: skip
        """Room for `sequences` of `tokens` tokens each."""
        self.shape, self.device, self.dtype, self.kernels = shape, device, dtype, kernels
        self._weights = draw_dense(shape, dtype, device, seed)
        self.pool = KvPool(shape.spec, dtype, device, capacity_blocks=sequences * (-(-tokens // BLOCK) + 1))
        self._random = torch.Generator(device).manual_seed(seed + 1)
        self._max_batch = max(sequences, CELL)
        self._words: NDArray[np.int32] | None = None
        self.decoder = self._new_decoder()
        self._rows_device = self.decoder.rows_device

    @property
    def graphs(self) -> bool:
        """Whether decode runs in captured graphs; else everything takes leases."""
        return not isinstance(self.decoder, Decoder) and self.decoder.graphs

    def forget(self) -> None:
        """Drops the graphs that were captured, and with them the last source, its memory and who predicted."""
        self.decoder = self._new_decoder()
        self._words = None

    def _new_decoder(self) -> "Decoder | gpu.GpuDecoder":
        spec, weights = self.shape.spec, self._weights
        if not self.kernels:
            return Decoder(spec, weights, self.device)
        from steerpipe.model.gpu.decoder import GpuDecoder

        return GpuDecoder(spec, weights, self.pool, self.device, max_batch=self._max_batch)

    def sequence(self, context: int) -> KvSequence:
        """A past of that many tokens, of random keys and values: attention reads them all the same."""
        kv = self.pool.sequence()
        kv.append(context)
        for layer, each in enumerate(self.shape.spec.layers):
            shape = (2, BLOCK, each.attention.kv_heads, each.attention.head_dim)
            drawn = torch.empty(shape, dtype=self.dtype, device=self.device).normal_(generator=self._random)
            for start in range(0, context, BLOCK):
                count = min(BLOCK, context - start)
                kv.write(layer, start, drawn[0, :count], drawn[1, :count])
        return kv

    def predict(
        self, forecaster: "Forecaster | ApartForecaster | None", words: NDArray[np.int32] | None = None
    ) -> None:
        """Who predicts in the steps to come (one row), and what is said instead: see `prediction.spoken`."""
        assert not isinstance(self.decoder, Decoder), "prediction is in the decoder of the GPU"
        self.decoder.forecaster, self._words = forecaster, words

    def decode(
        self, source: Any, kvs: Sequence[KvSequence], routing: Routing | None, first: int, tokens: int
    ) -> list[float]:
        """Seconds of each of `tokens` steps; their experts are those of `routing` from step `first` on."""
        rows = len(kvs)
        cell = CELL if rows > 1 else 1
        last = [1 + row % (self.shape.spec.vocab - 1) for row in range(rows)]
        ids = [SequenceId(row) for row in range(rows)]
        seconds = []
        for token in range(first, first + tokens):
            self._force(None if routing is None else torch.from_numpy(routing.step(token, rows)), cell)
            self._say(token)
            begin = time.perf_counter()
            step = decode_rows(ids, kvs, last, self._rows_device, cell=cell)
            last = self._greedy(step, source, range(rows))
            seconds.append(time.perf_counter() - begin)
        return seconds

    def prefill(self, source: Any, routing: Routing | None, first: int, tokens: int) -> float:
        """Seconds of one forward pass over a prompt of `tokens` tokens."""
        kv = self.pool.sequence()
        prompt = [1 + (7 * index) % (self.shape.spec.vocab - 1) for index in range(tokens)]
        places = [(first + index) % len(routing.ids) for index in range(tokens)] if routing else []
        self._force(torch.from_numpy(routing.ids[places]).permute(1, 0, 2) if routing else None, CELL)
        try:
            begin = time.perf_counter()
            step = prefill_rows(SequenceId(0), kv, prompt, self._rows_device)
            self._greedy(step, source, [tokens - 1])
            return time.perf_counter() - begin
        finally:
            kv.free()

    def check(self, source: Any, kvs: Sequence[KvSequence], routing: Routing | None, length: int) -> None:
        """One step with `length` tokens before it, whose logits have to be finite: times of garbage are worth nothing.

        It also captures the graph for that length.
        """
        rows, cell = len(kvs), CELL if len(kvs) > 1 else 1
        for kv in kvs:
            kv.truncate(min(kv.length, length))
            kv.append(length - kv.length)
        self._force(None if routing is None else torch.from_numpy(routing.step(0, rows)), cell)
        self._say(0)
        step = decode_rows([SequenceId(row) for row in range(rows)], kvs, [1] * rows, self._rows_device, cell=cell)
        if not bool(torch.isfinite(self.decoder.forward(step, source, range(rows))).all()):
            raise NumericsError(
                f"logits of {self.shape.name} in {self.shape.layout.format.value} are not finite",
                fix="report it: made-up weights of unit gain never overflow, so a kernel is wrong",
            )

    def _greedy(self, step: StepRows, source: Any, wanted: Sequence[int]) -> list[int]:
        logits = self.decoder.forward(step, source, wanted)
        return [int(token) for token in logits.argmax(-1).tolist()]

    def _say(self, token: int) -> None:
        if not isinstance(self.decoder, Decoder) and self._words is not None:
            self.decoder.said = torch.from_numpy(self._words[token % len(self._words)]).to(self.device)

    def _force(self, ids: Tensor | None, cell: int) -> None:
        """ids [L, rows, k]; padding rows are the router's, which are none."""
        if isinstance(self.decoder, Decoder):
            assert ids is None, "routing is forced on the decoder of the GPU only"
            return
        if ids is None:
            self.decoder.forced = None
            return
        layers, rows, top_k = ids.shape
        forced = torch.full((layers, rows if cell == 1 else padded(rows), top_k), -1, dtype=torch.int32)
        forced[:, :rows] = ids
        self.decoder.forced = forced.to(self.device)
