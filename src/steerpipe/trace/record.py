"""One prompt as bytes: sections that are compressed by themselves, so that ids are read without the states.

Expert ids lie layer after layer, [L, T, k]: 68.1 bytes per token of nano with zlib, 69.4 as [T, L, k], 72 as bits.
T tokens, L MoE layers, k routed experts, H hidden.
"""

import hashlib
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from steerpipe.core.errors import DamagedFileError
from steerpipe.predict.records import States, TracedSequence
from steerpipe.trace.header import TraceHeader

TOKENS, EXPERTS, WEIGHTS = "tokens", "experts", "weights"
STATES = ("entering", "residual", "shared")
_AGAIN = "delete the folder and trace the prompts again"


def needed_sections(header: TraceHeader) -> frozenset[str]:
    """What every record of such a trace has; a shared expert's output comes on top where the model has one."""
    options = header.options
    kept = {WEIGHTS: options.weights, "entering": options.states, "residual": options.states}
    return frozenset({TOKENS, EXPERTS, *(name for name, asked in kept.items() if asked)})


def expert_dtype(header: TraceHeader) -> np.dtype[Any]:
    return np.dtype("u1" if header.geometry.experts <= 256 else "<u2")


def token_dtype(header: TraceHeader) -> np.dtype[Any]:
    return np.dtype("<u2" if header.vocabulary <= 1 << 16 else "<u4")


def tokens_digest(windows: Sequence[NDArray[Any]]) -> str:
    """SHA-256 of the ids as little-endian 32-bit numbers: equal texts are found across traces."""
    return hashlib.sha256(np.concatenate(windows).astype("<u4").tobytes()).hexdigest()


def encode(sequences: Sequence[TracedSequence], header: TraceHeader) -> dict[str, bytes]:
    """The sections of one prompt's windows, one after the other. Asserts that they are what the header says."""
    geometry = header.geometry
    tokens = np.concatenate([each.tokens for each in sequences])
    experts = np.concatenate([each.experts for each in sequences])
    assert experts.shape == (len(tokens), geometry.layers, geometry.top_k), "ids have another shape than the header's"
    assert int(experts.max()) < geometry.experts, "an id beyond the experts of a layer"
    arrays: dict[str, NDArray[Any]] = {
        TOKENS: tokens.astype(token_dtype(header)),
        EXPERTS: experts.astype(expert_dtype(header)).transpose(1, 0, 2),
    }
    if header.options.weights:
        weights = [each.weights for each in sequences if each.weights is not None]
        arrays[WEIGHTS] = np.concatenate(weights).astype("<f2").transpose(1, 0, 2)
    if header.options.states:
        states = [each.states for each in sequences if each.states is not None]
        names = STATES if all(each.shared is not None for each in states) else STATES[:2]
        arrays |= {name: _state_bits([getattr(each, name) for each in states]) for name in names}
    level = {name: 0 if name in STATES else 6 for name in arrays}  # states are noise to zlib, and 27 KB per token
    return {name: zlib.compress(np.ascontiguousarray(array).tobytes(), level[name]) for name, array in arrays.items()}


def decode(
    sections: Mapping[str, bytes], header: TraceHeader, prompt: str, lengths: Sequence[int], prompt_tokens: int
) -> list[TracedSequence]:
    """One sequence per window. Sections that are not given are left out. DamagedFileError: not what they should be."""
    geometry, rows = header.geometry, sum(lengths)
    ranked = (geometry.layers, rows, geometry.top_k)
    tokens = _array(sections, TOKENS, token_dtype(header), (rows,))
    experts = _array(sections, EXPERTS, expert_dtype(header), ranked).transpose(1, 0, 2)
    if int(experts.max()) >= geometry.experts:
        raise DamagedFileError(f"prompt {prompt} is routed to expert {int(experts.max())}", fix=_AGAIN)
    if int(tokens.max()) >= header.vocabulary:
        raise DamagedFileError(
            f"prompt {prompt} has token {int(tokens.max())} of a vocabulary of {header.vocabulary}", fix=_AGAIN
        )
    tokens = tokens.astype(np.int32)
    weights = None
    if WEIGHTS in sections:
        weights = _array(sections, WEIGHTS, np.dtype("<f2"), ranked).transpose(1, 0, 2).astype(np.float16)
    wide = (rows, geometry.layers, geometry.hidden)
    states = [_state(_array(sections, name, np.dtype("<i2"), wide)) for name in STATES if name in sections]
    found, start = [], 0
    for length in lengths:
        own = slice(start, start + length)
        found.append(
            TracedSequence(
                prompt, tokens[own], min(max(prompt_tokens - start, 0), length), np.ascontiguousarray(experts[own]),
                None if weights is None else np.ascontiguousarray(weights[own]),
                _window([each[own] for each in states]),
            )
        )  # fmt: skip
        start += length
    return found


def _state_bits(states: Sequence[Tensor]) -> NDArray[np.int16]:
    """As bfloat16, which numpy does not know."""
    together = torch.cat([each.to("cpu", torch.bfloat16) for each in states])
    bits: NDArray[np.int16] = together.view(torch.int16).numpy()
    return bits.astype("<i2", copy=False)


def _state(bits: NDArray[Any]) -> Tensor:
    return torch.from_numpy(bits.astype(np.int16)).view(torch.bfloat16)


def _window(states: Sequence[Tensor]) -> States | None:
    if not states:
        return None
    return States(states[0], states[1], states[2] if len(states) > 2 else None)


def _array(sections: Mapping[str, bytes], name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """Unpacks no more bytes than the shape asks for, whatever the stream would give."""
    size = math.prod(shape) * dtype.itemsize
    try:
        content = zlib.decompressobj().decompress(sections[name], size + 1)
        return np.frombuffer(content, dtype=dtype).reshape(shape)
    except (zlib.error, ValueError) as problem:
        raise DamagedFileError(f"a section '{name}' of the trace cannot be read: {problem}", fix=_AGAIN) from None
