"""What `steerpipe replay` reads and shows: recordings, synthetic routing, comparisons."""

import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import save_file

from steerpipe.core.errors import ConfigError, InputError
from steerpipe.transfer.comparison import ReplayOptions, compare
from steerpipe.transfer.machine import Decoding, Looking, Machine, slots_of_share
from steerpipe.transfer.recorded import draw_recording
from steerpipe.transfer.replay import replay
from steerpipe.transfer.replay_report import render
from steerpipe.transfer.synthetic import SyntheticRouting, draw_routing
from steerpipe.transfer.trace_file import read_recording

ROUTING = draw_routing(SyntheticRouting(tokens=12, layers=3, experts=8, top_k=2))
MACHINE = Machine(slots=8, block_bytes=1000, link_bytes_per_second=1e6, layer_seconds=1e-4)


def test_a_trace_is_read_with_its_texts(tmp_path: Path) -> None:
    file = tmp_path / "trace.safetensors"
    save_file({"routing": ROUTING.astype(np.uint8), "sequence": np.repeat(np.int32([0, 1]), 6)}, file)
    recording = read_recording(file, tokens=8)
    assert np.array_equal(recording.routing, ROUTING[:8])
    assert recording.sequence.tolist() == [0] * 6 + [1] * 2
    assert (recording.tokens, recording.layers, recording.top_k) == (8, 3, 2)
    assert recording.experts == ROUTING[:8].max() + 1


def test_a_trace_without_texts_is_one_text(tmp_path: Path) -> None:
    file = tmp_path / "trace.safetensors"
    save_file({"routing": ROUTING.astype(np.int32)}, file)
    recording = read_recording(file, experts=64)
    assert set(recording.sequence.tolist()) == {0}
    assert recording.all_experts == 3 * 64


@pytest.mark.parametrize(("tensors", "complaint"), [
    ({"other": ROUTING}, "no integer tensor 'routing'"),
    ({"routing": ROUTING.astype(np.float32)}, "no integer tensor 'routing'"),
    ({"routing": ROUTING[0]}, "has shape"),
    ({"routing": ROUTING[:0]}, "has shape"),
    ({"routing": ROUTING - 8}, "routes to experts"),
    ({"routing": ROUTING * 0}, "twice to one expert"),
    ({"routing": ROUTING, "sequence": np.zeros(3, np.int32)}, "for 12 tokens"),
])  # fmt: skip
def test_a_trace_that_cannot_be_replayed_is_refused(
    tmp_path: Path, tensors: dict[str, np.ndarray], complaint: str
) -> None:
    file = tmp_path / "trace.safetensors"
    save_file(tensors, file)
    with pytest.raises(InputError, match=complaint):
        read_recording(file)


def test_a_missing_trace_and_too_few_experts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        read_recording(tmp_path / "nowhere.safetensors")
    save_file({"routing": ROUTING}, tmp_path / "trace.safetensors")
    with pytest.raises(InputError, match="of 4"):
        read_recording(tmp_path / "trace.safetensors", experts=4)


def test_synthetic_routing_is_what_its_seed_says() -> None:
    plan = SyntheticRouting(tokens=300, layers=2, experts=10, top_k=3, sequence_tokens=100)
    first = draw_routing(plan)
    assert first.shape == (300, 2, 3)
    assert np.array_equal(first, draw_routing(plan))
    assert not np.array_equal(first, draw_routing(SyntheticRouting(**{**_fields(plan), "seed": 1})))
    assert first.min() == 0 and first.max() == 9
    assert (np.diff(np.sort(first, axis=-1), axis=-1) > 0).all()
    assert plan.sequences().tolist() == [0] * 100 + [1] * 100 + [2] * 100


def _fields(plan: SyntheticRouting) -> dict[str, object]:
    return {name: getattr(plan, name) for name in plan.__slots__}


