"""GpuDecoder against Decoder, in Triton's interpreter: every family, every class of rows, every format of blocks."""

import functools
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from steerpipe.core.errors import TransferError
from steerpipe.core.ids import SequenceId
from steerpipe.model.decoder import Decoder
from steerpipe.model.gpu.experts import Direct
from steerpipe.model.gpu.mailbox import Mailbox
from steerpipe.model.gpu.rows import passes
from steerpipe.model.step import decode_rows
from steerpipe.model.weights import build_weights
from steerpipe.store.formats import ExpertFormat
from steerpipe.store.resident import ResidentExperts
from steerpipe.transfer.cuda.source import CudaSource
from tests.support.gpu import MemoryBlocks, load_gpu, pack_of
from tests.support.running import CPU, Loaded, Recorder
from tests.support.tiny import FAMILIES, tiny

SMALL = {
    "num_hidden_layers": 1, "vocab_size": 83, "max_position_embeddings": 256, "num_attention_heads": 2,
    "num_key_value_heads": 1,
}  # fmt: skip
PROMPT, CHUNKS = 20, (5,)  # a cell, then two cells that begin in the middle of the first
RELATIVE = 1e-4  # of the rms of all logits

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {"num_hidden_layers": 2}) for family in FAMILIES[:2]},
    **{family: (family, {}) for family in FAMILIES[2:]},
    "one layer": ("qwen3_moe", {}),
    "a window": ("mixtral", {"sliding_window": 7, "num_attention_heads": 4}),
    "clipped": ("olmoe", {"clip_qkv": 0.4, "norm_topk_prob": True, "num_key_value_heads": 2}),
    "a dense layer, tied, biased": (
        "qwen3_moe",
        {"num_hidden_layers": 2, "mlp_only_layers": [1], "tie_word_embeddings": True, "attention_bias": True},
    ),
    "all layers dense": ("qwen3_moe", {"num_experts": 0}),
}  # fmt: skip


@functools.cache
def both(case: str, form: str | None = None) -> tuple[Loaded, Loaded]:
    """The same pack on the CPU's path and on the GPU's, in fp32."""
    family, changes = CASES[case]
    pack = pack_of(tiny(family, **(SMALL | changes)).folder, None if form is None else ExpertFormat(form))
    gpu = load_gpu(pack)
    weights = build_weights(pack.spec, pack.family.names, pack.read_dense(), torch.float32, CPU)
    experts = ResidentExperts.load(pack, torch.float32, CPU)
    return Loaded(pack.spec, Decoder(pack.spec, weights, CPU), experts, gpu.pool), gpu


def tokens(count: int, seed: int = 0) -> list[int]:
    return Random(seed).choices(range(SMALL["vocab_size"]), k=count)


def drive(model: Loaded, experts: Any = None) -> tuple[Tensor, Recorder]:
    """A prompt in two chunks, a token of the one-row class, a batch of two: all logits."""
    sink, kv = Recorder(), model.pool.sequence()
    chosen = replace(model, experts=model.experts if experts is None else experts)
    logits = [chosen.prefill(tokens(PROMPT), CHUNKS, kv, sink=sink)]
    other = kv.fork(9)
    logits.append(chosen.one_row(tokens(1, 1), kv, sink=sink))
    logits.append(chosen.batch([kv, other], tokens(2, 2), sink=sink))
    kv.free()
    other.free()
    assert model.pool.live_blocks == 0
    return torch.cat(logits), sink


@functools.cache
def driven(case: str, form: str | None = None) -> tuple[Tensor, Recorder]:
    return drive(both(case, form)[1])


def check_close(case: str, form: str | None = None) -> None:
    cpu, _ = both(case, form)
    want, wanted_routing = drive(cpu)
    found, routing = driven(case, form)
    difference = float((found - want).abs().max() / want.pow(2).mean().sqrt())
    assert difference < RELATIVE, f"{difference:.1e}"
    assert len(routing.records) == len(wanted_routing.records)
    for mine, its in zip(routing.records, wanted_routing.records, strict=True):
        assert (mine.layer, mine.sequences) == (its.layer, its.sequences)
        assert np.array_equal(mine.positions, its.positions) and np.array_equal(mine.experts, its.experts)
        assert mine.experts.dtype == its.experts.dtype and mine.weights.dtype == its.weights.dtype
        assert np.allclose(mine.weights, its.weights, rtol=RELATIVE)


@pytest.mark.parametrize("case", [case for case in CASES if case != "one layer"])
def test_logits_and_routing_are_those_of_the_decoder_on_the_cpu(case: str) -> None:
    check_close(case)


@pytest.mark.parametrize("form", ["int8", "int4", "bfloat16"])
def test_quantised_blocks_give_what_their_dequantised_weights_give(form: str) -> None:
    check_close("one layer", form)


@functools.cache
def driven_in_waves() -> tuple[Tensor, Recorder, MemoryBlocks]:
    _, gpu = both("qwen2_moe")
    shuffled = MemoryBlocks(gpu.experts.pack, CPU, Random(5))
    return *drive(gpu, shuffled), shuffled


def test_no_bit_depends_on_the_order_or_size_of_waves() -> None:
    found, _, shuffled = driven_in_waves()
    assert torch.equal(found, driven("qwen2_moe")[0])
    assert shuffled.waves > len(shuffled.leases)


def test_experts_of_a_prompts_last_rows_are_kept_and_those_of_decode_all() -> None:
    _, sink, source = driven_in_waves()
    for record, (layer, routed, keep) in zip(sink.records, source.leases, strict=True):
        assert layer == record.layer and set(routed) == set(record.experts.flatten().tolist())
        tail = set(record.experts[-4:].flatten().tolist())
        assert keep == (tail if len(record.experts) > 4 else None)


