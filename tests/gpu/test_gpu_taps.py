"""The law with predictors inside the graph: whatever they say, and whatever the link then moves, no bit changes."""

import functools
import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from steerpipe.core.events import RoutingRecord
from steerpipe.store.formats import ExpertFormat
from steerpipe.transfer.cuda.source import CudaSource
from steerpipe.transfer.throttle import Throttle
from tests.support.running import Loaded
from tests.support.tiny import VOCAB, tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

if torch.cuda.is_available():  # importing kernels needs triton
    from steerpipe.kernels.history import TransformerKernels
    from steerpipe.model.gpu.apart import Apart, ApartForecaster
    from steerpipe.model.gpu.fetching import NAMED
    from steerpipe.model.gpu.mailbox import INDEX
    from steerpipe.model.gpu.tap import Forecaster, Head, History, Lookahead
    from steerpipe.predict.trajectory_networks import ExpertTransformer
    from tests.support.gpu import load_gpu, pack_of

CUDA = torch.device("cuda")
STEPS, EXPERTS, TOP_K, SLOTS = 40, 24, 4, 36
SURE = 0x7FFF << 16


LARGE = {"hidden_size": 512, "moe_intermediate_size": 704}  # a block moves in several rounds


@functools.cache
def model(form: str, size: str = "small") -> Loaded:
    more = LARGE if size == "large" else {}
    made = tiny("qwen2_moe", num_experts=EXPERTS, num_experts_per_tok=TOP_K, num_hidden_layers=4, **more)
    return load_gpu(pack_of(made.folder, ExpertFormat(form)), torch.bfloat16, CUDA)


class Routes:
    """[steps, L, k]: what one-row steps routed to."""

    def __init__(self) -> None:
        self.records: list[list[int]] = []

    def observe(self, record: RoutingRecord) -> None:
        self.records.append(record.experts.reshape(-1)[:TOP_K].tolist())


def drive(
    loaded: Loaded, experts: object, routes: Routes | None, said: list[Tensor] | None,
    turns: "Sequence[Forecaster | ApartForecaster | None]" = (), batches: Collection[int] = (),
) -> Tensor:  # fmt: skip
    """A prompt and one row after the other: all logits, as bits. `turns`: who predicts in which step; `batches`: behind
    which a batch of others decodes."""
    use = replace(loaded, experts=experts)
    tokens = Random(3).choices(range(VOCAB), k=41 + STEPS)
    kv = loaded.pool.sequence()
    logits = [use.prefill(tokens[:41], (), kv)]
    for step in range(STEPS):
        loaded.decoder.said = None if said is None else said[step]
        if turns:
            loaded.decoder.forecaster = turns[step]
        logits.append(use.one_row(tokens[41 + step : 42 + step], kv, sink=routes))
        if step in batches:
            others = [loaded.pool.sequence() for _ in range(3)]
            use.batch(others, tokens[step : step + 3])
            for other in others:
                other.free()
    kv.free()
    return torch.cat(logits).cpu().view(torch.int32)


@functools.cache
def truth(form: str, size: str = "small") -> tuple[Tensor, Tensor]:
    """Bits of the logits with everything resident, and what was routed to [STEPS, L, k]."""
    routes, loaded = Routes(), model(form, size)
    bits = drive(loaded, loaded.experts, routes, None)
    return bits, torch.tensor(routes.records).view(STEPS, len(loaded.spec.moe_layers), TOP_K)


