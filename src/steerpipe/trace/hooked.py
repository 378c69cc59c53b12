"""Traces with transformers: prompts in padded batches, answers one at a time."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from steerpipe.core.errors import ConfigError
from steerpipe.predict.records import States, TracedSequence
from steerpipe.runtime.generation import read_defaults
from steerpipe.trace.header import TraceOptions
from steerpipe.trace.live import TokenSequence, batch_rows, narrow_ids, read_geometry, trace_texts, windows
from steerpipe.trace.models import LoadedModel, load_model
from steerpipe.trace.tracing import EncodedPrompt, TracedModel, Windows, answer_seed
from steerpipe.trace.tracker import MoERouterTracker, Pass


class HookedTracer:
    """Any transformers MoE model, watched by MoERouterTracker."""

    def __init__(self, loaded: LoadedModel, batch_tokens: int | None = None) -> None:
        """`batch_tokens`: rows of one forward pass over prompts, padding included; None: what suits the device."""
        self.codec = loaded.codec
        self._loaded = loaded
        self._rows = batch_rows(loaded.model, batch_tokens)
        self.model = TracedModel(
            identity=loaded.identity,
            geometry=read_geometry(loaded.model),
            vocabulary=int(loaded.model.config.get_text_config().vocab_size),
            context=loaded.context,
            engine="transformers",
            generator=f"transformers {transformers.__version__}",
            dtype=str(loaded.model.dtype).removeprefix("torch."),
        )

    def check(self, options: TraceOptions) -> None:
        if options.batch > 1:
            raise ConfigError("answers in batches are not to be had from transformers", fix="use --engine steerpipe")
        if options.generate:
            self._sampling()
        MoERouterTracker(self._loaded.model, states=options.states).close()

    def trace(self, prompts: Sequence[EncodedPrompt], options: TraceOptions) -> Iterator[Windows]:
        if options.generate:
            return self._answers(prompts, options)
        return self._prompts(prompts, options)

    def _prompts(self, prompts: Sequence[EncodedPrompt], options: TraceOptions) -> Iterator[Windows]:
        """Chunks of prompts that fill one forward pass: one chunk is in flight."""
        chunk: list[EncodedPrompt] = []
        for prompt in prompts:
            chunk.append(prompt)
            if sum(len(each.tokens) for each in chunk) >= self._rows:
                yield from self._chunk(chunk, options)
                chunk = []
        yield from self._chunk(chunk, options)

    def _chunk(self, chunk: Sequence[EncodedPrompt], options: TraceOptions) -> Iterator[Windows]:
        sequences = [TokenSequence(each.id, each.tokens, len(each.tokens)) for each in chunk]
        numbered = [  # pieces of one prompt come back in any order
            TokenSequence(f"{place} {piece}", window.tokens, window.prompt_tokens)
            for place, sequence in enumerate(sequences)
            for piece, window in enumerate(windows([sequence], options.max_tokens))
        ]
        found: defaultdict[int, dict[int, TracedSequence]] = defaultdict(dict)
        traced = trace_texts(
            self._loaded.model, numbered, states=options.states, weights=options.weights, batch_tokens=self._rows
        )
        for each in traced:
            place, piece = map(int, each.prompt.split())
            found[place][piece] = each
        for place, pieces in sorted(found.items()):
            yield [replace(pieces[piece], prompt=chunk[place].id) for piece in sorted(pieces)]

    @torch.no_grad()
    def _answers(self, prompts: Sequence[EncodedPrompt], options: TraceOptions) -> Iterator[Windows]:
        model, sampling = self._loaded.model, self._sampling()
        generate: Any = model.generate
        for prompt in prompts:
            tokens = torch.tensor([prompt.tokens], device=model.device)
            with MoERouterTracker(model, states=options.states) as tracker, torch.random.fork_rng():
                torch.manual_seed(answer_seed(prompt.id, options.seed))
                out: Tensor = generate(
                    tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=options.generate, **sampling
                )
                passes = tracker.take()
            whole = _joined(passes)
            ids = out[0, :-1].cpu().numpy().astype(np.int32)  # the last one was sampled, but never computed
            assert len(ids) == len(whole.experts), "one row per token"
            weights = whole.weights.to(torch.float16).cpu().numpy() if options.weights else None
            experts = narrow_ids(whole.experts, self.model.geometry.experts)
            yield [TracedSequence(prompt.id, ids, len(prompt.tokens), experts, weights, whole.states)]

    def _sampling(self) -> dict[str, Any]:
        """The model's own defaults, in transformers' words."""
        defaults = read_defaults(self._loaded.folder, self.codec.eos_token_ids)
        settings = defaults.settings
        if settings.presence_penalty or settings.frequency_penalty:
            raise ConfigError(
                "the model's defaults ask for presence and frequency penalties, which transformers does not compute",
                fix="generate with --engine steerpipe",
            )
        ends = sorted(defaults.end_tokens)
        plain = {"repetition_penalty": settings.repetition_penalty, "eos_token_id": ends or None, "pad_token_id": 0}
        if not settings.temperature:
            return {**plain, "do_sample": False, "temperature": None, "top_k": None, "top_p": None, "min_p": None}
        chosen = {name: getattr(settings, name) for name in ("temperature", "top_k", "top_p", "min_p")}
        return {**plain, "do_sample": True, **chosen}


def _joined(passes: Sequence[Pass]) -> Pass:
    """Prefill and decode steps of one sequence, one after the other."""
    states = [each.states for each in passes if each.states is not None]
    shared = [each.shared for each in states if each.shared is not None]
    together = None
    if states:
        together = States(
            torch.cat([each.entering for each in states]),
            torch.cat([each.residual for each in states]),
            torch.cat(shared) if shared else None,
        )
    experts = torch.cat([each.experts for each in passes])
    return Pass(experts, torch.cat([each.weights for each in passes]), together)


def open_hooked(
    model: str | None, device: str | None, dtype: str | None, threads: int | None, batch_tokens: int | None
) -> HookedTracer:
    """Settings as the engine takes them; None or "auto": CUDA where there is one, float32. None is the embedded model.

    float32 holds the weights of every pack exactly, and rounds the least between batches of different shapes.
    """
    chosen = device if device not in (None, "auto") else "cuda" if torch.cuda.is_available() else "cpu"
    if chosen not in ("cpu", "cuda") or dtype not in (None, "auto", "float32", "bfloat16"):
        raise ConfigError(f"device {device}, dtype {dtype}", fix="devices are auto, cpu, cuda; auto, float32, bfloat16")
    if threads is not None:
        torch.set_num_threads(threads)
    settled = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    return HookedTracer(load_model(model, chosen, settled), batch_tokens)
