"""A reuse forecast inside one row's graph: at a few layers it tells the host how soon each expert is used again.

Nothing waits for it: it runs on a branch, and the host takes what has come when it chooses victims. Legend: P taps, H
hidden, r rank, n experts of all layers.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from steerpipe.kernels.linear import row_linear
from steerpipe.kernels.reuse import recall, tell
from steerpipe.model.gpu.rows import Pass, Step
from steerpipe.model.kv_cache import KvSequence


@dataclass(frozen=True, slots=True)
class ReuseMap:
    """A trained forecast (predict/reuse.py) as the kernels read it; its scores are in doublings of LFRU's count."""

    taps: tuple[int, ...]  # numbers of MoE layers, ascending
    project: Tensor  # [P, r, 2H] fp16
    offset: Tensor  # [P, r] fp16
    expand: Tensor  # [P, n, r] fp16, or [1, n, r] for all taps
    bias: Tensor  # [P, n] fp32
    kept: float  # of the running mean, after a token


class ReuseListener(Protocol):
    """Who uses what is said."""

    def begin(self, *, again: bool) -> bool:
        """A step of one row begins, of the text of the step before or of another; whether a forecast is wanted."""
        ...

    def forget(self) -> None:
        """What was said is of no use any more: several texts decode together."""
        ...


class ReuseBranch:
    """The branch of all graphs of one decoder, and the past of the text that it decodes. One thread."""

    def __init__(self, forecast: ReuseMap, device: torch.device, listener: ReuseListener) -> None:
        taps, rank, inputs = forecast.project.shape
        self._forecast, self._listener = forecast, listener
        self._tap_of = {layer: tap for tap, layer in enumerate(forecast.taps)}
        self._context = torch.zeros(taps, inputs // 2, device=device)  # running means
        self._inputs = torch.zeros(1, inputs, dtype=forecast.project.dtype, device=device)
        self._hidden = torch.zeros(1, rank, device=device)
        self._turn = torch.zeros(1, dtype=torch.int64, device=device)  # tokens so far
        cuda = device.type == "cuda"
        self._words = torch.zeros(taps, forecast.bias.shape[1], dtype=torch.int64, pin_memory=cuda)
        self._view: NDArray[np.int64] = self._words.numpy()
        self._heard = [0] * taps  # turns of what was taken
        self._next = 0  # the tap that speaks next
        self._text: KvSequence | None = None
        self._stream = torch.cuda.Stream(device) if cuda else None
        self._held: list[Tensor] = []  # until the branch is joined: nobody may write there
        self._remembers = False  # whether the means are those of the text so far

    def enter(self, rows: Pass) -> bool:
        """A pass begins; whether the branch is part of it. A text that comes back after another begins anew."""
        if rows.base is not None:
            return False  # a prompt says nothing: its experts pass through
        if rows.rows > 1:
            self._text, self._remembers = None, False
            self._listener.forget()
            return False
        again = rows.kvs[0] is self._text
        self._text = rows.kvs[0]
        wanted = self._listener.begin(again=again)
        if wanted and not (again and self._remembers):
            self._context.zero_()
            self.newest()  # of a text that has ended
        self._remembers = wanted
        return wanted

    def look(self, number: int, x: Tensor, step: Step) -> None:
        """Queues a tap, if MoE layer `number` has one. x [1, H]: after attention, before the norm of the MoE."""
        tap = self._tap_of.get(number)
        if tap is None:
            return
        if self._stream is None:
            self._queue(tap, x, step)
            return
        self._held.append(x)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._queue(tap, x, step)

    def join(self) -> None:
        """The end of a step."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
            self._held.clear()

    def newest(self) -> NDArray[np.float32] | None:
        """[n]: what the last tap said that has spoken since; None: nobody has. Waits for nothing."""
        best = (0, 0)  # turn and tap
        for _ in self._heard:
            words = self._view[self._next]
            turn = int(words[0]) >> 32
            if turn == self._heard[self._next] or not (words >> 32 == turn).all():
                break
            self._heard[self._next] = turn
            best = max(best, (turn, self._next))
            self._next = (self._next + 1) % len(self._heard)
        if best == (0, 0):
            return None
        self._next = (best[1] + 1) % len(self._heard)  # after a pause, in step again
        scores: NDArray[np.float32] = self._view[best[1]].astype(np.uint32).view(np.float32)
        return scores

    def _queue(self, tap: int, x: Tensor, step: Step) -> None:
        told = self._forecast
        expand = told.expand[min(tap, len(told.expand) - 1)]
        recall(
            x, context=self._context[tap], inputs=self._inputs, positions=step.positions, turn=self._turn,
            kept=told.kept, first=tap == 0,
        )  # fmt: skip
        row_linear(self._inputs, told.project[tap], out=self._hidden, bias=told.offset[tap])
        tell(self._hidden, expand, told.bias[tap], positions=step.positions, turn=self._turn, words=self._words[tap])
