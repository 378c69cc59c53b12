"""Dense weights in another dtype than stored: cast piece by piece, to the same bits as in one go."""

from collections.abc import Callable

import pytest
import torch

from steerpipe.core.errors import PackError
from steerpipe.model.checkpoint import Checkpoint
from steerpipe.store import dense_weights
from steerpipe.store.formats import DenseFormat
from steerpipe.store.plan import PackOptions
from steerpipe.store.reader import Pack, open_pack

EMBED = "model.embed_tokens.weight"  # [64, 32]


@pytest.mark.parametrize("piece_bytes", [1, 5 * 32 * 2])  # a row; rows that do not divide the weight
@pytest.mark.parametrize("form", list(DenseFormat))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_piece_is_cast_to_the_bits_of_the_whole(
    checkpoint: Checkpoint, make_pack: Callable[..., Pack], dtype: torch.dtype, form: DenseFormat, piece_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    pack = make_pack(checkpoint, PackOptions(dense=form))
    stored = pack.read_dense()  # each in one piece
    monkeypatch.setattr(dense_weights, "PIECE_BYTES", piece_bytes)
    found = pack.dense(dtype)
    assert list(found) == list(stored)
    for name, weight in stored.items():
        assert torch.equal(found[name].to(dtype), weight.to(dtype)), name
    assert found[EMBED].dtype is dtype


def test_routers_and_norms_are_not_rounded(checkpoint: Checkpoint, make_pack: Callable[..., Pack]) -> None:
    stored = make_pack(checkpoint).dense(torch.float16)
    assert stored["model.layers.1.mlp.gate.weight"].dtype is torch.bfloat16
    assert stored["model.norm.weight"].dtype is torch.bfloat16


def test_a_flipped_bit_is_found_in_any_piece(
    checkpoint: Checkpoint, make_pack: Callable[..., Pack], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dense_weights, "PIECE_BYTES", 1024)
    pack = make_pack(checkpoint)
    entry = pack.dense_entries[EMBED]
    with entry.file.open("r+b") as file:
        file.seek(entry.offset + entry.size_bytes - 1)
        last = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([last ^ 1]))
    with pytest.raises(PackError, match=r"embed_tokens\.weight in .* has checksum"):
        pack.dense(torch.float32)[EMBED]
    assert open_pack(pack.folder, verify=False).dense(torch.float32)[EMBED].shape == (64, 32)
