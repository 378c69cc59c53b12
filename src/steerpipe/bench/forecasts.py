"""Routing and forecasts that were recorded together, for benchmarks at full shape: what was routed, and what each
predictor had said of it. One safetensors file:

routing              [T, L, k]        as `transfer.trace_file` reads it, with `sequence` [T]
NAME.ranked          [h, T, L, m]     experts of (token, layer), as NAME named them 1 to h layers before, by likelihood
NAME.probability     [h, T, L, m]     of each; 0: nothing was said
reuse.scores         [T, P, L * E]    how soon experts are used again, as said at the layers reuse.taps [P]

Pure numbers: which predictor they came from does not matter here.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save

from steerpipe.arena.foresight import Foresight, ReuseForesight
from steerpipe.core.errors import InputError
from steerpipe.core.whole_file import write_whole
from steerpipe.model.safetensors import read_header, read_tensor
from steerpipe.store.policies import HALF_LIFE_TOKENS
from steerpipe.transfer.forecasts import RecallPredictor
from steerpipe.transfer.recorded import Recording
from steerpipe.transfer.trace_file import read_recording

NAMED = 8  # experts of a layer that are named
_FIX = "record it with benchmarks/record_forecasts.py"


@dataclass(frozen=True, slots=True)
class ForecastFile:
    """A recording with what was forecast of it."""

    recording: Recording
    said: Mapping[str, Foresight]
    reuse: ReuseForesight | None

    def foresight(self, name: str, horizon: int) -> Foresight:
        """What NAME said up to `horizon` layers ahead, or what `made_up` says."""
        if name not in self.said:
            return made_up(name, self.recording, horizon, tuple(self.said))
        found = self.said[name]
        return Foresight(found.ranked[:horizon], found.probability[:horizon])


def made_up(name: str, recording: Recording, horizon: int, known: Sequence[str] = (), seed: int = 0) -> Foresight:
    """Forecasts of known quality that are sure of themselves: perfect, wrong, by chance, or of a recall ("recall 0.6").

    `known`: what else there is, for who asks for something that there is not.
    """
    shape = (horizon, *recording.routing.shape)
    if name == "perfect":
        said = np.broadcast_to(recording.routing, shape)
    elif name == "chance":
        every = np.broadcast_to(np.arange(recording.experts), (*shape[:3], recording.experts))
        said = np.random.default_rng(seed).permuted(every, axis=-1)[..., : recording.top_k]
    elif name == "wrong" or re.fullmatch(r"recall \d?\.\d+", name):
        recall = 0.0 if name == "wrong" else float(name.split()[1])
        spoilt = RecallPredictor(recording.routing, recording.experts, [recall] * horizon, seed)
        layers, tokens = range(recording.layers), range(recording.tokens)
        said = np.array(
            [[[spoilt.predict(t, layer, ahead) for layer in layers] for t in tokens] for ahead in range(1, horizon + 1)]
        )
    else:
        raise InputError(
            f"{recording.name} has no forecasts of {name!r}",
            fix=f"choose one of {', '.join((*known, 'perfect', 'wrong', 'chance', 'recall 0.8'))}, or {_FIX}",
        )
    return Foresight(said.astype(np.int16), np.ones(said.shape, dtype=np.float32))


def write_forecasts(file: Path, found: ForecastFile) -> None:
    """Whole or not at all; makes the folder."""
    tensors = {
        "routing": torch.from_numpy(found.recording.routing.astype(np.uint8)),
        "sequence": torch.from_numpy(found.recording.sequence.astype(np.int32)),
    }
    for name, said in found.said.items():
        tensors[f"{name}.ranked"] = torch.from_numpy(said.ranked.astype(np.uint8))
        tensors[f"{name}.probability"] = torch.from_numpy(said.probability.astype(np.float16))
    if found.reuse is not None:
        taps = sorted({layer for _, layer in found.reuse.scores})
        scores = [[found.reuse.scores[token, tap] for tap in taps] for token in range(found.recording.tokens)]
        tensors["reuse.taps"] = torch.tensor(taps)
        tensors["reuse.scores"] = torch.from_numpy(np.array(scores, dtype=np.float16))
        tensors["reuse.half_life"] = torch.tensor([found.reuse.half_life_tokens])
    write_whole(file, save({name: tensor.contiguous() for name, tensor in tensors.items()}))


def read_forecasts(file: Path, experts: int) -> ForecastFile:
    """InputError: not a recording of routing. One without forecasts has none."""
    recording = read_recording(file, experts)
    header = read_header(file)
    arrays = {name: read_tensor(entry).numpy() for name, entry in header.items() if "." in name}
    said = {}
    for name in sorted({key.rpartition(".")[0] for key in arrays} - {"reuse"}):
        ranked, probability = arrays.get(f"{name}.ranked"), arrays.get(f"{name}.probability")
        shape = recording.routing.shape[:2]
        if ranked is None or probability is None or ranked.shape[1:3] != shape or ranked.shape != probability.shape:
            raise InputError(f"forecasts of {name!r} in {file} do not fit its routing", fix=_FIX)
        said[name] = Foresight(ranked.astype(np.int16), probability.astype(np.float32))
    return ForecastFile(recording, said, _reuse(arrays, recording, file))


def _reuse(arrays: Mapping[str, NDArray[Any]], recording: Recording, file: Path) -> ReuseForesight | None:
    scores, taps = arrays.get("reuse.scores"), arrays.get("reuse.taps")
    if scores is None or taps is None:
        return None
    if scores.shape != (recording.tokens, len(taps), recording.all_experts):
        raise InputError(f"the reuse scores in {file} do not fit its routing", fix=_FIX)
    half_life = float(arrays.get("reuse.half_life", np.array([HALF_LIFE_TOKENS]))[0])
    found = {
        (token, int(tap)): scores[token, number].astype(np.float32)
        for token in range(recording.tokens)
        for number, tap in enumerate(taps)
    }
    return ReuseForesight(found, half_life)
