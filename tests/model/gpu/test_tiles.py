"""Pairs in tiles by expert, and the memory that they travel in."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from steerpipe.model.gpu.tiles import Tiles, TileStaging

CPU = torch.device("cpu")


@st.composite
def choices(draw: st.DrawFn) -> tuple[NDArray[np.int32], int]:
    count = draw(st.integers(1, 9))
    experts = draw(st.lists(st.integers(-1, count - 1), min_size=1, max_size=150))
    return np.array(experts, dtype=np.int32), count


@given(choices(), st.randoms())
def test_every_pair_is_in_one_tile_of_its_expert_in_one_wave(
    chosen: tuple[NDArray[np.int32], int], random: object
) -> None:
    experts, count = chosen
    tiles = Tiles(experts, count)
    left = sorted({int(expert) for expert in experts if expert >= 0})
    random.shuffle(left)  # type: ignore[attr-defined]
    middle = random.randint(0, len(left))  # type: ignore[attr-defined]
    seen: list[int] = []
    for wave in (left[:middle], left[middle:]):
        of, pairs = tiles.of(wave)
        assert set(of.tolist()) == set(wave)
        for expert, row in zip(of, pairs, strict=True):
            own = row[row >= 0]
            assert len(own) and (experts[own] == expert).all()
            seen.extend(own.tolist())
        for expert in wave:
            assert (of == expert).sum() == -(-int((experts == expert).sum()) // 16), "tiles are full but for the last"
    assert sorted(seen) == np.flatnonzero(experts >= 0).tolist()


def test_what_is_sent_arrives_aligned_with_unused_tiles_behind() -> None:
    staging = TileStaging(CPU)
    sent = []
    for count in (1, 4, 6, 300):  # the last needs more memory than there is at first
        expert = np.arange(count, dtype=np.int32)
        pairs = np.arange(16 * count, dtype=np.int32).reshape(count, 16)
        tile_expert, tile_pairs = staging.send(expert, pairs)
        assert tile_expert.data_ptr() % 16 == tile_pairs.data_ptr() % 16 == 0
        sent.append((count, tile_expert, tile_pairs))
    for count, tile_expert, tile_pairs in sent:
        assert tile_expert.tolist() == list(range(count)) + [-1] * (-count % 4)
        assert tile_pairs.flatten().tolist() == list(range(16 * count)) + [-1] * (16 * (-count % 4))


def test_ids_keep_their_shape() -> None:
    staging = TileStaging(CPU)
    ids = np.array([[3, -1], [0, 2], [-1, -1]], dtype=np.int32)
    first, second = staging.send_ids(ids), staging.send_ids(ids + 1)
    assert first.tolist() == ids.tolist() and second.tolist() == (ids + 1).tolist()
    assert second.data_ptr() % 16 == 0


def test_memory_is_used_again_after_a_reset() -> None:
    staging = TileStaging(CPU)
    one = np.zeros((1, 4), dtype=np.int32)
    first = staging.send_ids(one).data_ptr()
    assert staging.send_ids(one).data_ptr() != first
    staging.reset()
    assert staging.send_ids(one).data_ptr() == first
