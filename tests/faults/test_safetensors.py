"""A safetensors file that is cut short, or whose header lies, is told apart from a good one before a byte is used."""

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from steerpipe.core.errors import CheckpointError, DamagedFileError, TensorError, TransferError
from steerpipe.model.safetensors import read_header, read_tensor
from tests.faults import folders
from tests.faults.running import refused

GOOD: dict[str, Any] = {
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
}
DATA = bytes(range(32))
AGAIN = "download or copy the file again"


def complaint(file: Path) -> str:
    with pytest.raises(DamagedFileError) as caught:
        read_header(file)
    message = str(caught.value)
    assert f"{file} is damaged: " in message
    assert AGAIN in message
    return message


def written(tmp_path: Path, header: object = GOOD, data: bytes = DATA) -> Path:
    folders.join(tmp_path / "x.safetensors", header, data)
    return tmp_path / "x.safetensors"


def test_what_we_read_is_what_safetensors_wrote(tmp_path: Path) -> None:
    kinds = [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.uint8, torch.int32, torch.int64]
    stored = {str(i): torch.arange(24).reshape(2, 3, 4).to(kind) for i, kind in enumerate(kinds)}
    stored |= {"scalar": torch.tensor(1.5), "empty": torch.zeros(0, 4), "one": torch.tensor([7.0])}
    save_file(stored, tmp_path / "x.safetensors", metadata={"format": "pt"})
    entries = read_header(tmp_path / "x.safetensors")
    assert entries.keys() == stored.keys()
    for name, tensor in load_file(tmp_path / "x.safetensors").items():
        read = read_tensor(entries[name])
        assert read.dtype == tensor.dtype and torch.equal(read, tensor)


def test_the_file_that_the_tests_damage_is_good(tmp_path: Path) -> None:
    assert read_header(written(tmp_path)).keys() == {"a", "b"}


@pytest.mark.parametrize("kept", [0, 1, 7])
def test_a_cut_inside_the_length(tmp_path: Path, kept: int) -> None:
    file = written(tmp_path)
    os.truncate(file, kept)
    assert f"it has {kept} bytes, not even the 8 of a header's length" in complaint(file)


def test_a_cut_inside_the_header(tmp_path: Path) -> None:
    file = written(tmp_path)
    (length,) = struct.unpack("<Q", file.read_bytes()[:8])
    for kept in (8, 9, 8 + length // 2, 7 + length):
        os.truncate(written(tmp_path), kept)
        assert f"its header should have {length} bytes, but the whole file has {kept}" in complaint(file)


def test_a_cut_inside_the_data_says_how_much_is_there(tmp_path: Path) -> None:
    file = written(tmp_path)
    whole = file.stat().st_size
    for missing in (1, 8, 20, 32):
        os.truncate(written(tmp_path), whole - missing)
        assert f"its tensors need {whole} bytes, but the file has {whole - missing}" in complaint(file)


def test_bytes_after_the_last_tensor(tmp_path: Path) -> None:
    assert "but the file has" in complaint(written(tmp_path, data=DATA + b"\0"))


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 10**8 + 1, 10_000])
def test_a_header_longer_than_the_file(tmp_path: Path, length: int) -> None:
    file = written(tmp_path)
    file.write_bytes(struct.pack("<Q", length) + file.read_bytes()[8:])
    assert f"its header should have {length} bytes" in complaint(file)


@pytest.mark.parametrize(
    "header",
    [
        b"not json", b"", b"\xff" * 40, b"[" * 50_000, b'{"a": ' * 20_000, b'{"a": ' + b"9" * 5000 + b"}",
        b'{"a": NaN', b"\0" * 64,
    ],
)  # fmt: skip
def test_a_header_that_is_not_json(tmp_path: Path, header: bytes) -> None:
    assert "its header is not JSON" in complaint(written(tmp_path, header))


@pytest.mark.parametrize("header", [[], "text", 5, None, True])
def test_a_header_that_is_not_an_object(tmp_path: Path, header: object) -> None:
    assert "its header is not an object" in complaint(written(tmp_path, header))


@pytest.mark.parametrize(
    "entry",
    [
        None, 5, "text", [], {}, {"dtype": "F32"}, {"dtype": "F32", "shape": [2, 3]},
        {"dtype": "F32", "shape": "23", "data_offsets": [0, 24]},
        {"dtype": "F32", "shape": [2.0, 3.0], "data_offsets": [0, 24]},
        {"dtype": "F32", "shape": [True, 6], "data_offsets": [0, 24]},
        {"dtype": "F32", "shape": [-2, -3], "data_offsets": [0, 24]},
        {"dtype": "F32", "shape": [float("inf")], "data_offsets": [0, 24]},
        {"dtype": "F32", "shape": [float("nan")], "data_offsets": [0, 24]},
        {"dtype": "F32", "shape": [10**40, 0], "data_offsets": [0, 24]},
        {"dtype": "F32", "shape": 6, "data_offsets": [0, 24]},
        {"dtype": "F32", "shape": [2, 3], "data_offsets": [0]},
        {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 12, 24]},
        {"dtype": "F32", "shape": [2, 3], "data_offsets": "02"},
        {"dtype": "F32", "shape": [2, 3], "data_offsets": [0.0, 24.0]},
        {"dtype": "F32", "shape": [2, 3], "data_offsets": [False, 24]},
        {"dtype": ["F32"], "shape": [2, 3], "data_offsets": [0, 24]},
    ],
)  # fmt: skip
def test_an_entry_that_is_not_that_of_a_tensor(tmp_path: Path, entry: object) -> None:
    assert "its entry for 'a' is not that of a tensor" in complaint(written(tmp_path, GOOD | {"a": entry}))


