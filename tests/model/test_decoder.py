"""Rows of a step, and what comes back for them."""

import numpy as np
import pytest
import torch

from steerpipe.core.errors import CapacityError
from steerpipe.core.ids import SequenceId
from steerpipe.model.checkpoint import open_checkpoint
from steerpipe.model.step import decode_rows, prefill_rows
from steerpipe.model.weights import build_weights
from tests.support import tiny
from tests.support.running import CPU, Recorder, load, loaded


def folder_of(**changes: object) -> object:
    return tiny.tiny("qwen2_moe", **changes).folder


def test_prefill_puts_position_p_into_row_p_mod_16_of_its_cell() -> None:
    kv = loaded(folder_of()).pool.sequence()
    kv.append(21)
    rows = prefill_rows(SequenceId(3), kv, list(range(100, 130)), CPU)
    assert kv.length == 51
    assert rows.positions.tolist() == list(range(16, 64))
    assert rows.valid.tolist() == list(range(5, 35))
    assert rows.tokens.tolist() == [0] * 5 + list(range(100, 130)) + [0] * 13
    assert [(u.row, u.rows, u.position, u.valid) for u in rows.units] == [
        (0, 16, 16, (5, 16)), (16, 16, 32, (0, 16)), (32, 16, 48, (0, 3)),
    ]  # fmt: skip
    assert rows.sequences == (SequenceId(3),) * 30
    assert (rows.cell, rows.highest) == (16, 63)
    kv.free()


def test_decode_puts_one_row_per_sequence_into_whole_cells() -> None:
    kvs = [loaded(folder_of()).pool.sequence() for _ in range(18)]
    for length, kv in enumerate(kvs):
        kv.append(length)
    rows = decode_rows([SequenceId(i) for i in range(18)], kvs, list(range(50, 68)), CPU, cell=16)
    assert rows.tokens.tolist() == list(range(50, 68)) + [0] * 14
    assert rows.positions.tolist() == list(range(18)) + [0] * 14
    assert [(u.row, u.rows, u.position, u.valid) for u in rows.units] == [(i, 1, i, (0, 1)) for i in range(18)]
    assert [kv.length for kv in kvs] == list(range(1, 19))
    for kv in kvs:
        kv.free()


def test_the_one_row_class_takes_one_sequence() -> None:
    pool = loaded(folder_of()).pool
    with pytest.raises(AssertionError, match="the one-row class decodes one sequence"):
        decode_rows([SequenceId(0), SequenceId(1)], [pool.sequence(), pool.sequence()], [1, 2], CPU, cell=1)


def test_a_decode_step_that_does_not_fit_changes_no_sequence() -> None:
    model = load(folder_of(), blocks=2)
    kvs = [model.pool.sequence() for _ in range(3)]
    for kv in kvs[:2]:
        kv.append(5)
    with pytest.raises(CapacityError):
        decode_rows([SequenceId(i) for i in range(3)], kvs, [1, 2, 3], CPU, cell=16)
    assert [kv.length for kv in kvs] == [5, 5, 0]


def test_logits_come_for_the_wanted_rows_in_the_order_asked_for() -> None:
    model = loaded(folder_of())
    tokens = tiny.tiny("qwen2_moe").tokens(40)
    every = model.prefill(tokens)
    kv = model.pool.sequence()
    picked = model.decoder.forward(prefill_rows(SequenceId(0), kv, tokens, CPU), model.experts, [39, 0, 17])
    assert torch.equal(picked, every[[39, 0, 17]])
    assert picked.dtype is torch.float32
    kv.truncate(0)
    none = model.decoder.forward(prefill_rows(SequenceId(0), kv, tokens, CPU), model.experts, [])
    assert none.shape == (0, model.spec.vocab)
    kv.free()


def test_routing_is_published_once_per_moe_layer_with_the_rows_of_the_batch() -> None:
    model = loaded(folder_of(mlp_only_layers=[1]))
    sink = Recorder()
    kvs = [model.pool.sequence() for _ in range(3)]
    kvs[1].append(7)
    model.batch(kvs, [1, 2, 3], sink=sink)
    assert [record.layer for record in sink.records] == [0, 2]
    for record in sink.records:
        assert record.sequences == (0, 1, 2)
        assert record.positions.tolist() == [0, 7, 0]
        assert record.experts.shape == record.weights.shape == (3, 2)
        assert (record.experts.dtype, record.weights.dtype) == (np.int64, np.float32)
        assert (np.diff(record.weights, axis=1) <= 0).all(), "rank order"
    for kv in kvs:
        kv.free()


def test_a_tied_head_is_the_embedding_itself() -> None:
    for tied in (True, False):
        checkpoint = open_checkpoint(folder_of(tie_word_embeddings=tied))
        names = checkpoint.family.names
        weights = build_weights(checkpoint.spec, names, checkpoint.read_dense(), torch.float32, CPU)
        assert (weights.head is weights.embed) == tied
        assert tied or not torch.equal(weights.head, weights.embed)


def test_the_router_stays_fp32_in_a_bf16_model_and_the_rest_does_not() -> None:
    checkpoint = open_checkpoint(folder_of())
    weights = build_weights(checkpoint.spec, checkpoint.family.names, checkpoint.read_dense(), torch.bfloat16, CPU)
    layer = weights.layers[0]
    assert layer.mlp.router.dtype is torch.float32
    stored = checkpoint.read("model.layers.0.mlp.gate.weight")
    assert torch.equal(layer.mlp.router, stored)
    assert {weights.embed.dtype, layer.attention.qkv.dtype, layer.mlp.shared.down.dtype} == {torch.bfloat16}


def test_dense_weights_are_read_without_any_expert() -> None:
    checkpoint = open_checkpoint(folder_of())
    dense = checkpoint.read_dense()
    assert not [name for name in dense if ".experts." in name]
    read = sum(tensor.nbytes for tensor in dense.values())
    experts = sum(e.size_bytes for name, e in checkpoint.entries.items() if ".experts." in name)
    assert read + experts == sum(entry.size_bytes for entry in checkpoint.entries.values())
