"""What is written is read back bit for bit; what is damaged, foreign or newer is refused with a fix."""

import json
import zlib
from pathlib import Path

import numpy as np
import pytest

from steerpipe.core.errors import DamagedFileError, InputError
from steerpipe.predict.records import Geometry, TracedSequence
from steerpipe.trace.reader import TraceReader
from steerpipe.trace.record import decode, encode
from steerpipe.trace.writer import TraceWriter
from tests.trace.samples import assert_same, header, sequence

WIDE = Geometry(layers=2, experts=300, top_k=3, hidden=4)


def write(folder: Path, numbers: range = range(5), shared: bool = True, **options: bool) -> list[TracedSequence]:
    about = header(**options)
    given = [sequence(number, of=about, shared=shared) for number in numbers]
    with TraceWriter(folder, about) as writer:
        for each in given:
            writer.write([each], "made up")
    return given


@pytest.mark.parametrize(
    "options", [{}, {"weights": True}, {"weights": True, "states": True}, {"states": True, "shared": False}]
)
def test_what_is_written_is_read_back(options: dict[str, bool], tmp_path: Path) -> None:
    given = write(tmp_path / "trace", **options)
    reader = TraceReader(tmp_path / "trace")
    assert len(reader) == 5 and reader.tokens == sum(len(each.tokens) for each in given)
    for ours, theirs in zip(given, reader, strict=True):
        assert_same(ours, theirs)
    assert reader.geometry == header().geometry and reader.vocabulary == 100


def test_many_experts_and_large_vocabularies_keep_their_ids(tmp_path: Path) -> None:
    about = header(WIDE, vocabulary=200_000)
    given = sequence(1, length=50, of=about)
    assert given.experts.max() > 256 and given.tokens.max() > 1 << 16
    with TraceWriter(tmp_path, about) as writer:
        writer.write([given], "")
    (found,) = TraceReader(tmp_path)
    assert_same(given, found)
    assert found.experts.dtype == np.uint16


def test_windows_of_one_prompt_are_one_line_and_come_back_apart(tmp_path: Path) -> None:
    first, second = sequence(1, 7, "long"), sequence(2, 4, "long")
    with TraceWriter(tmp_path, header()) as writer:
        writer.write([TracedSequence("long", first.tokens, 7, first.experts), second], "")
        assert writer.finished == {"long"}
    reader = TraceReader(tmp_path)
    assert len(reader.entries) == 1 and len(reader) == 2 and reader.prompts == ("long",)
    found = list(reader)
    assert [len(each.tokens) for each in found] == [7, 4]
    assert [each.prompt_tokens for each in found] == [7, second.prompt_tokens]
    assert np.array_equal(found[1].experts, second.experts)


def test_states_can_stay_on_the_disk(tmp_path: Path) -> None:
    write(tmp_path, states=True)
    assert all(each.states is None for each in TraceReader(tmp_path, states=False))
    assert all(each.states is not None for each in TraceReader(tmp_path))


def test_shards_follow_each_other(tmp_path: Path) -> None:
    given = [sequence(number) for number in range(20)]
    with TraceWriter(tmp_path, header(), shard_bytes=300) as writer:
        for each in given[:11]:
            writer.write([each], "")
    with TraceWriter(tmp_path, header(), shard_bytes=300) as writer:
        assert len(writer.finished) == 11
        for each in given[11:]:
            writer.write([each], "")
    assert len(list(tmp_path.glob("shard-*.trace"))) > 3
    for ours, theirs in zip(given, TraceReader(tmp_path), strict=True):
        assert_same(ours, theirs)


def test_prompts_are_selected_and_replayed(tmp_path: Path) -> None:
    given = write(tmp_path)
    reader = TraceReader(tmp_path)
    chosen = reader.select(["prompt-3", "prompt-1"])
    assert [each.prompt for each in chosen] == ["prompt-1", "prompt-3"] and len(reader) == 5
    recording = reader.recording(["prompt-3", "prompt-1"])
    assert np.array_equal(recording.routing, np.concatenate([given[1].experts, given[3].experts]))
    assert recording.sequence.tolist() == [0] * len(given[1].tokens) + [1] * len(given[3].tokens)
    assert recording.experts == 8 and reader.recording().tokens == reader.tokens
    few = reader.recording(tokens=len(given[0].tokens) + 1)
    assert few.sequence.tolist() == [0] * len(given[0].tokens) + [1]
    assert np.array_equal(few.routing[-1], given[1].experts[0])
    with pytest.raises(InputError, match="no prompt 'prompt-9'"):
        reader.select(["prompt-1", "prompt-9"])


