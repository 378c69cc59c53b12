"""What predictors learn from: token sequences as a model routes them, packed on the model's device.

N tokens, L layers, k routed experts, H hidden.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from steerpipe.core.errors import ConfigError, InputError
from steerpipe.predict.records import Geometry, PackedTrace, States
from steerpipe.predict.routers import Routers
from steerpipe.predict.seen import Prompted, prompt_digests
from steerpipe.trace.live import TokenSequence, read_geometry, trace_texts, windows
from steerpipe.train.progress import Progress, silent


@dataclass(frozen=True, slots=True)
class Material:
    """Training prompts alone: what predictors are tested on must not be here."""

    trace: PackedTrace
    prompts: int
    vocab: int
    routers: Routers | None = None  # of the model; the kinds that look at hidden states need them
    model: PreTrainedModel | None = None  # for default vectors
    seen: frozenset[str] | None = None  # digests of the prompts: see `seen_in`; a part of the material keeps them all
    digest: str | None = None  # of the model, as a trace's header has it

    def needed_routers(self, kind: str) -> Routers:
        if self.routers is None or self.trace.states is None:
            lacks = (
                "hidden states, which" if self.trace.states is None else "the model's routers, which, unlike states,"
            )
            raise InputError(
                f"a predictor of kind {kind} learns from {lacks} this trace does not have",
                fix="give a model and prompts instead of a trace: --model MODEL --prompts FILE",
            )
        return self.routers

    def needed_model(self, kind: str) -> PreTrainedModel:
        if self.model is None:
            raise InputError(
                f"a predictor of kind {kind} needs the model's experts", fix="give --model MODEL --prompts FILE"
            )
        return self.model

    def first(self, share: float) -> "Material":
        """The first share of the sequences: material of a learning curve."""
        if not 0 < share <= 1:
            raise ConfigError(f"a share of {share}", fix="give a share above 0, up to 1")
        sequences = int(self.trace.sequence[-1]) + 1
        kept = max(1, round(sequences * share))
        rows = int((self.trace.sequence < kept).sum())
        return replace(self, trace=first_rows(self.trace, rows), prompts=max(1, round(self.prompts * share)))


def seen_in(sequences: Iterable[Prompted]) -> frozenset[str]:
    """Digests of the whole prompts, whatever windows they were traced in."""
    return frozenset(prompt_digests(sequences).values())


def first_rows(trace: PackedTrace, rows: int) -> PackedTrace:
    """Views."""
    states = trace.states
    if states is not None:
        shared = None if states.shared is None else states.shared[:rows]
        states = States(states.entering[:rows], states.residual[:rows], shared)
    weights = None if trace.weights is None else trace.weights[:rows]
    return PackedTrace(
        trace.geometry, trace.tokens[:rows], trace.sequence[:rows], trace.place[:rows], trace.experts[:rows], weights,
        states,
    )  # fmt: skip


def collect(
    model: PreTrainedModel,
    sequences: Sequence[TokenSequence],
    *,
    max_tokens: int | None = None,
    batch_tokens: int | None = None,
    openings: Mapping[str, int] | None = None,
    states: bool = True,
    progress: Progress = silent,
) -> PackedTrace:
    """Traces in the order given, into memory taken once: with hidden states 28 KB per token of nano.

    `openings`: so many first tokens of a prompt's every piece are traced and dropped, because other prompts share them.
    """
    pieces = list(windows(sequences, max_tokens))
    dropped = [min((openings or {}).get(piece.prompt, 0), len(piece.tokens) - 1) for piece in pieces]
    lengths = torch.tensor([len(piece.tokens) - less for piece, less in zip(pieces, dropped, strict=True)])
    ends = lengths.cumsum(0)
    total = int(ends[-1])
    order = sorted(range(len(pieces)), key=lambda number: -len(pieces[number].tokens))  # as trace_texts gives them
    space = _Space(read_geometry(model), total, model.device)
    traced = trace_texts(model, pieces, states=states, weights=True, batch_tokens=batch_tokens)
    done = 0
    for number, sequence in zip(order, traced, strict=True):
        assert sequence.weights is not None, "they were asked for"
        end = int(ends[number])
        start = end - int(lengths[number])
        experts = torch.from_numpy(sequence.experts.astype("int16"))
        space.fill(start, end, sequence.states, experts, torch.from_numpy(sequence.weights))
        done += end - start
        progress("tracing", done, total)
    return space.packed([piece.tokens[less:] for piece, less in zip(pieces, dropped, strict=True)], lengths)


class _Space:
    def __init__(self, geometry: Geometry, rows: int, device: torch.device) -> None:
        self._geometry = geometry
        routed = (rows, geometry.layers, geometry.top_k)
        self._experts = torch.empty(routed, dtype=torch.int16, device=device)
        self._weights = torch.empty(routed, dtype=torch.float16, device=device)
        self._states: dict[str, Tensor] = {}
        self._shape = (rows, geometry.layers, geometry.hidden)

    def fill(self, start: int, end: int, states: States | None, experts: Tensor, weights: Tensor) -> None:
        """The last end - start rows of each."""
        rows = end - start
        self._experts[start:end] = experts[-rows:].to(self._experts.device)
        self._weights[start:end] = weights[-rows:].to(self._weights.device)
        for name in ("entering", "residual", "shared"):
            state: Tensor | None = getattr(states, name, None)
            if state is not None:
                if name not in self._states:
                    self._states[name] = torch.empty(self._shape, dtype=state.dtype, device=state.device)
                self._states[name][start:end] = state[-rows:]

    def packed(self, pieces: Sequence[Sequence[int]], lengths: Tensor) -> PackedTrace:
        device = self._experts.device
        tokens = torch.cat([torch.tensor(piece, dtype=torch.int64) for piece in pieces])
        place = torch.cat([torch.arange(int(length)) for length in lengths])
        return PackedTrace(
            self._geometry,
            tokens.to(device),
            torch.arange(len(pieces)).repeat_interleave(lengths).to(device),
            place.to(device),
            self._experts,
            self._weights,
            States(self._states["entering"], self._states["residual"], self._states.get("shared"))
            if self._states
            else None,
        )
