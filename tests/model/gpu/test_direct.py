"""Steps that read what is missing by themselves, in Triton's interpreter: the step runs, then the host follows."""

import functools
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from steerpipe.core.errors import ConfigError, TransferError
from steerpipe.core.ids import SequenceId
from steerpipe.kernels.history import TransformerKernels
from steerpipe.model.gpu.direct import Follower, ReadThrough, sends_by_itself
from steerpipe.model.gpu.fetching import Fetching
from steerpipe.model.gpu.mailbox import INDEX, Mailbox
from steerpipe.model.gpu.rows import passes
from steerpipe.model.gpu.tap import Forecaster, History, Lookahead, Tap
from steerpipe.model.kv_cache import KvSequence
from steerpipe.model.step import decode_rows
from steerpipe.predict.trajectory_networks import ExpertTransformer
from steerpipe.store.formats import ExpertFormat
from steerpipe.transfer.cuda.source import CudaSource
from tests.support.gpu import load_gpu, pack_of
from tests.support.running import CPU, Loaded
from tests.support.tiny import tiny

SMALL = {
    "num_hidden_layers": 2, "vocab_size": 83, "max_position_embeddings": 256, "num_attention_heads": 2,
    "num_key_value_heads": 1,
}  # fmt: skip
STEPS = 3


@functools.cache
def model(form: str) -> Loaded:
    return load_gpu(pack_of(tiny("qwen3_moe", **SMALL).folder, ExpertFormat(form)))


def tokens(count: int, seed: int) -> list[int]:
    return Random(seed).choices(range(SMALL["vocab_size"]), k=count)


def open_direct(loaded: Loaded, slots: int) -> CudaSource:
    return CudaSource.open(loaded.experts.pack, slots=slots, device=CPU, pinned_bytes=1 << 30, direct=True)


class Stepper:
    """What StepGraphs does, without a graph."""

    def __init__(self, loaded: Loaded, source: Any, forecaster: Forecaster | None = None) -> None:
        landing, layers = source.landing, loaded.spec.moe_layers
        assert landing is not None
        top_k = loaded.spec.moe(layers[0]).top_k
        self._loaded, self._tap, self._fetching = loaded, None, None
        self._mailbox = Mailbox(len(layers), top_k, pinned=False)
        self._now = torch.zeros(1, dtype=torch.int64)
        if forecaster is not None:
            tables, forms = [source.table(layer) for layer in layers], [source.form(layer) for layer in layers]
            self._fetching = Fetching(landing.guesses, tables, forms, layers, top_k, self._now)
            self._tap = loaded.decoder._network.tap(forecaster, self._fetching)  # type: ignore[union-attr]
        self._run = ReadThrough(source, landing, top_k, CPU, self._fetching)
        self._resting_run = ReadThrough(source, landing, top_k, CPU)
        self._follower = Follower(source, landing, layers, self._mailbox)
        self._stamp = 0

    def step(self, token: int, kv: KvSequence, *, rests: bool = False) -> Tensor:
        decoder: Any = self._loaded.decoder
        (part,) = passes(decode_rows([SequenceId(0)], [kv], [token], CPU, cell=1))
        self._stamp += 1
        tap, experts = (None, self._resting_run) if rests else (self._tap, self._run)
        step = replace(decoder._eager_step(part, None), mailbox=self._mailbox.words, stamp=self._now, tap=tap)
        self._now[0] = self._stamp
        logits: list[Tensor] = []

        def run() -> None:
            logits.append(decoder._network.head(decoder._network.hidden(step, experts)))
            if self._fetching is not None and not rests:
                self._fetching.join()

        with torch.inference_mode():
            if self._fetching is not None:
                self._fetching.slots.collect()
            words = None if tap is None else tap.words
            questions = len(self._loaded.spec.moe_layers)
            self._follower.run(run, self._stamp, lambda: True, lambda: None, self._fetching, words, rests=questions)
        return logits[0]


@functools.cache
def resident_bits(form: str) -> Tensor:
    loaded = model(form)
    kv = loaded.pool.sequence()
    logits = [loaded.one_row(tokens(STEPS, 1), kv), loaded.prefill(tokens(7, 2), (), kv)]
    logits.append(loaded.one_row(tokens(STEPS, 3), kv))
    kv.free()
    return torch.cat(logits)