def words(kind: str, routed: Tensor, horizon: int) -> list[Tensor]:
    """What is said at every tap of every step; "own": what the taps find themselves."""
    steps, layers, _ = routed.shape
    said = torch.full((steps, layers, horizon, NAMED), -1, dtype=torch.int32)
    random = torch.Generator().manual_seed(5)
    flat = routed.reshape(-1, TOP_K)
    for place in range(steps * layers):
        for ahead in range(1, horizon + 1):
            right = flat[min(place + ahead, len(flat) - 1)]
            wrong = torch.tensor([each for each in range(EXPERTS) if each not in right.tolist()])
            chosen = {
                "perfect": right,
                "wrong": wrong[:TOP_K],
                "random": torch.randperm(EXPERTS, generator=random)[:TOP_K],
            }
            if kind in chosen:
                row = said[place // layers, place % layers, ahead - 1]
                row[:] = 0
                row[:TOP_K] = chosen[kind].to(torch.int32) | SURE
    return [each.to(CUDA) for each in said]


def forecaster(
    loaded: Loaded, way: str, horizon: int, *, commit: bool = False, served: bool = False
) -> "Forecaster | ApartForecaster":
    layers, hidden = len(loaded.spec.moe_layers), loaded.spec.hidden
    scale, bias = torch.ones(layers, device=CUDA), torch.zeros(layers, device=CUDA)
    random = torch.Generator(CUDA).manual_seed(11)

    def drawn(*sizes: int) -> Tensor:
        return torch.randn(sizes, device=CUDA, dtype=torch.bfloat16, generator=random)

    if way == "apart":
        network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(10 * EXPERTS, EXPERTS)).to(
            CUDA, torch.bfloat16
        )
        return ApartForecaster((network,) * layers, EXPERTS, TOP_K)
    if way in ("transformer", "history"):
        torch.manual_seed(0)
        state = ExpertTransformer(EXPERTS).to(CUDA, torch.bfloat16).state_dict()
        networks = (TransformerKernels(state, 10, TOP_K),) * layers
        if way == "history":
            return Forecaster((History(networks),), commit, served)
        return ApartForecaster(networks, EXPERTS, TOP_K)
    if way == "lookahead":
        return Forecaster((Lookahead(scale, bias),) * horizon, commit, served)
    head = Head(
        drawn(layers, 5, 2 * hidden + 2 * EXPERTS), drawn(layers, 5), drawn(layers, EXPERTS, 5),
        drawn(layers, EXPERTS), scale, bias,
    )  # fmt: skip
    return Forecaster((head,) * horizon, commit, served)


@contextmanager
def predicting(loaded: Loaded, made: "Forecaster | ApartForecaster") -> Iterator[None]:
    loaded.decoder.forecaster = made
    try:
        yield
    finally:
        loaded.decoder.forecaster = loaded.decoder.said = None


@pytest.mark.parametrize("kind", ["own", "perfect", "wrong", "random"])
@pytest.mark.parametrize(
    ("way", "horizon"), [("head", 1), ("head", 3), ("lookahead", 2), ("apart", 2), ("transformer", 2), ("history", 1)]
)
@pytest.mark.parametrize("form", ["bfloat16", "int4"])
def test_no_bit_depends_on_a_predictor_in_the_graph(form: str, way: str, horizon: int, kind: str) -> None:
    bits, routed = truth(form)
    loaded = model(form)
    pack = loaded.experts.pack
    with CudaSource.open(pack, slots=SLOTS, device=CUDA, pinned_bytes=1 << 30, direct=False) as source:
        source._shelf.chunk_bytes = 2048  # blocks of 4 to 7 KB: several chunks each
        with predicting(loaded, forecaster(loaded, way, horizon)):
            found = drive(loaded, source, None, words(kind, routed, horizon))
        assert torch.equal(found, bits)
        counts = source.counters()
        assert counts.misses
        if kind == "perfect" and way not in ("apart", "transformer"):
            assert counts.prefetch.hits + counts.prefetch.late > 20
        source.check_integrity()


