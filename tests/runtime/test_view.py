"""What an onlooker is shown: a digit for every expert, and counts that agree with it."""

from pathlib import Path

import numpy as np
import pytest

from steerpipe import Pipeline
from steerpipe.core.events import RoutingRecord
from steerpipe.core.ids import SequenceId
from steerpipe.runtime.view import LastStep, count_places, draw_map
from steerpipe.tiny import write_tiny
from steerpipe.transfer.source import LadderSource


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("view") / "model"
    write_tiny("qwen3_moe", folder)
    return folder


def record(layer: int, *experts: int) -> RoutingRecord:
    rows = np.array([experts])
    return RoutingRecord(layer, (SequenceId(0),), np.array([0]), rows, np.ones_like(rows, dtype=np.float32))


def test_a_ladder_is_drawn_as_its_slots_and_the_ram_below_them_are(model: Path) -> None:
    with Pipeline(model, fast_memory="25%", ram="600kB", dtype="float32", threads=1, profile=False) as pipe:
        pipe.generate("abc", max_tokens=4, ignore_eos=True)
        assert isinstance(pipe.experts, LadderSource)
        pipe.experts.check_integrity()
        rows = draw_map(pipe.spec, pipe.experts, LastStep())
        drawn = {
            (layer, index)
            for layer, row in zip(pipe.spec.moe_layers, rows, strict=True)
            for index, digit in enumerate(row)
            if digit == "3"
        }
        assert drawn == {(each.layer, each.expert) for each in pipe.experts.residents}
        counts = count_places(rows)
        assert counts["ram"] > 0 and sum(counts.values()) == sum(map(len, rows))


def test_where_nothing_has_to_move_everything_is_in_fast_memory(model: Path) -> None:
    with Pipeline(model, dtype="float32", threads=1) as pipe:
        rows = draw_map(pipe.spec, pipe.experts, LastStep())
    assert set("".join(rows)) == {"3"}


def test_the_experts_of_the_last_step_are_marked_until_the_next(model: Path) -> None:
    with Pipeline(model, dtype="float32", threads=1) as pipe:
        last, layers = LastStep(), pipe.spec.moe_layers
        for experts in ((0, 2), (1, 2)):
            last.observe(record(layers[1], *experts))
        rows = draw_map(pipe.spec, pipe.experts, last)
        assert rows[1].startswith("3773") and set(rows[0]) == {"3"}
        assert count_places(rows)["fast"] == sum(map(len, rows)), "what is used lies somewhere too"
        last.clear()
        assert set("".join(draw_map(pipe.spec, pipe.experts, last))) == {"3"}


def test_routing_is_published_from_the_next_step_on_and_no_longer_than_wanted(model: Path) -> None:
    with Pipeline(model, dtype="float32", threads=1) as pipe:
        last = LastStep()
        pipe.engine.publish_routing(last)
        pipe.generate("abc", max_tokens=2, ignore_eos=True)
        marked = "".join(draw_map(pipe.spec, pipe.experts, last)).count("7")
        assert marked == sum(pipe.spec.moe(layer).top_k for layer in pipe.spec.moe_layers)
        pipe.engine.publish_routing(None)
        last.clear()
        pipe.generate("abc", max_tokens=2, ignore_eos=True)
        assert "7" not in "".join(draw_map(pipe.spec, pipe.experts, last))