def test_a_topic_ends_with_its_text() -> None:
    lasting = {"topic": 3.0, "topic_tokens": 1e9, "passage": 0.0, "zipf": 0.0}
    routing = draw_routing(SyntheticRouting(tokens=400, layers=4, sequence_tokens=200, **lasting))  # type: ignore[arg-type]
    favourites = [
        {
            (layer, expert)
            for layer in range(4)
            for expert in np.bincount(part[:, layer].ravel()).argsort()[-4:].tolist()
        }
        for part in (routing[:100], routing[100:200], routing[200:])
    ]
    assert len(favourites[0] & favourites[1]) >= 12
    assert len(favourites[1] & favourites[2]) <= 4


def test_synthetic_routing_hits_as_the_pilot_did() -> None:
    """Recorded from a trained model, 25 % resident: LRU 46, LFRU 52, Belady 73 %."""
    recording = draw_recording(SyntheticRouting(tokens=600, sequence_tokens=200))
    machine = Machine(slots_of_share(0.25, recording.all_experts), 1, 1.0, 0.0)
    for policy, percent in {"lru": 46, "lfru": 52, "belady": 73}.items():
        assert 100 * replay(recording, machine, policy, warmup_tokens=100).hit_rate == pytest.approx(percent, abs=3)


def test_a_comparison_stands_between_nothing_kept_and_all_resident() -> None:
    recording = draw_recording(SyntheticRouting(tokens=60, layers=4, experts=12, top_k=2))
    options = ReplayOptions(MACHINE, recalls=(0.8, 0.7), perfect_horizon=2)
    comparison = compare(recording, options)
    names = [run.name for run in comparison.runs]
    assert names == [
        "on demand",
        "lru", "lru + recall 80%/70%", "lru + perfect",
        "lfru", "lfru + recall 80%/70%", "lfru + perfect",
        "belady", "belady + recall 80%/70%", "belady + perfect",
        "all resident",
    ]  # fmt: skip
    spent = {run.name: run.tpot_mean_seconds for run in comparison.runs}
    assert max(spent.values()) == spent["on demand"]
    assert min(spent.values()) == spent["all resident"]
    assert spent["belady"] == min(spent[policy] for policy in ("lru", "lfru", "belady"))
    assert spent["lfru + perfect"] < spent["lfru"]


def test_a_comparison_is_json_and_a_table() -> None:
    recording = draw_recording(SyntheticRouting(tokens=20, layers=2, experts=12, top_k=2))
    comparison = compare(recording, ReplayOptions(MACHINE, policies=("lfru", "belady"), recalls=(0.5,)))
    loaded = json.loads(json.dumps(comparison.as_json()))
    assert [run["name"] for run in loaded["runs"]].count("belady") == 1
    assert loaded["machine"]["slots"] == 8
    assert loaded["runs"][1]["hit_rate"] == comparison.runs[1].hit_rate
    console = Console(file=io.StringIO(), width=200)
    console.print(render(comparison))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "8 of 24 experts in fast memory (33.3%)" in shown
    assert "all resident" in shown
    assert f"{comparison.runs[1].tpot_mean_seconds * 1e3:.2f}" in shown


def shown(figures: Machine) -> str:
    recording = draw_recording(SyntheticRouting(tokens=6, layers=2, experts=12, top_k=2))
    console = Console(file=io.StringIO(), width=200)
    console.print(render(compare(recording, ReplayOptions(figures, policies=("lru",)))))
    return " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]


def test_a_table_says_what_a_machine_takes_and_no_more() -> None:
    decodes = shown(replace(MACHINE, ask_seconds=2e-4, decoding=Decoding(5e-4)))
    assert "one block takes 1 ms and 0.5 ms to decode" in decodes
    assert "asks 0.2 ms for what it misses" in decodes
    assert not any(word in decodes for word in ("looking ahead", "between two tokens", "CPU"))
    looks = shown(replace(MACHINE, looking=Looking(7e-6, 27e-6), end_seconds=1e-4, between_seconds=4e-4))
    assert "looking ahead adds 0.007 ms and speaks after 0.027 ms; 0.5 ms lie between two tokens" in looks
    computes = shown(replace(MACHINE, cpu_seconds=1e-3))
    assert "a CPU computes a missing block in 1 ms" in computes
    assert "link ┃ CPU ┃" in computes and "41% │ 46% │" in computes


def test_an_unknown_policy_is_refused_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match="'arc' is not an eviction policy"):
        ReplayOptions(MACHINE, policies=("arc",))
