"""One step of learning. On a GPU it is captured after a few steps and replayed: launching the many small kernels of a
network takes the host longer than the kernels take (a step of an MLP 2.6 ms on an H200)."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

_WARM_STEPS = 3  # until every library has its workspace


class Learner:
    """AdamW on `loss_of(*batch)`; every batch has the same shapes. `loss_of` neither waits for the device nor decides
    by what it computes."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], loss_of: Callable[..., Tensor], learning_rate: float,
        weight_decay: float,
    ) -> None:  # fmt: skip
        device = parameters[0].device
        self._loss_of = loss_of
        self._rate = torch.tensor(learning_rate, device=device)  # a tensor: a captured step reads it anew
        self._on_gpu = device.type == "cuda"
        self._optimizer = torch.optim.AdamW(
            parameters, lr=self._rate, weight_decay=weight_decay, fused=self._on_gpu, capturable=self._on_gpu
        )
        self._steps = 0
        self._captured: tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]] | None = None

    def step(self, batch: tuple[Tensor, ...], rate: float) -> None:
        """Does not wait for the device."""
        self._rate.fill_(rate)
        self._steps += 1
        if not self._on_gpu:
            self._learn(batch)
        elif self._steps <= _WARM_STEPS:
            self._learn_aside(batch)
        else:
            self._captured = self._captured or self._capture(batch)
            graph, inputs = self._captured
            for own, given in zip(inputs, batch, strict=True):
                own.copy_(given)
            graph.replay()

    def _learn(self, batch: tuple[Tensor, ...]) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        self._loss_of(*batch).backward()
        self._optimizer.step()

    def _learn_aside(self, batch: tuple[Tensor, ...]) -> None:
        """On a stream of its own, as a capture is: what autograd keeps must not hang on the usual one."""
        usual, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(usual)
        with torch.cuda.stream(side):
            self._learn(batch)
        usual.wait_stream(side)

    def _capture(self, batch: tuple[Tensor, ...]) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]:
        inputs = tuple(torch.empty_like(each, memory_format=torch.contiguous_format) for each in batch)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._learn(inputs)
        return graph, inputs
