"""From the engine's rows to one buffer of integers."""

import numpy as np
import pytest
import torch

from steerpipe.core.ids import SequenceId
from steerpipe.model.gpu.rows import SMALLEST_ROOM, Packing, passes, room_for, routing_buffer
from steerpipe.model.kv_cache import KvPool, KvSequence
from steerpipe.model.step import decode_rows, prefill_rows
from tests.model.test_kv_cache import SPEC

CPU = torch.device("cpu")
NOBODY = SequenceId(0)


def sequences(*lengths: int) -> list[KvSequence]:
    pool = KvPool(SPEC, torch.float32, CPU, 200)
    found = []
    for length in lengths:
        kv = pool.sequence()
        kv.append(length)
        found.append(kv)
    return found


def test_a_chunk_is_one_pass_whose_padding_has_no_position() -> None:
    (kv,) = sequences(21)
    (part,) = passes(prefill_rows(NOBODY, kv, [7, 8, 9, 10], CPU, last=False))
    assert part.base == 16 and part.rows == 16 and part.kvs == (kv,) and part.keep_rows == 0
    assert part.positions.tolist() == [-1] * 5 + [21, 22, 23, 24] + [-1] * 7
    assert part.tokens[part.valid].tolist() == [7, 8, 9, 10]


@pytest.mark.parametrize("count", [1, 5, 16, 17, 33])
def test_a_batch_is_one_pass_per_cell(count: int) -> None:
    kvs = sequences(*range(1, count + 1))
    parts = list(passes(decode_rows([NOBODY] * count, kvs, list(range(count)), CPU, cell=16)))
    assert [part.rows for part in parts] == [16] * -(-count // 16)
    assert [kv for part in parts for kv in part.kvs] == kvs
    assert [int(part.positions[row]) for part in parts for row in part.valid] == list(range(1, count + 1))
    assert [int(part.tokens[row]) for part in parts for row in part.valid] == list(range(count))
    assert all((np.delete(part.positions, part.valid) == -1).all() for part in parts)


def test_the_one_row_class_is_a_pass_of_one_row() -> None:
    (part,) = passes(decode_rows([NOBODY], sequences(130), [3], CPU, cell=1))
    assert part.base is None and part.rows == 1 and part.keys == 131 and part.positions.tolist() == [130]


@pytest.mark.parametrize("cell", [1, 16])
def test_what_is_packed_comes_out_of_the_views(cell: int) -> None:
    kvs = sequences(130, 5, 300)[: 1 if cell == 1 else 3]
    (part,) = passes(decode_rows([NOBODY] * len(kvs), kvs, [4, 5, 6][: len(kvs)], CPU, cell=cell))
    packing = Packing.of(part)
    memory = torch.full((packing.words,), 99)
    packing.write(part, 11, memory.numpy())
    stamp, tokens, positions, turns, blocks = packing.views(memory)
    assert stamp.tolist() == [11]
    assert tokens.tolist() == part.tokens.tolist() and positions.tolist() == part.positions.tolist()
    assert turns.tolist() == [max(position, 0) for position in part.positions]
    for lane, kv in enumerate(kvs):
        assert blocks[lane, : len(kv.addresses)].tolist() == kv.addresses
    assert all(view.data_ptr() % 16 == 0 for view in (stamp, tokens, positions, turns, blocks))
    assert blocks.stride(0) % 16 == 0, "Triton would compile another kernel"


def test_a_chunk_has_one_list_of_blocks() -> None:
    (kv,) = sequences(250)
    (part,) = passes(prefill_rows(NOBODY, kv, [1] * 20, CPU))
    packing = Packing.of(part)
    memory = torch.zeros(packing.words, dtype=torch.int64)
    packing.write(part, 0, memory.numpy())
    blocks = packing.views(memory)[-1]
    assert blocks.shape[0] == 1 and blocks[0, :3].tolist() == kv.addresses


def test_addresses_are_where_the_layers_of_a_block_begin() -> None:
    (kv,) = sequences(130)
    pool = KvPool(SPEC, torch.float32, CPU, 2)
    for layer, offset in enumerate(pool.layer_bytes):
        starts = [keys.data_ptr() for _, keys, _ in kv.read(layer, 0, 129)]
        assert starts == [address + offset for address in kv.addresses]


def test_room_grows_by_powers_of_two() -> None:
    assert room_for(1) == room_for(SMALLEST_ROOM) == SMALLEST_ROOM
    assert room_for(SMALLEST_ROOM + 1) == 2 * SMALLEST_ROOM
    assert room_for(32_768) == 32_768 and room_for(32_769) == 65_536


@pytest.mark.parametrize(("rows", "top_k"), [(1, 2), (16, 3), (5, 1)])
def test_routing_of_every_layer_is_aligned_and_whole(rows: int, top_k: int) -> None:
    memory = routing_buffer(4, rows, top_k, torch.int32, CPU)
    assert memory.shape == (4, rows, top_k)
    for layer in memory:
        assert layer.is_contiguous() and layer.data_ptr() % 16 == 0
    memory[2] = 5
    assert int((memory == 5).sum()) == rows * top_k