def test_a_reader_sees_the_finished_prompts_of_a_trace_that_is_being_written(tmp_path: Path) -> None:
    with TraceWriter(tmp_path, header()) as writer:
        writer.write([sequence(1)], "")
        assert TraceReader(tmp_path).prompts == ("prompt-1",)
        writer.write([sequence(2)], "")
        assert TraceReader(tmp_path).prompts == ("prompt-1", "prompt-2")


def test_two_writers_on_one_folder_are_refused(tmp_path: Path) -> None:
    with TraceWriter(tmp_path, header()), pytest.raises(InputError, match="another process is writing"):
        TraceWriter(tmp_path, header())
    with TraceWriter(tmp_path, header()) as writer:  # the refused one has left nothing behind
        writer.write([sequence(1)], "")


def test_another_model_or_other_options_do_not_go_on_in_the_folder(tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(InputError, match=r"options\.weights False instead of True"):
        TraceWriter(tmp_path, header(weights=True))
    with pytest.raises(InputError, match=r"geometry\.experts 8 instead of 300"):
        TraceWriter(tmp_path, header(WIDE))
    assert len(TraceReader(tmp_path)) == 5


def test_a_folder_with_other_things_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(InputError, match=r"not a trace: it holds thesis\.txt"):
        TraceWriter(tmp_path, header())
    assert [each.name for each in tmp_path.iterdir()] == ["thesis.txt"]
    with pytest.raises(InputError, match=r"no trace\.json"):
        TraceReader(tmp_path)


def test_a_newer_schema_is_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path)
    raw = json.loads((tmp_path / "trace.json").read_bytes())
    (tmp_path / "trace.json").write_text(json.dumps(raw | {"schema": 2}))
    with pytest.raises(InputError, match="schema 2; this steerpipe reads 1"):
        TraceReader(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{", b'{"kind": "other", "schema": 1}', b'{"kind": "steerpipe-trace", "schema": 1}']
)
def test_a_header_that_is_none_is_refused(content: bytes, tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "trace.json").write_bytes(content)
    with pytest.raises(DamagedFileError, match="header"):
        TraceReader(tmp_path)


def test_an_unknown_key_in_the_header_is_refused(tmp_path: Path) -> None:
    write(tmp_path)
    raw = json.loads((tmp_path / "trace.json").read_bytes())
    raw["options"]["temperature"] = 2.0
    (tmp_path / "trace.json").write_text(json.dumps(raw))
    with pytest.raises(DamagedFileError, match="temperature"):
        TraceReader(tmp_path)


@pytest.mark.parametrize(
    ("part", "key", "value"),
    [
        ("geometry", "experts", "8"), ("geometry", "layers", 3.0), ("geometry", "top_k", 9), ("geometry", "hidden", 0),
        ("options", "states", 1), ("options", "batch", 0), ("model", "digest", None), (None, "vocabulary", "100"),
        (None, "vocabulary", True), (None, "generator", 7), (None, "options", [1]),
    ],
)  # fmt: skip
def test_a_header_of_other_types_or_ranges_is_refused(
    part: str | None, key: str, value: object, tmp_path: Path
) -> None:
    write(tmp_path)
    raw = json.loads((tmp_path / "trace.json").read_bytes())
    (raw if part is None else raw[part])[key] = value
    (tmp_path / "trace.json").write_text(json.dumps(raw))
    with pytest.raises(DamagedFileError, match="not a whole header"):
        TraceReader(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("prompt", 5), ("sha256", None), ("tokens", "7"), ("prompt_tokens", "7"), ("prompt_tokens", -3),
        ("prompt_tokens", 99), ("prompt_tokens", True), ("lengths", []), ("lengths", ["7"]), ("lengths", [0, 6]),
        ("sections", [["tokens", "9", "00"]]), ("sections", [["tokens", -9, "00"]]), ("sections", [7]),
    ],
)  # fmt: skip
def test_a_line_of_other_types_or_ranges_is_refused(key: str, value: object, tmp_path: Path) -> None:
    about = header()
    with TraceWriter(tmp_path, about) as writer:
        writer.write([sequence(1, length=6)], "")
    index = tmp_path / "index.jsonl"
    index.write_text(json.dumps(json.loads(index.read_bytes()) | {key: value}) + "\n")
    with pytest.raises(DamagedFileError, match="line 1"):
        TraceReader(tmp_path)


