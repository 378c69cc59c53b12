"""Reads a recorded run: safetensors with `routing` [tokens, MoE layers, top_k] and perhaps `sequence` [tokens]."""

from pathlib import Path

import numpy as np

from steerpipe.core.errors import InputError
from steerpipe.model.safetensors import read_header, read_tensor
from steerpipe.transfer.recorded import FIX, Recording


def read_recording(file: Path, experts: int | None = None, tokens: int | None = None) -> Recording:
    """The first `tokens` tokens of a trace. `experts` per layer; None: as many as the trace routes to."""
    if not file.is_file():
        raise InputError(f"{file} does not exist", fix=FIX)
    header = read_header(file)
    entry, boundaries = header.get("routing"), header.get("sequence")
    if entry is None or entry.dtype.is_floating_point:
        raise InputError(f"{file} has no integer tensor 'routing'", fix=FIX)
    routing = np.asarray(read_tensor(entry).numpy(), dtype=np.int64)[:tokens]
    if boundaries is None:
        sequence = np.zeros(len(routing), dtype=np.int32)
    else:
        sequence = np.asarray(read_tensor(boundaries).numpy(), dtype=np.int32)[:tokens]
    known = experts if experts is not None else int(routing.max(initial=0)) + 1
    return Recording(str(file), routing, sequence, known)
