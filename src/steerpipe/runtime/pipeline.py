"""Where the stages are joined: a model folder becomes an engine that answers.

from steerpipe import Pipeline

with Pipeline("path/to/model") as pipe:
    print(pipe.generate("Once upon a time").text)
"""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, TypeVar

import torch

from steerpipe.core.blocks import BlockSource
from steerpipe.core.config import EngineConfig, cache_folder, load_config
from steerpipe.core.errors import ConfigError, RequestError
from steerpipe.core.events import Completion
from steerpipe.core.pages import PageCounts
from steerpipe.core.protocols import ExpertSource, ForwardTap, RoutingSink
from steerpipe.core.resolve import Facts, ResolvedConfig, resolve
from steerpipe.core.sampling import SamplingSettings
from steerpipe.core.timeline import Timeline
from steerpipe.engine.engine import Engine
from steerpipe.engine.request import Request
from steerpipe.engine.tokenizer import TextCodec
from steerpipe.model.checkpoint import read_folder_spec
from steerpipe.model.decoder import Decoder, StepDecoder
from steerpipe.model.kv_cache import KvPool
from steerpipe.model.weights import ModelWeights, build_weights
from steerpipe.predict.openings import OpeningTable
from steerpipe.predict.reuse import ReuseForecast
from steerpipe.runtime.answer import Answer, AnswerDesk
from steerpipe.runtime.cover import CoverDesk, check_cover, open_cover
from steerpipe.runtime.draft_forecast import DraftForecast, Foreseen, draft_forecast
from steerpipe.runtime.draft_foresight import foresight_of
from steerpipe.runtime.draft_routing import DraftRouting
from steerpipe.runtime.drafts import Drafts, DraftWork
from steerpipe.runtime.experts import Ladder, Opened, expert_facts, open_blocks, open_experts, open_kv, settle_budget
from steerpipe.runtime.facts import gather_facts
from steerpipe.runtime.generation import GenerationDefaults, read_defaults
from steerpipe.runtime.learning import Learning
from steerpipe.runtime.memory import memory_rows
from steerpipe.runtime.models import find_model, open_model
from steerpipe.runtime.prediction import Prediction, predict_on_ladder, reuse_for, settle_policy
from steerpipe.runtime.profiles import ProfileKeeper, open_profile
from steerpipe.runtime.prompts import Prompt, encode_prompt, is_chat
from steerpipe.runtime.quality import Chosen, Quality, choose, identity_of, open_quality
from steerpipe.runtime.taps import Taps
from steerpipe.runtime.timeline_gpu import record_on_gpu, timed_copier
from steerpipe.runtime.timeline_tap import TimelineTap
from steerpipe.transfer.counters import LadderCounters
from steerpipe.transfer.source import LadderSource

Progress = Callable[[int, int], None]
Experts = TypeVar("Experts", ExpertSource, BlockSource)


@dataclass(frozen=True, slots=True)
class _Working:
    """What an open pipeline holds and a closed one does not."""

    desk: AnswerDesk
    experts: ExpertSource | BlockSource
    ladder: Ladder | None