@pytest.mark.parametrize("kind", ["own", "perfect", "wrong", "random"])
@pytest.mark.parametrize(("way", "slots"), [("head", SLOTS), ("lookahead", 16), ("head", 60), ("history", SLOTS)])
@pytest.mark.parametrize(
    ("form", "size"), [("bfloat16", "small"), ("bfloat16", "large"), ("int8", "large"), ("int4", "large")]
)
def test_no_bit_depends_on_what_the_device_sends_for_by_itself(
    form: str, size: str, way: str, slots: int, kind: str
) -> None:
    bits, routed = truth(form, size)
    loaded = model(form, size)
    with CudaSource.open(loaded.experts.pack, slots=slots, device=CUDA, pinned_bytes=1 << 30, direct=True) as source:
        with predicting(loaded, forecaster(loaded, way, 1)):
            for _ in range(2):
                assert torch.equal(drive(loaded, source, None, words(kind, routed, 1)), bits)
                source.check_integrity()
        counts = source.counters()
        assert counts.misses
        assert source.landing is not None and source.landing.guesses is not None
        sent = source.landing.guesses.slots.taken
        if kind == "perfect":
            assert sent > 40
            assert way == "history" or counts.prefetch.cancelled < sent / 4  # five kernels more than a tiny layer waits
        if kind == "wrong":
            assert counts.prefetch.cancelled >= sent - 2 >= 30


@pytest.mark.parametrize("kind", ["own", "perfect", "wrong", "random"])
@pytest.mark.parametrize(("form", "size"), [("bfloat16", "large"), ("int4", "small")])
def test_no_bit_depends_on_whether_the_host_or_the_device_sends_in_which_step(form: str, size: str, kind: str) -> None:
    bits, routed = truth(form, size)
    loaded, said = model(form, size), words(kind, routed, 2)
    by_host, apart = forecaster(loaded, "head", 2, served=True), forecaster(loaded, "apart", 2)
    by_device = [forecaster(loaded, way, 1) for way in ("head", "history")]
    history_by_host = forecaster(loaded, "history", 1, served=True)
    turns = Random(5).choices([None, by_host, *by_device, history_by_host, apart], k=STEPS)
    with CudaSource.open(loaded.experts.pack, slots=SLOTS, device=CUDA, pinned_bytes=1 << 30, direct=True) as source:
        source._shelf.chunk_bytes = 2048
        for _ in range(2):
            with predicting(loaded, by_host):
                assert torch.equal(drive(loaded, source, None, said, turns, batches=range(0, STEPS, 3)), bits)
            source.check_integrity()
            graphs: Any = loaded.decoder
            assert not graphs._captured[1]._branches.fetching.running.any()
        assert source.counters().misses
        assert source.landing is not None and source.landing.guesses is not None
        if kind == "perfect":
            assert source.landing.guesses.slots.taken > 5 and source.counters().prefetch.hits > 5


def transformers(layers: int) -> "tuple[TransformerKernels, ...]":
    """One for each layer, which have learnt nothing."""
    made = []
    for seed in range(layers):
        torch.manual_seed(seed)
        made.append(TransformerKernels(ExpertTransformer(EXPERTS).to(CUDA, torch.bfloat16).state_dict(), 10, TOP_K))
    return tuple(made)


def likeliest(logits: Tensor) -> list[int]:
    found: list[int] = logits[0].sort(descending=True, stable=True).indices[:NAMED].tolist()
    return found


def test_a_branch_of_history_says_of_the_next_layer_what_was_asked_two_layers_before_it() -> None:
    loaded, layers = model("int4", "large"), 4
    networks, routes = transformers(layers), Routes()
    made, kv = Forecaster((History(networks),)), loaded.pool.sequence()
    with (
        CudaSource.open(loaded.experts.pack, slots=SLOTS, device=CUDA, pinned_bytes=1 << 30, direct=True) as source,
        predicting(loaded, made),
    ):
        source._shelf.throttle = Throttle(least_used=0.0, most_silent=math.inf)  # who knows nothing would have to rest
        use = replace(loaded, experts=source)
        use.prefill(list(range(1, 20)), (), kv)
        before: Tensor | None = None
        for token in range(30, 45):
            routes.records.clear()
            use.one_row([token], kv, sink=routes)
            torch.cuda.synchronize()
            graphs: Any = loaded.decoder
            tap = graphs._captured[1]._branches.of(made).tap
            routed = torch.tensor(routes.records, device=CUDA).view(layers, TOP_K)
            for order in range(layers):
                seen = routed if order else before
                words = tap.words.words[order]
                if seen is None:  # nobody was asked in a token before
                    assert not (words >> 16 & 0x7FFF).any()
                    continue
                said = networks[(order + 1) % layers].answer(seen, (order - 1) % layers)
                assert (words & INDEX).tolist() == likeliest(said)
            before = routed
        source.check_integrity()
    kv.free()


