"""Where the stages are joined: a model folder becomes an engine that answers.

from steerpipe import Pipeline

with Pipeline("path/to/model") as pipe:
    print(pipe.generate("Once upon a time").text)
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import torch

from steerpipe.core.config import EngineConfig, load_config
from steerpipe.core.errors import ConfigError, RequestError
from steerpipe.core.events import Completion, SequenceFailed, TokenEvent
from steerpipe.core.protocols import RoutingSink
from steerpipe.core.resolve import ResolvedConfig, resolve
from steerpipe.core.sampling import SamplingSettings
from steerpipe.engine.engine import Engine
from steerpipe.engine.request import Request
from steerpipe.engine.tokenizer import ChatMessage, TextCodec
from steerpipe.model.decoder import Decoder
from steerpipe.model.kv_cache import BLOCK, KvPool
from steerpipe.model.weights import build_weights
from steerpipe.runtime.facts import gather_facts
from steerpipe.runtime.generation import GenerationDefaults, read_defaults
from steerpipe.runtime.models import open_model
from steerpipe.store.resident import ResidentExperts

Prompt = str | Sequence[int] | Sequence[ChatMessage]
Progress = Callable[[int, int], None]


class Pipeline:
    """A loaded model. Not thread-safe; `close` (or the end of a `with`) gives its memory back.

    A prompt is text, a list of ChatMessage, or token ids. Text goes through the chat template as one user turn where
    the model has a template; `raw=True` continues it as it is. Sampling keywords are those of SamplingSettings; what
    is not given comes from the model's generation_config.json.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        config: EngineConfig | None = None,
        sink: RoutingSink | None = None,
        progress: Progress | None = None,
        **settings: Any,
    ) -> None:
        """`settings` are EngineConfig fields (dtype="float32", threads=2 …); they stand in for a `config`."""
        if config is not None and settings:
            raise ConfigError(f"both a config and {sorted(settings)} are given", fix="put all settings into the config")
        config = config or load_config(settings)
        source = open_model(model)
        self.folder = source.folder
        self.spec = source.spec
        self.codec = TextCodec.load(source.folder)
        self.config: ResolvedConfig = resolve(config, gather_facts(source.spec))
        self.defaults: GenerationDefaults = read_defaults(source.folder, self.codec.eos_token_ids)
        torch.set_num_threads(self.config.threads)
        device, dtype = torch.device(self.config.device), getattr(torch, self.config.dtype)
        weights = build_weights(source.spec, source.family.names, source.read_dense(), dtype, device)
        experts = ResidentExperts.load(source, dtype, device, progress)
        pool = KvPool(source.spec, dtype, device, capacity_blocks=0)
        pool.capacity_blocks = max(1, self.config.kv_memory_bytes // pool.block_bytes)
        self._engine = Engine(
            Decoder(source.spec, weights, device), experts, pool, self.codec,
            end_tokens=self.defaults.end_tokens,
            max_context=min(self.config.max_context, pool.capacity_blocks * BLOCK),
            max_batch=self.config.max_batch,
            prefill_chunk=self.config.prefill_chunk,
            sink=sink,
        )  # fmt: skip

    def generate(self, prompt: Prompt, *, raw: bool = False, **sampling: Any) -> Completion:
        """One answer, complete."""
        return self.generate_batch([prompt], raw=raw, batched=False, **sampling)[0]

    def generate_batch(
        self, prompts: Sequence[Prompt], *, raw: bool = False, batched: bool = True, **sampling: Any
    ) -> list[Completion]:
        """All answers, computed together, in the order of the prompts. An error in one of them is raised."""
        settings = self.settings(**sampling)
        requests = [Request(self.encode(prompt, raw=raw), settings, batched) for prompt in prompts]
        ids = [self._engine.submit(request) for request in requests]
        try:
            while not self._engine.idle:
                for event in self._engine.step():
                    if isinstance(event, SequenceFailed):
                        raise event.error
            return [self._engine.take_completion(i) for i in ids]
        finally:
            for sequence_id in ids:
                self._engine.cancel(sequence_id)

    def stream(self, prompt: Prompt, *, raw: bool = False, **sampling: Any) -> "Answer":
        """An answer that comes token by token: iterate over it for TokenEvents; `.completion` afterwards."""
        return Answer(self._engine, Request(self.encode(prompt, raw=raw), self.settings(**sampling)))

    def encode(self, prompt: Prompt, *, raw: bool = False) -> tuple[int, ...]:
        """The token ids that the model will see for a prompt."""
        if isinstance(prompt, str):
            if raw or not self.codec.has_chat_template:
                return tuple(self.codec.encode(prompt, add_special=True))
            return tuple(self.codec.apply_chat([ChatMessage("user", prompt)]))
        if all(isinstance(turn, ChatMessage) for turn in prompt):
            return tuple(self.codec.apply_chat([turn for turn in prompt if isinstance(turn, ChatMessage)]))
        ids = [i for i in prompt if isinstance(i, int)]
        if len(ids) != len(prompt):
            raise RequestError("the prompt mixes kinds", fix="give text, token ids, or chat messages")
        return tuple(ids)

    def settings(self, **sampling: Any) -> SamplingSettings:
        """The model's sampling defaults with the given values put in their place."""
        return self.defaults.settings.override(**sampling)

    def close(self) -> None:
        self._engine.check_integrity()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Answer:
    """Iterates over one request's TokenEvents. Leaving the loop early cancels the request."""

    def __init__(self, engine: Engine, request: Request) -> None:
        self._engine = engine
        self._id = engine.submit(request)
        self._completion: Completion | None = None

    def __iter__(self) -> Iterator[TokenEvent]:
        try:
            while self._engine.runs(self._id):
                for event in self._engine.step():
                    if event.sequence != self._id:
                        continue
                    if isinstance(event, SequenceFailed):
                        raise event.error
                    yield event
        finally:
            self._engine.cancel(self._id)

    @property
    def completion(self) -> Completion:
        """The whole answer; runs it to its end if nobody has iterated over it."""
        if self._completion is None:
            for _ in self:
                pass
            self._completion = self._engine.take_completion(self._id)
        return self._completion
