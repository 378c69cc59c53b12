"""Disks and packs that fail in mid-answer: the request is told, the others go on with the same bits, nothing leaks."""

import gc
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Collection, Sequence
from pathlib import Path

import pytest
import torch

from steerpipe.core.errors import TransferError
from steerpipe.core.ids import ExpertId, SequenceId
from steerpipe.engine.request import Request
from steerpipe.store.reader import Pack, open_pack
from steerpipe.store.verify import verify
from steerpipe.transfer.faulty import ALWAYS, Faults, FaultyLink
from steerpipe.transfer.lease import LadderLease
from steerpipe.transfer.link import Link
from steerpipe.transfer.source import LadderSource
from tests.transfer.packs import own_pack, tiny_pack
from tests.transfer.running import GREEDY, Run, prompt, resident, run


def open_source(pack: Pack, faults: Faults = Faults(), slots: int = 4, readers: int = 1) -> LadderSource:  # noqa: B008 (frozen)
    def wrap(link: Link) -> Link:
        return FaultyLink(link, faults)

    return LadderSource.open(pack, slots=slots, dtype=torch.float32, wrap=wrap, readers=readers)


def truth(asked: Sequence[Request] | None = None) -> Run:
    return run(resident("qwen3_moe", None, torch.float32), asked=asked)


class Watched:
    """A source that notes who is leased and calls back before every lease."""

    def __init__(self, source: LadderSource, before: object = None) -> None:
        self.source = source
        self.used: set[ExpertId] = set()
        self.leases = 0
        self._before = before

    def lease(self, layer: int, routed: Sequence[int], keep: Collection[int] | None = None) -> LadderLease:
        self.used |= {ExpertId(layer, expert) for expert in routed}
        self.leases += 1
        if callable(self._before):
            self._before(self.leases)
        return self.source.lease(layer, routed, keep)


def two_requests() -> tuple[list[Request], ExpertId]:
    """Two batched requests, and an expert that only the first of them uses."""
    for seed in range(100):
        asked = [Request(prompt(seed, 2), GREEDY, batched=True), Request(prompt(seed + 1, 3), GREEDY, batched=True)]
        used = []
        for each in asked:
            with open_source(tiny_pack()) as source:
                watched = Watched(source)
                run(watched, asked=[each])
                used.append(watched.used)
        if only := used[0] - used[1]:
            return asked, max(only)
    raise AssertionError("every expert is used by every request")


# --- what passes


@pytest.mark.parametrize("kind", ["fails", "shortens", "corrupts"])
def test_a_fault_that_passes_changes_no_bit(kind: str) -> None:
    every = {ExpertId(layer, expert): 1 for layer in range(3) for expert in range(8)}
    with open_source(tiny_pack(), Faults(**{kind: every})) as source:
        assert run(source).same_bits(truth())
        source.check_integrity()
        counts = source.counters()
        assert counts.failures == 0
        assert counts.rereads > 0 if kind == "corrupts" else counts.retries > 0


def test_two_failures_in_a_row_are_borne_and_three_are_not() -> None:
    expert = ExpertId(0, 3)
    for times, borne in ((2, True), (3, False)):
        with open_source(tiny_pack(), Faults(fails={expert: times})) as source:
            with source.lease(0, [3]) as lease:
                if borne:
                    assert [wave.experts for wave in lease.waves()] == [(3,)]
                else:
                    with pytest.raises(TransferError, match="3 times in a row"):
                        list(lease.waves())
            source.check_integrity()
            assert source.counters().retries == 2


# --- what stays


@pytest.mark.parametrize("kind", ["fails", "shortens", "corrupts"])
@pytest.mark.parametrize("readers", [1, 2])
def test_a_block_that_cannot_be_had_fails_its_request_and_no_other(kind: str, readers: int) -> None:
    asked, bad = two_requests()
    with open_source(tiny_pack(), Faults(**{kind: {bad: ALWAYS}}), readers=readers) as source:
        found = run(source, asked=asked)
        source.check_integrity()
        assert source.counters().failures >= 1
        (error,) = found.errors.values()
        assert isinstance(error, TransferError)
        assert f"expert {bad.expert} of layer {bad.layer}" in error.what
        assert str(source.pack.expert_file) in error.what
        alone = truth([asked[1]])
        assert found.completions[SequenceId(1)].token_ids == alone.completions[SequenceId(0)].token_ids
        assert found.completions[SequenceId(1)].logprobs == alone.completions[SequenceId(0)].logprobs
        again = run(source, asked=[asked[1]])
        assert again.same_bits(alone)
        source.check_integrity()


