"""When the parts of a captured step ran, by the device's own clock: one small kernel at the beginning of each."""

import torch
from torch import Tensor

from steerpipe.kernels.clock import write_time

MOST = 512  # parts of a step


class Clock:
    """Marks of one step in the order of the stream; a part lasts from its mark to the next one."""

    def __init__(self, device: torch.device) -> None:
        self._times: Tensor = torch.zeros(MOST, dtype=torch.int64, device=device)
        self._names: list[str] = []

    def begin(self) -> None:
        """A step is queued, or captured, anew."""
        self._names.clear()

    def mark(self, name: str) -> None:
        """What is queued from now on is called `name`; "" where nothing of interest follows."""
        assert len(self._names) < MOST, f"more than {MOST} parts of a step"
        write_time(self._times, len(self._names))
        self._names.append(name)

    def parts(self) -> list[tuple[str, float, float]]:
        """(name, begin, end) in seconds on the GPU's global timer, of the step that ran last. Waits for the device."""
        times = self._times[: len(self._names)].cpu().tolist()
        spans = zip(self._names, times, times[1:], strict=False)
        return [(name, begin / 1e9, end / 1e9) for name, begin, end in spans if name]

    def now(self) -> float:
        """The same clock, when all that is queued on the current stream has run. Waits for the device."""
        write_time(self._times, MOST - 1)
        return float(self._times[MOST - 1].item()) / 1e9
