"""One run of `bench decode`: what was asked for, on what, what was found so far, and who is told."""

from collections.abc import Callable

import torch

from steerpipe.bench.options import DecodeOptions
from steerpipe.bench.results import Findings, Run
from steerpipe.core.errors import ConfigError

Say = Callable[[str], None]
Keep = Callable[[Findings], None]


class Session:
    """`say` is told of floors and figures as they are known; `keep` gets the findings whenever they have grown."""

    def __init__(self, options: DecodeOptions, say: Say, keep: Keep, kernels: bool | None) -> None:
        """`kernels`: compute with the GPU's kernels; None: on a GPU only."""
        self.options, self.say = options, say
        self.device = _device(options)
        self.kernels = self.device.type == "cuda" if kernels is None else kernels
        self.routing = options.routing
        if self.routing == "auto":
            self.routing = "generator" if self.kernels else "model"
        if not self.kernels and (self.routing != "model" or set(options.residencies) != {100.0}):
            raise ConfigError(
                "on a CPU only residency 100 with the model's own routing is measured",
                fix="leave --residency and --routing out, or run on a machine with a CUDA device",
            )
        if options.predict != "none" and self.device.type != "cuda":
            raise ConfigError(
                "forecasts are measured in captured graphs, which need a CUDA device",
                fix="leave --predict out, or run on a machine with one",
            )
        auto = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.dtype: torch.dtype = auto if options.dtype == "auto" else getattr(torch, options.dtype)
        self.findings = Findings(options, self.device.type)
        self._keep = keep

    @property
    def memory_rate(self) -> float:
        return self.findings.memory_rate

    def add(self, run: Run) -> None:
        self.findings.runs.append(run)
        forecasts = "" if run.predictor == "none" else f", forecasts of {run.predictor}"
        self.say(
            f"{run.format} {run.residency:g} % {run.test}, batch {run.batch}{forecasts}: floor {run.floor_ms:.3g} ms "
            f"({run.floor}), median {run.times.median_ms:.3f}, p95 {run.times.p95_ms:.3f}, {run.ratio:.2f} × floor"
        )
        self._keep(self.findings)

    def note(self, text: str) -> None:
        self.findings.notes.append(text)
        self.say(text)

    def finish(self) -> Findings:
        self.findings.complete = True
        self._keep(self.findings)
        return self.findings


def _device(options: DecodeOptions) -> torch.device:
    there = torch.cuda.is_available()
    if options.device == "cuda" and not there:
        raise ConfigError(
            "device is cuda, but torch sees no CUDA device",
            fix="leave --device out, or let `steerpipe doctor` say what torch lacks",
        )
    return torch.device("cuda" if there and options.device != "cpu" else "cpu")