@pytest.mark.parametrize("offsets", [[-24, 0], [0, 23], [0, 25], [24, 0], [0, 2**63], [10**30, 10**30 + 1]])
def test_offsets_that_do_not_fit_the_shape(tmp_path: Path, offsets: list[int]) -> None:
    message = complaint(written(tmp_path, GOOD | {"a": GOOD["a"] | {"data_offsets": offsets}}))
    assert f"'a' of shape [2, 3] cannot lie in bytes {offsets[0]} to {offsets[1]}" in message


@pytest.mark.parametrize("offsets", [[0, 8], [16, 24], [23, 31], [25, 33], [2**62, 2**62 + 8]])
def test_tensors_that_overlap_or_leave_a_hole(tmp_path: Path, offsets: list[int]) -> None:
    message = complaint(written(tmp_path, GOOD | {"b": GOOD["b"] | {"data_offsets": offsets}}))
    assert "its tensors overlap or leave a hole at byte" in message


def test_tensors_beyond_the_end_of_the_file(tmp_path: Path) -> None:
    beyond = GOOD | {"c": {"dtype": "F32", "shape": [1000], "data_offsets": [32, 4032]}}
    assert "its tensors need" in complaint(written(tmp_path, beyond))


def test_a_name_that_is_given_twice_leaves_a_hole(tmp_path: Path) -> None:
    entry = json.dumps(GOOD["b"])
    header = f'{{"b": {json.dumps(GOOD["a"])}, "b": {entry}}}'.encode()
    assert "leave a hole" in complaint(written(tmp_path, header))


def test_a_file_that_shrinks_after_its_header_was_read(tmp_path: Path) -> None:
    file = written(tmp_path)
    entries = read_header(file)
    os.truncate(file, file.stat().st_size - 3)
    with pytest.raises(DamagedFileError, match="became shorter while it was read"):
        read_tensor(entries["b"])


def test_a_file_that_vanishes_after_its_header_was_read(tmp_path: Path) -> None:
    file = written(tmp_path)
    entries = read_header(file)
    file.unlink()
    with pytest.raises(TransferError, match="reading") as caught:
        read_tensor(entries["a"])
    assert "check the disk" in caught.value.fix


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kept=st.floats(0, 1, exclude_max=True))
def test_a_cut_anywhere_is_found(pristine: Path, tmp_path: Path, kept: float) -> None:
    whole = (pristine / "model.safetensors").read_bytes()
    file = tmp_path / "x.safetensors"
    file.write_bytes(whole[: int(len(whole) * kept)])
    complaint(file)


_LEAVES = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8)
_JSON = st.recursive(_LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner))
_ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "I64", "F4", "", "f32"]) | _JSON,
        "shape": st.lists(st.integers(-2, 6), max_size=3) | _JSON,
        "data_offsets": st.lists(st.integers(-4, 40), min_size=2, max_size=2) | _JSON,
    }
)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(header=st.dictionaries(st.text(max_size=8), _ENTRIES | _JSON, max_size=3) | _JSON, data=st.binary(max_size=40))
def test_no_header_gets_past_the_checks_and_into_the_reader(tmp_path: Path, header: object, data: bytes) -> None:
    """Either every tensor lies inside the file, whole and alone, or the file is refused in words."""
    file = written(tmp_path, header, data)
    try:
        entries = read_header(file)
    except (DamagedFileError, TensorError):
        return
    assert sum(entry.size_bytes for entry in entries.values()) == len(data)
    for entry in entries.values():
        assert read_tensor(entry).shape == entry.shape


def test_the_command_line_says_that_the_weights_are_cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    os.truncate(file, file.stat().st_size - 1)
    message = refused(folder)
    assert f"{file} is damaged: its tensors need {file.stat().st_size + 1} bytes" in message
    assert AGAIN in message


def test_a_folder_in_the_place_of_the_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()
    message = refused(folder)
    assert f"{folder / 'model.safetensors'} cannot be read: Is a directory" in message
    assert "check that it is a file" in message


def test_weights_that_may_not_be_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.open

    def forbidden(self: Path, *rest: Any, **named: Any) -> Any:
        if self.suffix == ".safetensors":
            raise PermissionError(13, "Permission denied", str(self))
        return real(self, *rest, **named)

    monkeypatch.setattr(Path, "open", forbidden)  # root may read everything, so the mode bits would not do
    message = refused(folder)
    assert "model.safetensors cannot be read: Permission denied" in message
    assert "permissions" in message


def test_an_unreadable_file_is_an_error_of_the_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="No such file"):
        read_header(tmp_path / "gone.safetensors")