class Pipeline:
    """A loaded model. Not thread-safe; `close` (or the end of a `with`) gives its memory back.

    A prompt is text, token ids, or a list of chat messages (ChatMessage, or {"role": …, "content": …}). Text goes
    through the chat template as one user turn where the model has one; `raw=True` continues it as it is. Sampling
    keywords are those of SamplingSettings; what is not given comes from the model's generation_config.json.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        config: EngineConfig | None = None,
        sink: RoutingSink | None = None,
        progress: Progress | None = None,
        timeline: Timeline | None = None,
        **settings: Any,
    ) -> None:
        """`settings` are EngineConfig fields (dtype="float32", threads=2 …); they stand in for a `config`.

        `timeline` notes what a pipeline over a ladder computes, moves and waits for.
        """
        if config is not None and settings:
            raise ConfigError(f"both a config and {sorted(settings)} are given", fix="put all settings into the config")
        config = config or load_config(settings)
        self.folder = find_model(model)
        _, self.spec = read_folder_spec(self.folder)  # what is cheap to check is checked before the weights are touched
        self.codec = TextCodec.load(self.folder)
        self.defaults: GenerationDefaults = read_defaults(self.folder, self.codec.eos_token_ids)
        facts = gather_facts(self.spec, self.folder)
        self.config: ResolvedConfig = resolve(config, facts)
        self._pack = open_model(self.folder, cache_folder(config), progress)
        self._budget(config, facts)
        self.prediction: Prediction | None = None
        self.quality: Quality | None = None  # None: every answer is exact
        self.cover: CoverDesk | None = None  # None: every token waits for its experts
        self._drafting: DraftForecast | None = None
        self._profile: ProfileKeeper | None = None
        self._parts: _Working | None = self._build(config, sink, progress, timeline)

    def _budget(self, config: EngineConfig, facts: Facts) -> None:
        """Settles how many experts lie where, before any of them is loaded."""
        experts = expert_facts(self._pack, getattr(torch, self.config.dtype), self.config.device)
        self.budget = settle_budget(config, self.config, facts, experts)
        self.memory = memory_rows(self.config, facts, self.budget, experts)

    def _build(
        self, config: EngineConfig, sink: RoutingSink | None, progress: Progress | None, timeline: Timeline | None
    ) -> _Working:
        torch.set_num_threads(self.config.threads)
        device, dtype = torch.device(self.config.device), getattr(torch, self.config.dtype)
        identity = identity_of(self._pack)
        form = self._pack.manifest.expert_format.value
        chosen = choose(config, self.spec, self.folder, identity, form=form)
        check_cover(config, self.spec, device=device.type)
        weights = build_weights(self.spec, self._pack.family.names, self._pack.dense(dtype), dtype, device)
        if not self.budget.resident:
            self._profile = open_profile(config, self.config, self._pack, cache_folder(config))
        if device.type == "cuda":
            return self._build_cuda(config, chosen, weights, sink, progress, timeline)
        forecast = self._reuse(config)
        policy = settle_policy(config.policy, forecast)
        experts = open_experts(self._pack, self.budget, policy, dtype, device, progress)
        if isinstance(experts.source, LadderSource):
            self.quality = open_quality(chosen, config, self.spec, weights, self.folder, experts.source)
            self.cover = open_cover(config, self.spec, weights, self.folder, experts.source, identity)
        pool = open_kv(self.spec, self.config, dtype, device, experts.ladder)
        desk = self.cover if self.quality is None else self.quality.desk
        lossy = desk is not None  # what stands in for an expert teaches nothing
        learning = None if self._profile is None or lossy else self._profile.learn(weights)
        tap = self._tap(experts.source, weights, forecast, config, timeline, learning)
        outputs = None if learning is None else learning.defaults
        return self._join(Decoder(self.spec, weights, device, tap, desk, outputs), experts, pool, config, sink)

    def _build_cuda(
        self, config: EngineConfig, chosen: Chosen | None, weights: ModelWeights, sink: RoutingSink | None,
        progress: Progress | None, timeline: Timeline | None,
    ) -> _Working:  # fmt: skip
        from steerpipe.model.gpu.decoder import GpuDecoder  # Triton: only where there is a GPU
        from steerpipe.runtime.prediction_gpu import predict_on_gpu
        from steerpipe.runtime.reuse_gpu import ListeningReuse, attach_reuse, policy_on_gpu

        device, dtype = weights.embed.device, weights.embed.dtype
        forecast = self._reuse(config)
        policy = policy_on_gpu(config.policy, forecast)
        copier = None if timeline is None else timed_copier(device)
        blocks = open_blocks(self._pack, self.budget, policy, device, progress, lossy=chosen is not None, copier=copier)
        watching: list[DraftRouting] = []
        if blocks.ladder is not None and not self.budget.resident:
            self.quality = open_quality(chosen, config, self.spec, weights, self.folder, blocks.ladder)
            watching = self._foresee(blocks.ladder)
        pool = open_kv(self.spec, self.config, dtype, device, blocks.ladder)
        desk, taps = (None, ()) if self.quality is None else (self.quality.desk, self.quality.taps)
        decoder = GpuDecoder(
            self.spec, weights, pool, device, max_batch=self.config.max_batch, tap=Taps(*taps, *watching), misses=desk
        )  # fmt: skip
        if blocks.ladder is None or self.budget.resident:
            return self._join(decoder, blocks, pool, config, sink)
        attach_reuse(decoder, blocks.ladder.policy, forecast)
        self.prediction, predicting = predict_on_gpu(
            decoder, blocks.source, weights, self.folder, self._pack, predict=config.predict,
            exact=self.quality is None, past=None if self._profile is None else self._profile.verdict,
        )  # fmt: skip
        if isinstance(policy, ListeningReuse):
            self.prediction.eviction = policy.line
            policy.disturbed = lambda: predicting is not None and predicting.trying
        whole = predicting or decoder
        joined = whole if timeline is None or copier is None else record_on_gpu(whole, decoder, copier, timeline)
        return self._join(joined, blocks, pool, config, sink)

    def _reuse(self, config: EngineConfig) -> ReuseForecast | None:
        """Where experts are evicted, or somebody asks for it by name."""
        if self.budget.resident and config.policy != "reuse":
            return None
        return reuse_for(self.folder, self.spec, self._pack.manifest.source)

    def _tap(
        self, source: ExpertSource, weights: ModelWeights, forecast: ReuseForecast | None, config: EngineConfig,
        timeline: Timeline | None, learning: Learning | None,
    ) -> ForwardTap | None:  # fmt: skip
        """Who looks on while a ladder's model computes; nobody where every expert is resident."""
        if not isinstance(source, LadderSource):
            return None
        digest = self._pack.manifest.source
        self.prediction = predict_on_ladder(
            self.spec, weights, self.folder, source, forecast, predict=config.predict, digest=digest,
            learnt=None if learning is None else learning.vectors,
            past=None if self._profile is None else self._profile.verdict,
        )  # fmt: skip
        source.record(timeline)
        taps = [TimelineTap(timeline)] if timeline is not None else []
        lossy = () if self.quality is None else self.quality.taps
        openings = [] if learning is None or learning.openings is None else [learning.openings]
        table = None if learning is None else learning.table
        return Taps(*taps, *lossy, *self.prediction.taps, *openings, *self._foresee(source, table))

    def _foresee(self, source: Foreseen, learnt: OpeningTable | None = None) -> list[DraftRouting]:
        """Experts may be moved for drafts; who counts for that where their tokens were routed."""
        self._drafting = draft_forecast(self.spec, self.folder, source, learnt)
        return [] if self._drafting is None else [self._drafting.routing]

    def _join(
        self, decoder: StepDecoder[Experts], opened: Opened[Experts], pool: KvPool, config: EngineConfig,
        sink: RoutingSink | None,
    ) -> _Working:  # fmt: skip
        engine = Engine(
            decoder, opened.source, pool, self.codec,
            end_tokens=self.defaults.end_tokens,
            max_context=self.config.max_context,
            max_batch=self.config.max_batch,
            prefill_chunk=self.config.prefill_chunk,
            sink=sink,
        )  # fmt: skip
        if self._profile is not None and opened.ladder is not None:
            self._profile.warm(opened.ladder, self.budget.slots)
        accounts = None if self.quality is None else self.quality.desk.accounts
        if accounts is not None:
            engine.on_discard = accounts.take
        desk = AnswerDesk(engine, self.config.threads, accounts, self.cover)
        return _Working(desk, opened.source, opened.ladder)

    def generate(self, prompt: Prompt, *, raw: bool = False, **sampling: Any) -> Completion:
        """One answer, complete."""
        return self.generate_batch([prompt], raw=raw, batched=False, **sampling)[0]

    def generate_batch(
        self, prompts: Sequence[Prompt], *, raw: bool = False, batched: bool = True, seeds: Sequence[int] = (),
        **sampling: Any,
    ) -> list[Completion]:  # fmt: skip
        """All answers, computed together, in the order of the prompts. An error in one of them is raised.

        `seeds`: one for each prompt; without them the `seed` among the settings is everybody's.
        """
        settings = self.settings(**sampling)
        own = [settings.override(seed=seed) for seed in seeds] if seeds else [settings] * len(prompts)
        requests = [self._request(prompt, raw, each, batched) for prompt, each in zip(prompts, own, strict=True)]
        answers: list[Answer] = []
        try:
            answers.extend(self._desk.submit(request) for request in requests)
            return [answer.completion for answer in answers]
        finally:
            for answer in answers:
                answer.cancel()

    def stream(self, prompt: Prompt, *, raw: bool = False, **sampling: Any) -> Answer:
        """An answer that comes token by token: iterate over it for TokenEvents; `.completion` afterwards."""
        return self._desk.submit(self._request(prompt, raw, self.settings(**sampling)))

    def score(self, prompt: Prompt, *, raw: bool = False, logprobs: int = 0) -> Completion:
        """No answer, but the log probability of every prompt token after the first, and of the n likeliest there."""
        request = self._request(prompt, raw, self.settings())
        return self._desk.submit(replace(request, prompt_logprobs=logprobs, prompt_only=True)).completion

    def encode(self, prompt: Prompt, *, raw: bool = False) -> tuple[int, ...]:
        """The token ids that the model will see for a prompt."""
        return encode_prompt(prompt, self.codec, raw=raw)

    def _request(self, prompt: Prompt, raw: bool, settings: SamplingSettings, batched: bool = False) -> Request:
        ids = self.encode(prompt, raw=raw)
        return Request(ids, settings, batched=batched, continues=not is_chat(prompt, self.codec, raw=raw))

    def drafts(self, work: DraftWork | None = None) -> Drafts:
        """Prompts that are being typed; whoever drives `engine` step by step tends them. One at a time is enough."""
        chosen = work or DraftWork()
        foresight = foresight_of(self._drafting, self.codec, chosen)
        parts = self.config.device == "cpu"  # on a GPU a row's bits may depend on its place (docs/adr/0008)
        return Drafts(self.engine, self.codec, chosen, foresight, parts=parts)

    def settings(self, **sampling: Any) -> SamplingSettings:
        """The model's sampling defaults with the given values put in their place."""
        return self.defaults.settings.override(**sampling)

    def counters(self) -> LadderCounters | None:
        """What the memory ladder has done since the start; None where every expert is resident."""
        ladder = self._working.ladder
        return None if ladder is None or self.budget.resident else ladder.counters()

    def pages(self) -> PageCounts | None:
        """Who holds the pages that experts and keys and values share; None where they do not."""
        ladder = self._working.ladder
        lender = None if ladder is None else ladder.lender
        return None if lender is None else lender.counts()

    @property
    def experts(self) -> ExpertSource | BlockSource:
        """Where the experts come from."""
        return self._working.experts

    @property
    def engine(self) -> Engine:
        """For whoever drives it step by step. Answers of `stream` and `generate` must not be under way then."""
        return self._desk.engine

    @property
    def _desk(self) -> AnswerDesk:
        return self._working.desk

    @property
    def _working(self) -> _Working:
        if self._parts is None:
            raise RequestError("the pipeline is closed", fix="open a new one")
        return self._parts

    def close(self) -> None:
        """Ends what still runs and gives memory, threads and files back. Twice is once."""
        if self._parts is None:
            return
        parts, self._parts = self._parts, None
        parts.desk.close_all()
        if parts.ladder is not None:
            try:
                if self._profile is not None:
                    self._profile.keep(parts.ladder, None if self.prediction is None else self.prediction.verdict)
            finally:
                parts.ladder.close()
        del parts
        if self.config.device == "cuda":  # torch keeps what it frees, and the next pipeline would find no room
            self.prediction = None  # it knows the decoder
            gc.collect()
            torch.cuda.empty_cache()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