def test_a_block_that_was_changed_on_disk_is_told_with_expert_layer_and_file(tmp_path: Path) -> None:
    pack = own_pack(tmp_path / "pack")
    asked, bad = two_requests()
    with pack.expert_file.open("r+b") as file:
        file.seek(pack.place(*bad).offset + 1000)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))
    with open_source(pack) as source:
        found = run(source, asked=asked)
        source.check_integrity()
        (error,) = found.errors.values()
        assert f"expert {bad.expert} of layer {bad.layer} in {pack.expert_file} has checksum" in error.what
        assert source.counters().rereads >= 1
        assert SequenceId(1) in found.completions


def test_a_pack_that_is_cut_while_it_is_read_fails_what_it_lost_and_serves_the_rest(tmp_path: Path) -> None:
    pack = own_pack(tmp_path / "pack")
    with open_source(pack) as source:
        os.truncate(pack.expert_file, pack.place(1, 0).offset + 100)
        with source.lease(0, list(range(8))) as lease:
            assert sorted(e for wave in lease.waves() for e in wave.experts) == list(range(8))
        with pytest.raises(TransferError, match="became shorter"), source.lease(1, [0, 7]) as lease:
            list(lease.waves())
        found = run(source)
        assert len(found.errors) == 4
        assert all("became shorter" in error.what for error in found.errors.values())
        source.check_integrity()


def test_a_pack_that_is_removed_while_it_is_read_changes_no_bit(tmp_path: Path) -> None:
    pack = own_pack(tmp_path / "pack")

    def remove(leases: int) -> None:
        if leases == 5:
            shutil.rmtree(pack.folder)

    with open_source(pack, slots=2) as source:
        watched = Watched(source, remove)
        assert run(watched).same_bits(truth())
        assert not pack.folder.exists()
        source.check_integrity()


# --- processes

KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from steerpipe.store.reader import open_pack
from steerpipe.transfer.source import LadderSource

source = LadderSource.open(open_pack(Path(sys.argv[1])), slots=3, dtype=torch.float32)
for step in range(100):
    for layer in range(3):
        with source.lease(layer, list(range(8))) as lease:
            for wave in lease.waves():
                if step == 2 and layer == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
"""
LEFT_OPEN = """
import sys
from pathlib import Path
import torch
from steerpipe.store.reader import open_pack
from steerpipe.transfer.source import LadderSource

source = LadderSource.open(open_pack(Path(sys.argv[1])), slots=3, dtype=torch.float32, readers=2)
lease = source.lease(0, list(range(8))).__enter__()
print(next(lease.waves()).experts[0] in range(8))
if sys.argv[2] == "raise":
    raise SystemExit(3)
"""


def python(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_a_process_killed_in_mid_answer_leaves_the_pack_whole(tmp_path: Path) -> None:
    pack = own_pack(tmp_path / "pack")
    assert python(KILLED, pack.folder).returncode == -signal.SIGKILL
    assert verify(pack.folder).good
    with open_source(open_pack(pack.folder)) as source:
        assert run(source).same_bits(truth())


@pytest.mark.parametrize(("how", "status"), [("end", 0), ("raise", 3)])
def test_a_process_that_ends_with_an_open_lease_ends_cleanly(how: str, status: int) -> None:
    done = python(LEFT_OPEN, tiny_pack().folder, how)
    assert (done.returncode, done.stdout, done.stderr) == (status, "True\n", "")


def test_two_engines_on_one_pack_do_not_disturb_each_other() -> None:
    expected = truth()
    found: list[bool] = []

    def work() -> None:
        with open_source(tiny_pack(), Faults(delay_seconds=0.001), slots=3) as source:
            found.append(run(source).same_bits(expected))
            source.check_integrity()

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True, True]


def test_failing_again_and_again_leaks_no_descriptor_thread_or_memory() -> None:
    def fail() -> None:
        with open_source(tiny_pack(), Faults(fails={ExpertId(0, 0): ALWAYS}), slots=2) as source:
            for _ in range(3):
                with pytest.raises(TransferError), source.lease(0, list(range(8))) as lease:
                    list(lease.waves())
            source.check_integrity()
            assert source._ladder.slabs.allocated <= 12

    fail()
    gc.collect()
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(5):
        fail()
    gc.collect()
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) <= descriptors
