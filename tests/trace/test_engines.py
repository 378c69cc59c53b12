"""Both engines give the same trace of the same model; what was begun is gone on with."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from steerpipe.core.config import EngineConfig
from steerpipe.core.errors import ConfigError, InputError
from steerpipe.trace.collect import Stand, collect_trace, trace_options
from steerpipe.trace.engine import EngineTracer
from steerpipe.trace.header import TraceOptions
from steerpipe.trace.hooked import HookedTracer, open_hooked
from steerpipe.trace.prompts import FilePrompt
from steerpipe.trace.reader import TraceReader
from steerpipe.trace.tracing import EncodedPrompt, TracedModel, Windows, answer_seed
from tests.faults import folders
from tests.trace.samples import assert_same

TEXTS = ("Hello there", "a", "The quick brown fox jumps over the lazy dog and goes on to the next hill", "Why?")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders.build(tmp_path_factory.mktemp("engines") / "model")


@pytest.fixture(scope="module")
def engine(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineTracer]:
    cache = str(tmp_path_factory.mktemp("cache"))
    with EngineTracer(str(folder), EngineConfig(dtype="float32", cache_dir=cache, threads=1)) as tracer:
        yield tracer


@pytest.fixture(scope="module")
def hooked(folder: Path) -> HookedTracer:
    return open_hooked(str(folder), "cpu", "float32", None, batch_tokens=64)


def prompts() -> list[FilePrompt]:
    return [FilePrompt(f"p{number}", "here", text) for number, text in enumerate(TEXTS)]


def silent(_stand: Stand) -> None:
    pass


def test_the_two_engines_route_alike(engine: EngineTracer, hooked: HookedTracer, tmp_path: Path) -> None:
    for tracer in (engine, hooked):
        options = trace_options(tracer.model, window=40, generate=0, weights=True)
        collect_trace(tracer, prompts(), tmp_path / tracer.model.engine, options, silent)
    ours, theirs = (TraceReader(tmp_path / name) for name in ("steerpipe", "transformers"))
    assert ours.geometry == theirs.geometry and ours.vocabulary == theirs.vocabulary
    assert len(ours) == len(theirs) > len(TEXTS), "one of them is longer than the window"
    for each, other in zip(ours, theirs, strict=True):
        assert each.prompt == other.prompt
        assert np.array_equal(each.tokens, other.tokens) and each.prompt_tokens == other.prompt_tokens
        assert np.array_equal(each.experts, other.experts)
        assert each.weights is not None and other.weights is not None
        np.testing.assert_allclose(each.weights, other.weights, rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["engine", "hooked"])
def test_answers_are_traced_as_the_whole_text_is(
    name: str, request: pytest.FixtureRequest, engine: EngineTracer
) -> None:
    tracer = request.getfixturevalue(name)
    options = replace(trace_options(tracer.model, window=None, generate=6), weights=True)
    given = EncodedPrompt("p", tuple(engine.codec.encode("The quick brown", add_special=True)))
    ((answered,),) = tracer.trace([given], options)
    assert answered.prompt_tokens == len(given.tokens) < len(answered.tokens) <= len(given.tokens) + 5
    whole = EncodedPrompt("p", tuple(answered.tokens.tolist()))
    ((again,),) = tracer.trace([whole], replace(options, generate=0))
    assert np.array_equal(again.experts, answered.experts)
    ((repeated,),) = tracer.trace([given], options)
    assert_same(repeated, answered)


def test_answers_together_are_the_ones_that_each_gets_in_another_batch(engine: EngineTracer) -> None:
    options = trace_options(engine.model, window=None, generate=6, batch=3)
    given = [EncodedPrompt(each.id, each.encode(engine.codec, raw=False)) for each in prompts()]
    forward = {windows[0].prompt: windows[0] for windows in engine.trace(given, options)}
    backward = {windows[0].prompt: windows[0] for windows in engine.trace(given[::-1], options)}
    assert forward.keys() == backward.keys() == {"p0", "p1", "p2", "p3"}
    for prompt, answered in forward.items():
        assert_same(answered, backward[prompt])
    tails = {tuple(each.tokens[each.prompt_tokens :].tolist()) for each in forward.values()}
    assert len(tails) > 1, "prompts have their own answers"


def test_states_come_from_transformers_alone(engine: EngineTracer, hooked: HookedTracer, tmp_path: Path) -> None:
    options = trace_options(hooked.model, window=None, generate=4, states=True)
    collect_trace(hooked, prompts()[:2], tmp_path / "states", options, silent)
    for each in TraceReader(tmp_path / "states"):
        assert each.states is not None and len(each.states.entering) == len(each.tokens)
    options = trace_options(engine.model, window=None, generate=0, states=True)
    with pytest.raises(ConfigError, match="hidden states"):
        collect_trace(engine, prompts(), tmp_path / "none", options, silent)
    assert not (tmp_path / "none").exists()


class Interrupted:
    """A tracer that stops after some prompts, as Ctrl-C does."""

    def __init__(self, inner: EngineTracer, after: int) -> None:
        self._inner, self._after = inner, after
        self.codec, self.model = inner.codec, inner.model
        self.begun: list[str] = []

    def check(self, options: TraceOptions) -> None:
        self._inner.check(options)

    def trace(self, prompts: list[EncodedPrompt], options: TraceOptions) -> Iterator[Windows]:
        for prompt in prompts:
            if len(self.begun) == self._after:
                raise KeyboardInterrupt
            self.begun.append(prompt.id)
            yield from self._inner.trace([prompt], options)


def test_an_interrupted_trace_goes_on_where_it_stood(engine: EngineTracer, tmp_path: Path) -> None:
    options = trace_options(engine.model, window=None, generate=3, seed=5)
    collect_trace(engine, prompts(), tmp_path / "whole", options, silent)
    first = Interrupted(engine, 2)
    with pytest.raises(KeyboardInterrupt):
        collect_trace(first, prompts(), tmp_path / "trace", options, silent)  # type: ignore[arg-type]
    second = Interrupted(engine, 99)
    stands: list[Stand] = []
    collect_trace(second, prompts(), tmp_path / "trace", options, stands.append)  # type: ignore[arg-type]
    assert first.begun == ["p0", "p1"] and second.begun == ["p2", "p3"]
    assert [(each.resumed, each.finished) for each in stands] == [(2, 2), (2, 3), (2, 4)]
    assert stands[-1].new_tokens == stands[-1].tokens - stands[0].tokens > 0
    for ours, theirs in zip(TraceReader(tmp_path / "trace"), TraceReader(tmp_path / "whole"), strict=True):
        assert_same(ours, theirs)


def test_prompts_without_room_for_an_answer_are_left_out_and_named(engine: EngineTracer, tmp_path: Path) -> None:
    lengths = [len(each.encode(engine.codec, raw=True)) for each in prompts()]
    options = trace_options(engine.model, window=max(lengths) + 3, generate=4, raw=True)
    stand = collect_trace(engine, prompts(), tmp_path / "trace", options, silent)
    assert stand.too_long == ("p2",) and stand.finished == stand.prompts == 3


def test_windows_and_answers_beyond_the_context_are_refused(engine: EngineTracer) -> None:
    model: TracedModel = engine.model
    for window, generate in ((0, 0), (model.context + 1, 0), (None, model.context), (8, 8), (None, -1)):
        with pytest.raises(InputError):
            trace_options(model, window=window, generate=generate)


def test_seeds_of_answers_depend_on_prompt_and_seed_alone() -> None:
    assert answer_seed("a", 1) == answer_seed("a", 1)
    assert len({answer_seed(prompt, seed) for prompt in "abc" for seed in range(3)}) == 9
    assert 0 <= answer_seed("a", 1) < 2**63
