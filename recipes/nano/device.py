"""Batches as tensors on the device that trains, and what is compiled and captured there."""

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from recipes.nano.corpus import Batch
from recipes.nano.model import Decoder

Result = TypeVar("Result")
MOST_WINDOWS = 1024  # per batch on a GPU, where bounds have one size so that nothing is compiled twice


class DeviceBatch(NamedTuple):
    inputs: Tensor
    targets: Tensor
    positions: Tensor
    bounds: Tensor


def pick_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def place(batch: Batch, device: torch.device) -> DeviceBatch:
    bounds = batch.bounds
    if device.type == "cuda":
        if len(bounds) > MOST_WINDOWS:
            raise ValueError(f"{len(bounds) - 1} windows in a batch; raise MOST_WINDOWS above {MOST_WINDOWS}")
        bounds = np.pad(bounds, (0, MOST_WINDOWS - len(bounds)), mode="edge")
    return DeviceBatch(*(_send(array, device) for array in (batch.inputs, batch.targets, batch.positions, bounds)))


def _send(array: np.ndarray[Any, Any], device: torch.device) -> Tensor:
    host = torch.from_numpy(array)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def compile_blocks(model: Decoder) -> None:
    """One compilation serves all layers: their code is the same and their weights are inputs."""
    for block in model.blocks:
        assert isinstance(block, nn.Module)
        block.compile(fullgraph=True, dynamic=False)


class CapturedStep(Generic[Result]):
    """A function of a batch that leaves gradients behind, replayed as one CUDA graph.

    Launching nano's forward and backward from Python takes 103 ms on one H200, computing them 38 (32,768 tokens).
    Every shape is fixed, so one graph serves all steps. Each call overwrites the results and the gradients of the last
    one: never clear the gradients.
    """

    def __init__(self, function: Callable[[DeviceBatch], Result], clear_gradients: Callable[[], None]) -> None:
        self.function, self.clear_gradients = function, clear_gradients
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, batch: DeviceBatch) -> Result:
        if self.graph is None:
            self._capture(batch)
        for fixed, fresh in zip(self.batch, batch, strict=True):
            fixed.copy_(fresh)
        assert self.graph is not None, "captured above"
        self.graph.replay()
        return self.result

    def _capture(self, batch: DeviceBatch) -> None:
        self.batch = DeviceBatch(*(tensor.clone() for tensor in batch))
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):  # compiles, and lets every library allocate its workspace
                self.function(self.batch)
                self.clear_gradients()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.result = self.function(self.batch)