def drive(loaded: Loaded, source: Any, forecaster: Forecaster | None = None) -> Tensor:
    stepper, kv = Stepper(loaded, source, forecaster), loaded.pool.sequence()
    logits = [stepper.step(token, kv) for token in tokens(STEPS, 1)]
    logits.append(loaded.prefill(tokens(7, 2), (), kv, source))
    logits += [stepper.step(token, kv) for token in tokens(STEPS, 3)]
    kv.free()
    return torch.cat(logits)


@pytest.mark.parametrize(
    ("form", "slots"), [("int4", 4), pytest.param("int4", 8, marks=pytest.mark.slow), ("int8", 6), ("bfloat16", 6)]
)
def test_no_bit_depends_on_who_brings_an_expert(form: str, slots: int) -> None:
    with open_direct(model(form), slots) as source:
        assert torch.equal(drive(model(form), source), resident_bits(form))
        source.check_integrity()
        counts = source.counters()
        assert counts.misses and counts.leased == counts.hits + counts.late + counts.misses


@pytest.mark.parametrize(("form", "slots", "likely"), [("int4", 8, 9.0), ("bfloat16", 10, 9.0), ("int8", 10, -9.0)])
def test_no_bit_depends_on_what_a_tap_sends_for(
    form: str, slots: int, likely: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Routers look ahead, sure of all that they name (it comes at once, whole) or of nobody."""
    loaded = model(form)
    if form == "bfloat16":  # as if its blocks were large: one at a time
        monkeypatch.setattr("steerpipe.model.gpu.fetching.SECOND_BYTES", 0)
    way = Lookahead(torch.ones(2), torch.full((2,), likely))
    with open_direct(loaded, slots) as source:
        assert torch.equal(drive(loaded, source, Forecaster((way,))), resident_bits(form))
        source.check_integrity()
        assert source.landing is not None and source.landing.guesses is not None
        sent, counts = source.landing.guesses.slots.taken, source.counters()
        assert counts.leased == counts.hits + counts.late + counts.misses
        assert (sent > 0) == (likely > 0) and counts.prefetch.cancelled < max(1, sent)


def transformers(loaded: Loaded, likely: float, ahead: int = 2) -> Forecaster:
    """One for each layer, who knows nothing and is as sure as that."""
    moe = loaded.spec.moe(loaded.spec.moe_layers[0])
    made = []
    for seed in range(len(loaded.spec.moe_layers)):
        torch.manual_seed(seed)
        state = ExpertTransformer(moe.experts).state_dict()
        state["out.bias"] += likely
        made.append(TransformerKernels(state, 10, moe.top_k))
    return Forecaster((History(tuple(made), ahead),))


@pytest.mark.parametrize(("form", "likely"), [("int4", 9.0), ("bfloat16", -9.0)])
def test_no_bit_depends_on_what_a_network_of_history_sends_for(form: str, likely: float) -> None:
    loaded = model(form)
    with open_direct(loaded, 10) as source:
        assert torch.equal(drive(loaded, source, transformers(loaded, likely)), resident_bits(form))
        source.check_integrity()
        assert source.landing is not None and source.landing.guesses is not None
        assert (source.landing.guesses.slots.taken > 0) == (likely > 0)


@pytest.mark.parametrize("ahead", [2, 3])
def test_a_tap_says_of_the_next_layer_what_an_earlier_one_has_asked_of_the_same_or_the_last_token(ahead: int) -> None:
    layers = 3
    made = tiny("qwen3_moe", **SMALL | {"num_hidden_layers": layers, "num_experts": 12})
    loaded = load_gpu(pack_of(made.folder, ExpertFormat("int4")))
    forecaster = transformers(loaded, 1.0, ahead)
    assert forecaster.history is not None
    networks = forecaster.history.networks
    with open_direct(loaded, 12) as source:
        stepper, kv = Stepper(loaded, source, forecaster), loaded.pool.sequence()
        assert stepper._tap is not None
        words, before = stepper._tap.words.words, None
        for rests, new in [
            (False, False),
            (False, False),
            (True, False),
            (False, False),
            (False, True),
            (False, False),
        ]:
            if new:
                kv.truncate(0)
            stepper.step(5, kv, rests=rests)
            routed = stepper._mailbox.words & INDEX
            for order in range(layers if not rests else 0):
                asked = order + 1 - ahead  # the layer of the tap that asked; below 0: in the step before
                seen = routed if asked >= 0 else None if new else before
                if seen is None:
                    assert not (words[order] >> 16 & 0x7FFF).any()
                    continue
                said = networks[(order + 1) % layers].answer(seen, asked % layers)[0]
                ranked = said.sort(descending=True, stable=True).indices
                assert (words[order] & INDEX).tolist() == ranked[:8].tolist()
                assert (words[order] >> 16 & 0x7FFF).any()
            before = None if rests else routed
        kv.free()


def test_the_next_layer_is_told_of_before_a_later_one_is_asked_about(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who sends for it waits for the first alone: a question takes as long as five kernels."""
    order: list[str] = []
    marks, answers = Tap._mark_said, TransformerKernels.answer
    monkeypatch.setattr(Tap, "_mark_said", lambda tap: (order.append("said"), marks(tap))[1])
    monkeypatch.setattr(TransformerKernels, "answer", lambda *given: (order.append("asked"), answers(*given))[1])
    loaded = model("int4")
    with open_direct(loaded, 10) as source:
        drive(loaded, source, transformers(loaded, 1.0))
    assert order and order == ["said", "asked"] * (len(order) // 2)


@pytest.mark.parametrize("ahead", [1, 5])
def test_a_network_that_would_be_too_late_or_overwritten_is_refused(ahead: int) -> None:
    loaded = model("int4")
    with open_direct(loaded, 10) as source, pytest.raises(AssertionError, match="too late, or one answer"):
        drive(loaded, source, transformers(loaded, 1.0, ahead))


class Interrupted:
    """A landing of which a `follow` is interrupted, before or after its work; the next ones may find half a table."""

    def __init__(self, landing: Any, *, after: bool, call: int = 3, half_way: bool = False) -> None:
        self._landing, self._after, self._calls, self._call, self._half_way = landing, after, 0, call, half_way

    def __getattr__(self, name: str) -> Any:
        return getattr(self._landing, name)

    def follow(self, layer: int, reads: Any, ticket: int) -> int:
        self._calls += 1
        if self._calls == self._call and not self._after:
            raise KeyboardInterrupt
        if self._calls > self._call and self._half_way:
            raise KeyError(layer)
        following: int = self._landing.follow(layer, reads, ticket)
        if self._calls == self._call:
            raise KeyboardInterrupt
        return following


@pytest.mark.parametrize("after", [False, True])
def test_a_step_that_the_host_was_interrupted_in_leaves_everything_true(*, after: bool) -> None:
    loaded = model("int4")
    with open_direct(loaded, 6) as source:
        kv = loaded.pool.sequence()
        stepper = Stepper(loaded, source)
        stepper._follower._landing = Interrupted(source.landing, after=after)
        stepper.step(3, kv)
        with pytest.raises(KeyboardInterrupt):
            stepper.step(4, kv)
        source.check_integrity()
        kv.truncate(1)
        stepper.step(4, kv)
        source.check_integrity()
        kv.free()
        assert torch.equal(drive(loaded, source), resident_bits("int4"))


def test_a_second_interrupt_behind_a_step_s_last_layer_is_mended_by_the_next_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every layer was followed when the first one came; the second comes before the table is true again."""
    loaded = model("int4")
    layers = len(loaded.spec.moe_layers)

    def interrupted() -> None:
        raise KeyboardInterrupt

    with open_direct(loaded, 6) as source:
        kv, stepper = loaded.pool.sequence(), Stepper(loaded, source)
        stepper._follower._landing = Interrupted(source.landing, after=True, call=2 * layers)
        stepper.step(3, kv)
        assert not source._shelf.busy
        with monkeypatch.context() as patch:
            patch.setattr(source, "release", interrupted)
            with pytest.raises(KeyboardInterrupt):
                stepper.step(4, kv)
        assert source._shelf.busy, "whoever comes next makes the table true"
        kv.truncate(1)
        stepper.step(4, kv)
        source.check_integrity()
        kv.free()
        assert torch.equal(drive(loaded, source), resident_bits("int4"))


def test_a_table_that_an_interrupt_left_half_way_is_made_anew_and_the_interrupt_is_what_the_caller_sees() -> None:
    loaded = model("int4")
    with open_direct(loaded, 6) as source:
        kv, stepper = loaded.pool.sequence(), Stepper(loaded, source)
        stepper._follower._landing = Interrupted(source.landing, after=False, half_way=True)
        stepper.step(3, kv)
        with pytest.raises(KeyboardInterrupt):
            stepper.step(4, kv)
        source.check_integrity()
        kv.free()
        assert torch.equal(drive(loaded, source), resident_bits("int4"))


SURE = Forecaster((Lookahead(torch.ones(2), torch.tensor([9.0, -9.0])),))  # of the next step's first layer alone


@pytest.mark.parametrize("after", [False, True])
def test_an_interrupt_on_the_way_to_a_rest_leaves_everything_true(
    monkeypatch: pytest.MonkeyPatch, *, after: bool
) -> None:
    """When the slot of a guess for this step is given back."""
    loaded = model("int4")
    with open_direct(loaded, 8) as source:
        kv, stepper, table = loaded.pool.sequence(), Stepper(loaded, source, SURE), source._shelf.table
        give_back = table.give_back

        def interrupted(slot: int) -> None:
            if after:
                give_back(slot)
            raise KeyboardInterrupt

        stepper.step(1, kv)
        assert owed(source)
        with monkeypatch.context() as patch:
            patch.setattr(table, "give_back", interrupted)
            with pytest.raises(KeyboardInterrupt):
                stepper.step(3, kv, rests=True)
        source.check_integrity()
        stepper.step(3, kv, rests=True)
        stepper.step(4, kv)
        source.check_integrity()
        kv.free()


def owed(source: CudaSource) -> int:
    """How many blocks of the next step's first layer the last one has sent for."""
    assert source.landing is not None and source.landing.guesses is not None
    waiting = source.landing.guesses._owed
    return 0 if waiting is None else len(waiting[1]())


def test_nothing_is_written_for_a_source_that_was_closed_while_a_predictor_rests() -> None:
    loaded = model("int4")
    source = open_direct(loaded, 8)
    kv, stepper = loaded.pool.sequence(), Stepper(loaded, source, SURE)
    stepper.step(1, kv)
    source.close()
    lent = source.landing.lent  # type: ignore[union-attr]
    with pytest.raises(TransferError, match="has been closed"):
        stepper.step(2, kv, rests=True)
    assert source.landing.lent == lent  # type: ignore[union-attr]
    kv.free()


@pytest.mark.parametrize(
    ("forecaster", "slots", "fix"),
    [
        (replace(SURE, commit=True), 8, "--driver served"),
        (SURE, 7, "give 8 or more"),
    ],
)
def test_who_would_predict_in_vain_is_refused(forecaster: Forecaster, slots: int, fix: str) -> None:
    with open_direct(model("int4"), slots) as source:
        landing = source.landing
        assert landing is not None
        with pytest.raises(ConfigError) as raised:
            sends_by_itself(landing, forecaster)
    assert fix in raised.value.fix


def test_a_row_that_sends_by_itself_looks_one_layer_ahead() -> None:
    with open_direct(model("int4"), 8) as source:
        assert source.landing is not None
        guesses, forecaster = sends_by_itself(source.landing, Forecaster(SURE.ways * 2))
        assert guesses is source.landing.guesses and forecaster.horizon == 1


def test_a_step_that_was_never_queued_is_not_followed() -> None:
    loaded = model("int4")
    with open_direct(loaded, 6) as source:
        stepper = Stepper(loaded, source)

        def fail() -> None:
            raise RuntimeError("no memory for a graph")

        with pytest.raises(RuntimeError, match="no memory"):
            stepper._follower.run(fail, 1, lambda: True, lambda: None)
        source.check_integrity()