def test_what_is_said_beside_a_step_is_what_the_network_says() -> None:
    layers, random = 4, Random(7)
    networks = transformers(layers)
    apart = Apart(ApartForecaster(networks, EXPERTS, TOP_K), CUDA)
    for stamp in range(5, 8):
        apart.begin()
        routed = torch.full((layers, TOP_K), -1, device=CUDA)
        for order in range(layers):
            chosen = random.sample(range(EXPERTS), TOP_K)
            routed[order] = torch.tensor(chosen)
            apart.show(order, chosen)
            assert apart.ask(order, stamp)
            torch.cuda.synchronize()
            words = apart.words.look(order, stamp)
            assert words is not None
            said = networks[(order + 2) % layers].answer(routed, order)
            assert [word & INDEX for word in words] == likeliest(said)


class Impatient:
    """Slots for guesses whose `settle` is interrupted now and then, before or after its work."""

    def __init__(self, slots: object) -> None:
        self._slots, self._calls, self.failures = slots, 0, 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._slots, name)

    def settle(self, *given: object) -> None:
        self._calls += 1
        if fails := self._calls % 5 == 0:
            self.failures += 1
        if fails and self.failures % 2:
            raise KeyboardInterrupt
        self._slots.settle(*given)  # type: ignore[attr-defined]
        if fails:
            raise KeyboardInterrupt


def test_an_interrupted_host_leaves_the_slots_for_guesses_true() -> None:
    loaded = model("bfloat16", "large")
    tokens, kv = Random(3).choices(range(VOCAB), k=24), loaded.pool.sequence()
    want = loaded.one_row(tokens, kv)
    kv.truncate(0)
    with CudaSource.open(loaded.experts.pack, slots=SLOTS, device=CUDA, pinned_bytes=1 << 30, direct=True) as source:
        failing = Impatient(source.landing.guesses)  # type: ignore[union-attr]
        source.landing.guesses = failing  # type: ignore[union-attr]
        use = replace(loaded, experts=source)
        with predicting(loaded, forecaster(loaded, "lookahead", 1)):
            for step, token in enumerate(tokens):
                while True:
                    try:
                        found = use.one_row([token], kv)
                        break
                    except KeyboardInterrupt:
                        source.check_integrity()
                        kv.truncate(step)
                assert torch.equal(found[0], want[step]), f"step {step}"
        assert failing.failures >= 4
    kv.free()


@pytest.mark.parametrize("slots", [12, SLOTS])  # 12: a layer is served while the one before holds most of the slots
def test_what_is_committed_is_computed_and_its_router_is_not_asked(slots: int) -> None:
    _, routed = truth("bfloat16")
    loaded = model("bfloat16")
    with CudaSource.open(loaded.experts.pack, slots=slots, device=CUDA, pinned_bytes=1 << 30, direct=False) as source:
        with predicting(loaded, forecaster(loaded, "lookahead", 1, commit=True)):
            routes = Routes()
            drive(loaded, source, routes, words("wrong", routed, 1))
        source.check_integrity()
    found = torch.tensor(routes.records).view(STEPS, len(loaded.spec.moe_layers), TOP_K)
    named = torch.stack([each[:, 0, :TOP_K].cpu() & 0xFFFF for each in words("wrong", routed, 1)])
    assert torch.equal(found[:, 1:], named[:, :-1].to(found.dtype)), "every layer but the first has what was named"
