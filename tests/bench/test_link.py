"""The benchmark of links, with memory for a device: figures are there, and say what was measured. Never how quick."""

import json
from pathlib import Path

import pytest
import torch

from steerpipe.bench.link import measure_links, slot_rate

CPU = torch.device("cpu")


def test_a_report_has_every_figure_and_becomes_json(tmp_path: Path) -> None:
    said: list[str] = []
    report = measure_links(CPU, folder=tmp_path, sizes=(1 << 18,), arena_bytes=1 << 21, rounds=1, say=said.append)
    found = json.loads(json.dumps(report.to_json()))
    assert said[0].startswith("ceiling")
    assert found["pinned"][0]["block_bytes"] == 1 << 18
    for name in ("single", "queued", "scattered", "issue_seconds"):
        assert found["pinned"][0][name] > 0, name
    for name in ("best", "pageable", "ring", "write_seconds", "ids_seconds", "disk", "fill_seconds_per_gib"):
        assert found[name] > 0, name
    assert found["ceiling"] is None
    assert not list(tmp_path.iterdir())


def test_without_a_folder_the_disk_is_left_alone() -> None:
    report = measure_links(CPU, sizes=(1 << 18,), arena_bytes=1 << 20, rounds=1)
    assert report.disk is None and not report.disk_direct


def test_the_ceiling_is_lanes_times_rate(tmp_path: Path) -> None:
    assert slot_rate(tmp_path) is None
    (tmp_path / "current_link_speed").write_text("32.0 GT/s PCIe\n")
    (tmp_path / "current_link_width").write_text("16\n")
    assert slot_rate(tmp_path) == pytest.approx(32e9 * 16 / 8 * 128 / 130)
    (tmp_path / "current_link_speed").write_text("Unknown\n")
    assert slot_rate(tmp_path) is None