@pytest.mark.parametrize("content", [b"", b'{"prompt": "torn'])
def test_a_trace_without_a_finished_prompt_is_refused(content: bytes, tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "index.jsonl").write_bytes(content)
    with pytest.raises(InputError, match="no finished prompt yet"):
        TraceReader(tmp_path)


def test_a_token_beyond_the_vocabulary_is_refused(tmp_path: Path) -> None:
    (given,) = write(tmp_path, range(1))
    largest = int(given.tokens.max())
    raw = json.loads((tmp_path / "trace.json").read_bytes())
    for vocabulary in (largest + 1, largest):
        (tmp_path / "trace.json").write_text(json.dumps(raw | {"vocabulary": vocabulary}))
        if vocabulary > largest:
            assert len(list(TraceReader(tmp_path))) == 1
    with pytest.raises(DamagedFileError, match=f"token {largest} of a vocabulary of {largest}"):
        list(TraceReader(tmp_path))


def test_every_flipped_byte_of_a_shard_is_found(tmp_path: Path) -> None:
    write(tmp_path, range(2))
    shard = tmp_path / "shard-00000.trace"
    content = shard.read_bytes()
    for place in range(len(content)):
        shard.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(DamagedFileError, match="damaged in the"):
            list(TraceReader(tmp_path))


def test_a_shard_that_lacks_bytes_or_is_gone_is_refused_at_once(tmp_path: Path) -> None:
    write(tmp_path)
    shard = tmp_path / "shard-00000.trace"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(DamagedFileError, match="bytes that the index counts on"):
        TraceReader(tmp_path)
    shard.unlink()
    with pytest.raises(DamagedFileError, match="bytes that the index counts on"):
        TraceReader(tmp_path)


@pytest.mark.parametrize("line", [b"", b"{}", b"7", b'{"prompt": "x"}'])
def test_a_damaged_line_in_the_middle_is_refused_by_reader_and_writer(line: bytes, tmp_path: Path) -> None:
    write(tmp_path)
    index = tmp_path / "index.jsonl"
    lines = index.read_bytes().split(b"\n")
    index.write_bytes(b"\n".join([lines[0], line, *lines[2:]]))
    with pytest.raises(DamagedFileError, match="line 2"):
        TraceReader(tmp_path)
    before = index.read_bytes()
    with pytest.raises(DamagedFileError, match="line 2"):
        TraceWriter(tmp_path, header())
    assert index.read_bytes() == before


def test_a_missing_line_is_noticed(tmp_path: Path) -> None:
    write(tmp_path)
    index = tmp_path / "index.jsonl"
    lines = index.read_bytes().splitlines(keepends=True)
    index.write_bytes(b"".join([lines[0], *lines[2:]]))
    with pytest.raises(DamagedFileError, match="line 2"):
        TraceReader(tmp_path)


def test_an_index_without_its_header_is_not_overwritten(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "trace.json").unlink()
    with pytest.raises(DamagedFileError, match=r"no trace\.json"):
        TraceWriter(tmp_path, header())


def test_a_section_that_would_unpack_to_more_or_less_than_its_shape_is_refused(tmp_path: Path) -> None:
    (given,) = write(tmp_path, range(1))
    for content in (bytes(10**7), b"\1", b""):
        sections = encode([given], header()) | {"experts": zlib.compress(content)}
        with pytest.raises(DamagedFileError, match="'experts'"):
            decode(sections, header(), "p", [len(given.tokens)], 1)
