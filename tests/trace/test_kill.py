"""A kill at any moment loses at most the prompt in flight, and the next run goes on from there."""

import os
import random
import shutil
import signal
from pathlib import Path

import pytest

from steerpipe.core.errors import DamagedFileError
from steerpipe.trace.reader import TraceReader
from steerpipe.trace.writer import TraceWriter
from tests.trace.samples import assert_same, header, sequence


def check_prefix(folder: Path) -> int:
    """Every prompt of the trace is whole and they are the first ones; how many."""
    count = 0
    if b"\n" not in (folder / "index.jsonl").read_bytes():  # killed before the first: a reader refuses it
        return count
    for number, found in enumerate(TraceReader(folder)):
        assert_same(found, sequence(number))
        count += 1
    return count


def finish(folder: Path, until: int) -> None:
    with TraceWriter(folder, header(), shard_bytes=400) as writer:
        for number in range(until):
            if f"prompt-{number}" not in writer.finished:
                writer.write([sequence(number)], "")


def test_cut_at_every_byte_of_the_last_prompt_it_goes_on(tmp_path: Path) -> None:
    """The disk after a kill: the bytes of the shard up to somewhere, then the bytes of the index up to somewhere."""
    whole, before = tmp_path / "whole", tmp_path / "before"
    finish(before, 3)
    shutil.copytree(before, whole)
    finish(whole, 4)
    shard, index = "shard-00000.trace", "index.jsonl"
    ends = {name: ((before / name).stat().st_size, (whole / name).stat().st_size) for name in (shard, index)}
    states = [(size, ends[index][0]) for size in range(ends[shard][0], ends[shard][1] + 1)]
    states += [(ends[shard][1], size) for size in range(ends[index][0], ends[index][1] + 1)]
    for number, (shard_size, index_size) in enumerate(states):
        torn = tmp_path / f"torn-{number}"
        shutil.copytree(whole, torn)
        os.truncate(torn / shard, shard_size)
        os.truncate(torn / index, index_size)
        assert check_prefix(torn) == (4 if index_size == ends[index][1] else 3)
        finish(torn, 5)
        assert check_prefix(torn) == 5


# A fork of a test process that has grown takes half a second: most of them are for `make test-slow`.
@pytest.mark.parametrize("seed", [*range(12), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(12, 40))])
def test_killed_at_a_random_moment_only_the_prompt_in_flight_is_lost(seed: int, tmp_path: Path) -> None:
    """A real process, a real SIGKILL, three times."""
    draw = random.Random(seed)
    kept = 0
    for _ in range(3):
        told, tell = os.pipe()
        child = os.fork()
        if child == 0:
            _write_until_killed(tmp_path / "trace", tell)
        os.close(tell)
        announced = _kill_after(child, told, draw)
        kept_before, kept = kept, check_prefix(tmp_path / "trace")
        assert kept >= max(kept_before, announced), "a prompt that was finished is gone"
        assert kept <= announced + 1, "a prompt that nobody wrote"
    finish(tmp_path / "trace", kept + 2)
    assert check_prefix(tmp_path / "trace") == kept + 2


def _write_until_killed(folder: Path, tell: int) -> None:
    """In the child: says each prompt's number after it was written. Never returns."""
    try:
        writer = TraceWriter(folder, header(), shard_bytes=400)
        number = len(writer.finished)
        os.write(tell, number.to_bytes(4, "big"))
        while True:
            writer.write([sequence(number)], "")
            number += 1
            os.write(tell, number.to_bytes(4, "big"))
    finally:
        os._exit(1)  # only after an error: the parent's kill does not run this


def _kill_after(child: int, told: int, draw: random.Random) -> int:
    """Kills after some messages and a random wait in turns of the loop; the number in the last message."""
    heard = b""
    for _ in range(draw.randrange(1, 8)):
        heard = os.read(told, 4)
        assert len(heard) == 4, "the child ended by itself"
    for _ in range(draw.randrange(20_000)):
        pass
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while piece := os.read(told, 4096):  # what it still said before the kill
        heard = (heard + piece)[-4:]
    os.close(told)
    return int.from_bytes(heard, "big")


def test_a_torn_tail_that_is_longer_than_what_follows_is_gone(tmp_path: Path) -> None:
    finish(tmp_path, 2)
    for name in ("shard-00000.trace", "index.jsonl"):
        with open(tmp_path / name, "ab") as file:
            file.write(b"x" * 4000 + b"\n" + b"y" * 999)
    (tmp_path / "shard-00001.trace").write_bytes(b"begun")
    with TraceWriter(tmp_path, header(), shard_bytes=400) as writer:
        assert writer.lost_bytes == 10_005
    assert not (tmp_path / "shard-00001.trace").exists()
    finish(tmp_path, 3)
    assert check_prefix(tmp_path) == 3


def test_a_power_cut_that_took_the_last_shards_bytes_costs_those_prompts_alone(tmp_path: Path) -> None:
    finish(tmp_path, 3)
    shard = tmp_path / "shard-00000.trace"
    last = TraceReader(tmp_path).entries[-1]
    content = shard.read_bytes()
    shard.write_bytes(content[: last.offset] + bytes(len(content) - last.offset))  # pages that were never written
    with TraceWriter(tmp_path, header(), shard_bytes=400) as writer:
        assert writer.finished == {"prompt-0", "prompt-1"} and writer.lost_bytes > 0
    finish(tmp_path, 3)
    assert check_prefix(tmp_path) == 3


def test_damage_with_whole_prompts_behind_it_is_not_cut_away(tmp_path: Path) -> None:
    finish(tmp_path, 3)
    shard = tmp_path / "shard-00000.trace"
    content = bytearray(shard.read_bytes())
    content[1] ^= 1
    shard.write_bytes(bytes(content))
    with pytest.raises(DamagedFileError, match="prompt-0, with whole prompts behind it"):
        TraceWriter(tmp_path, header())
    assert shard.read_bytes() == bytes(content)