def prompt_and_token(model: Loaded, experts: Any) -> Tensor:
    kv = model.pool.sequence()
    prompt = model.prefill(tokens(PROMPT), (), kv, experts)
    token = replace(model, experts=experts).one_row(tokens(1), kv)
    kv.free()
    return torch.cat([prompt, token])


@functools.cache
def resident_bits() -> Tensor:
    _, gpu = both("qwen3_moe", "int4")
    return prompt_and_token(gpu, gpu.experts)


@pytest.mark.parametrize("slots", [2, 3, 12])
def test_no_bit_depends_on_the_slots_of_a_cuda_source(slots: int) -> None:
    _, gpu = both("qwen3_moe", "int4")
    with CudaSource.open(gpu.experts.pack, slots=slots, device=CPU) as source:
        assert source.resident == (slots == 12)
        assert torch.equal(prompt_and_token(gpu, source), resident_bits())
        source.check_integrity()


def test_more_than_a_cell_of_rows_gives_every_row_its_own_bits() -> None:
    _, gpu = both("a window")
    kvs = [gpu.pool.sequence() for _ in range(17)]
    sink = Recorder()
    together = gpu.batch(kvs, tokens(17), sink=sink)
    alone = gpu.pool.sequence()
    assert torch.equal(gpu.batch([alone], tokens(17)[16:])[0], together[16])
    assert [len(record.experts) for record in sink.records] == [17]
    assert [len(set(record.sequences)) for record in sink.records] == [17]
    for kv in (*kvs, alone):
        kv.free()


def test_wanted_rows_are_given_in_the_order_asked_for_and_none_if_none_is() -> None:
    _, gpu = both("a window")
    kvs = [gpu.pool.sequence() for _ in range(3)]
    rows = decode_rows([SequenceId(i) for i in range(3)], kvs, [1, 2, 3], CPU, cell=16)
    every = gpu.decoder.forward(rows, gpu.experts, range(3))
    assert torch.equal(gpu.decoder.forward(rows, gpu.experts, [2, 0]), every[[2, 0]])
    assert gpu.decoder.forward(rows, gpu.experts, []).shape == (0, SMALL["vocab_size"])
    for kv in kvs:
        kv.free()


def test_forced_routing_takes_the_routers_place() -> None:
    _, gpu = both("olmoe")
    kv, sink = gpu.pool.sequence(), Recorder()
    gpu.decoder.forced = torch.tensor([[[4, 1]]], dtype=torch.int32)
    try:
        gpu.one_row([3], kv, sink)
    finally:
        gpu.decoder.forced = None
    gpu.decoder.forced = torch.tensor([[[-1, -1]]], dtype=torch.int32)
    free, unforced = Recorder(), Recorder()
    gpu.one_row([3], sink=free)
    gpu.decoder.forced = None
    gpu.one_row([3], sink=unforced)
    assert sink.experts(0).tolist() == [[4, 1]] != free.experts(0).tolist() == unforced.experts(0).tolist()
    kv.free()


class ServedHere(Direct):
    """Serves each layer before its experts are launched: what the host does while a graph waits, one by one."""

    def __init__(self, source: CudaSource, mailbox: Mailbox, stamp: int) -> None:
        super().__init__(source)
        self.source, self.mailbox, self.stamp = source, mailbox, stamp

    def begin(self, layer: int, experts: Tensor) -> None:
        order = sorted(self.source.layers).index(layer)
        posted = self.mailbox.take(order, self.stamp, lambda: True)
        assert posted == sorted(set(experts.flatten().tolist()) - {-1})
        self.source.serve(layer, posted)


@pytest.mark.parametrize("cell", [1, 16])
def test_a_served_step_gives_the_bits_of_a_leased_one(cell: int) -> None:
    _, gpu = both("qwen3_moe", "int4")
    kvs = [gpu.pool.sequence() for _ in range(1 if cell == 1 else 2)]
    network = gpu.decoder._network
    with CudaSource.open(gpu.experts.pack, slots=6, device=CPU) as source:
        for stamp in (1, 2):
            rows = decode_rows([SequenceId(i) for i in range(len(kvs))], kvs, tokens(len(kvs), stamp), CPU, cell=cell)
            leased = gpu.decoder.forward(rows, gpu.experts, range(len(kvs)))
            assert source.serves(2 * len(kvs))
            (part,) = passes(rows)
            mailbox = Mailbox(2, cell * 2, pinned=False)
            step = replace(gpu.decoder._eager_step(part, None), mailbox=mailbox.words)
            step.stamp[0] = stamp
            with torch.inference_mode():
                served = network.head(network.hidden(step, ServedHere(source, mailbox, stamp)))
            assert torch.equal(served[: len(kvs)], leased)
        source.check_integrity()
        assert source.counters().misses
    for kv in kvs:
        kv.free()


def test_an_expert_that_cannot_be_read_fails_the_step_and_nothing_else() -> None:
    _, gpu = both("qwen3_moe")

    class Broken(MemoryBlocks):
        resident = False

        def lease(self, layer: int, routed: Any, keep: Any = None) -> Any:
            raise TransferError("an expert could not be read", fix="check the disk, then try again")

    kv = gpu.pool.sequence()
    before = gpu.one_row([1], kv)
    with pytest.raises(TransferError):
        replace(gpu, experts=Broken(gpu.experts.pack, CPU)).one_row([2], kv)
    kv.truncate(0)
    assert torch.equal(gpu.one_row([1], kv), before)
    kv.free()
