"""The whole arena on a small planted trace."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from steerpipe.arena.contest import Options, run_arena
from steerpipe.arena.control import shuffled
from steerpipe.arena.entries import Role, entries_of
from steerpipe.arena.evaluation import evaluate
from steerpipe.arena.foresight import ReuseForesight
from steerpipe.arena.lineup import usual_entries
from steerpipe.arena.machines import StatedMachine
from steerpipe.arena.page import write_page
from steerpipe.arena.plots import slim
from steerpipe.arena.render import render
from steerpipe.arena.results import ArenaResult
from steerpipe.arena.rows import amdahl_table, metrics_table, summary_table
from steerpipe.arena.worth import BELADY, LFRU, RESIDENT, REUSE, measure_worth, perfect
from steerpipe.core.errors import InputError
from steerpipe.predict.protocol import Cost
from steerpipe.predict.sight import Sight
from steerpipe.train.counts import count_transition
from steerpipe.train.material import Material
from steerpipe.transfer.forecasts import PerfectPredictor
from steerpipe.transfer.synthetic import SyntheticRouting
from tests.arena.traces import GEOMETRY, Successor, draw, packed

MACHINE = StatedMachine("PCIe 5", "int4", 0.5)


class Peeks(Successor):
    name = "peeks"

    def probabilities(self, sight: Sight) -> Tensor:
        return sight.truth()


class NeedsStates(Successor):
    name = "needs states"

    def probabilities(self, sight: Sight) -> Tensor:
        return torch.sigmoid(sight.residual(0, back=1)).repeat(1, 2)


class Shouts(Successor):
    name = "shouts"

    def probabilities(self, sight: Sight) -> Tensor:
        return super().probabilities(sight) * 2


class SaysNaN(Successor):
    name = "says NaN"

    def probabilities(self, sight: Sight) -> Tensor:
        return super().probabilities(sight) * float("nan")


class WrongShape(Successor):
    name = "wrong shape"

    def probabilities(self, sight: Sight) -> Tensor:
        return torch.zeros(3, 3)


class Raises(Successor):
    name = "raises"

    def probabilities(self, sight: Sight) -> Tensor:
        raise ZeroDivisionError("over\nlines")


class NoCost(Successor):
    name = "no cost"

    def cost(self) -> Cost:
        raise KeyError("cost")


@pytest.fixture(scope="module")
def result() -> ArenaResult:
    train, test = draw(prompts=30, tokens=40), draw(prompts=6, tokens=40, seed=1, first=100)
    entries = usual_entries(Material(packed(train), 30, 50), [0, 1, 2], "planted")
    entries += entries_of((each, "tests") for each in (Successor(), Peeks(), NeedsStates(), Shouts()))
    entries += entries_of((each, "tests") for each in (SaysNaN(), WrongShape(), Raises(), NoCost()))
    options = Options(machines=[MACHINE], worth_tokens=120, worth_warmup_tokens=40)
    return run_arena("planted", GEOMETRY, train, test, entries, options)


def recall(result: ArenaResult, name: str, horizon: int) -> float:
    entry = next(each for each in result.entries if each.name == name)
    at = entry.at(horizon)
    assert at is not None
    return at.overall.recall


def test_every_usual_predictor_takes_part_and_the_planted_rule_is_found(result: ArenaResult) -> None:
    names = {each.name for each in result.entries}
    assert names >= {
        "frequency",
        "previous",
        "affinity",
        "transition",
        "shuffled labels",
        "oracle",
        "random",
        "successor",
    }
    assert recall(result, "successor", 1) == 1.0
    assert recall(result, "transition", 1) > 0.95
    assert recall(result, "frequency", 1) < 0.35


def test_the_control_and_the_bounds_are_where_they_belong(result: ArenaResult) -> None:
    chance = result.setting.chance
    assert chance == GEOMETRY.top_k / GEOMETRY.experts
    assert recall(result, "shuffled labels", 1) == pytest.approx(chance, abs=0.2)  # 36 votes decide all: see below
    assert result.control_excess == pytest.approx(0.0, abs=0.2)
    assert recall(result, "random", 1) == pytest.approx(chance, abs=0.04)
    assert recall(result, "oracle", 2) == 1.0


def test_shuffled_labels_score_at_chance_on_average() -> None:
    train, test = packed(draw(prompts=30, tokens=40)), packed(draw(prompts=6, tokens=40, seed=1, first=100))
    found = []
    for seed in range(16):
        score = evaluate(count_transition(shuffled(train, seed), [1]), test, 1).overall()
        assert score is not None
        found.append(score.recall)
    assert sum(found) / 16 == pytest.approx(GEOMETRY.top_k / GEOMETRY.experts, abs=0.04)


def test_who_peeks_and_who_cannot_be_run_is_named_and_the_others_go_on(result: ArenaResult) -> None:
    refused = {each.name: each.refused for each in result.refused}
    assert refused.keys() == {"peeks", "needs states", "shouts", "says NaN", "wrong shape", "raises", "no cost"}
    assert refused["wrong shape"] is not None and "InputError: wrong shape gave [3, 3], not [" in refused["wrong shape"]
    assert refused["says NaN"] is not None and "not probabilities" in refused["says NaN"]
    assert refused["raises"] == "ZeroDivisionError: over lines"
    assert refused["no cost"] == "KeyError: 'cost'"
    assert refused["peeks"] is not None and refused["peeks"].startswith("PeekError: peeks answers for layer 0")
    assert refused["needs states"] is not None and "no residual states" in refused["needs states"]
    assert refused["shouts"] is not None and "not probabilities" in refused["shouts"]


def test_what_it_is_worth_lies_between_lfru_and_the_oracles(result: ArenaResult) -> None:
    (worth,) = result.worth
    lfru, best = worth.baseline(LFRU).tpot_mean_seconds, worth.baseline(perfect(2)).tpot_mean_seconds
    runs = {run.name: run for run in worth.entries}
    assert worth.baseline(RESIDENT).tpot_mean_seconds <= worth.baseline(BELADY).tpot_mean_seconds <= lfru
    assert best <= runs["successor"].tpot_mean_seconds < lfru
    closed = worth.closed(runs["successor"], 2)
    assert closed is not None and 0.3 < closed <= 1.0
    assert "oracle" not in runs and "peeks" not in runs


def test_cost_is_measured_and_training_is_told(result: ArenaResult) -> None:
    transition = next(each for each in result.entries if each.name == "transition")
    assert transition.cpu is not None and transition.cpu.eager_microseconds > 0
    assert transition.training is not None and transition.training.tokens == 30 * 40
    assert transition.parameters == 4 * 12 + 2 * (4 * 12 * 12 + 4)


def test_everything_is_in_the_json_and_in_the_tables(result: ArenaResult) -> None:
    read = json.loads(json.dumps(result.as_json()))
    assert read["schema"] == 1
    by_name = {each["name"]: each for each in read["entries"]}
    assert by_name["successor"]["horizons"][0]["layers"][3]["recall"] == 1.0
    assert by_name["shuffled labels"]["role"] == Role.CONTROL.value
    assert read["worth"][0]["baselines"][1]["name"] == LFRU
    assert "control is missing" not in metrics_table(result).caption
    rows = metrics_table(result).rows
    assert ("peeks: refused", *("–",) * 11) in rows
    assert sum(row[0] == "successor" for row in rows) == 2  # one for each horizon
    assert {row[0] for row in summary_table(result.worth).rows} >= {LFRU, "successor", perfect(2)}
    assert any("peeks is out" in part for part in render(result) if isinstance(part, str))


def test_amdahls_law_stands_beside_what_replay_finds(result: ArenaResult) -> None:
    ((machine, best, stalled, recalled, by_law, by_replay),) = amdahl_table(result).rows
    (worth,) = result.worth
    lfru = worth.baseline(LFRU)
    assert machine == "PCIe 5, int4, 50 %"
    assert best in ("successor", "transition") and recalled == f"{100 * recall(result, best, 1):.1f}"
    share = lfru.stall_seconds_per_token / lfru.tpot_mean_seconds
    assert stalled == f"{share:.0%}"
    assert by_law == f"{1 / (1 - share * recall(result, best, 1)):.2f}x"
    fastest = min(run.tpot_mean_seconds for run in worth.entries)
    assert by_replay == f"{lfru.tpot_mean_seconds / fastest:.2f}x"


class Outside(HTMLParser):
    """Finds what a page would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "data")]
        self.fetched += [value for value in found if not value.startswith("#")]


def test_the_page_stands_alone(result: ArenaResult) -> None:
    page = write_page(result, {"worth": "<?xml?>\n<svg><text>picture</text></svg>"})
    parser = Outside()
    parser.feed(page)
    assert parser.fetched == []
    assert "<svg><text>picture</text></svg>" in page and "<?xml" not in page
    assert "peeks</b> is out" in page


def test_pictures_are_drawn_the_same_way_twice(result: ArenaResult) -> None:
    pytest.importorskip("matplotlib")
    from steerpipe.arena.plots import draw_all

    pictures = draw_all(result)
    assert pictures.keys() == {"recall-by-layer", "recall-and-cost", "calibration", "worth"}
    assert all("<svg" in svg for svg in pictures.values())
    assert draw_all(result) == pictures


def test_a_split_that_shares_a_prompt_is_refused() -> None:
    sequences = draw(prompts=6)
    with pytest.raises(InputError, match="share 1 prompt ids"):
        run_arena("planted", GEOMETRY, sequences[:4], sequences[3:], entries_of([(Successor(), "tests")]), Options())


def test_who_has_no_horizon_is_left_out_with_a_word_and_a_missing_control_is_said() -> None:
    train, test = draw(prompts=30, tokens=40), draw(prompts=6, tokens=40, seed=1, first=100)
    entries, said = usual_entries(Material(packed(train), 30, 50), [0], "planted"), list[str]()
    found = run_arena("planted", GEOMETRY, train, test, entries, Options(timings=False), progress=said.append)
    assert {each.name for each in found.entries} == {"frequency", "previous", "affinity", "oracle", "random"}
    assert [line.split(" is left out")[0] for line in said if "left out" in line] == ["transition", "shuffled labels"]
    assert found.control_excess is None and "The control is missing" in metrics_table(found).caption


def test_shuffled_labels_are_distinct_experts_that_the_truth_says_nothing_about() -> None:
    trace = packed(draw(prompts=30, tokens=40))
    drawn = shuffled(trace)
    assert (drawn.experts[..., 0] != drawn.experts[..., 1]).all()
    same = (drawn.experts[..., :, None] == trace.experts[..., None, :]).any(-1).float().mean()
    assert float(same) == pytest.approx(GEOMETRY.top_k / GEOMETRY.experts, abs=0.02)
    again = shuffled(trace, seed=1)
    assert not torch.equal(again.experts, drawn.experts)


def test_several_processes_give_what_one_gives() -> None:
    from steerpipe.transfer.recorded import draw_recording

    recording = draw_recording(SyntheticRouting(layers=2, experts=8, top_k=2, tokens=30))
    said = {"perfect": PerfectPredictor(recording.routing, 1)}
    one, two = (measure_worth(recording, [MACHINE], said, warmup_tokens=5, jobs=jobs) for jobs in (1, 2))
    assert one == two
    assert [run.name for run in one[0].entries] == ["perfect"]


def test_eviction_by_reuse_runs_alone_and_under_the_predictors_that_are_named() -> None:
    from steerpipe.transfer.recorded import draw_recording

    recording = draw_recording(SyntheticRouting(layers=2, experts=8, top_k=2, tokens=60))
    numbers = recording.routing + np.arange(2)[None, :, None] * 8  # [tokens, layers, k]
    scores = {}
    for token in range(60):  # the truth: the later the next use, the less it is worth keeping
        later = [np.flatnonzero((numbers[token + 1 :] == each).any((1, 2))) for each in range(16)]
        scores[token, 1] = np.array([-50.0 * (found[0] if len(found) else 60) for found in later], dtype=np.float32)
    said = {name: PerfectPredictor(recording.routing, 1) for name in ("one", "two")}
    (worth,) = measure_worth(
        recording, [MACHINE], said, warmup_tokens=5, reuse=ReuseForesight(scores, 32.0), under_reuse=["two"]
    )
    assert [run.name for run in worth.with_reuse] == [REUSE, f"two + {REUSE}"]
    assert worth.with_reuse[0].hits > worth.baseline(LFRU).hits
    assert worth.with_reuse[0].hits <= worth.baseline(BELADY).hits


def test_the_stated_machines_are_those_of_the_docs() -> None:
    from steerpipe.arena.machines import stated_machines

    machines = stated_machines()
    assert len(machines) == 18
    assert {each.residency for each in machines} == {0.125, 0.25, 0.5}
    bf16 = StatedMachine("PCIe 5", "bf16", 0.25)
    assert bf16.machine(1440).slots == 360
    assert bf16.paying_precision == pytest.approx(1 - 0.1e-3 / (17_301_504 / 55e9))


def test_a_page_is_a_file_that_needs_no_other(result: ArenaResult, tmp_path: Path) -> None:
    file = tmp_path / "arena.html"
    file.write_text(write_page(result, {}), encoding="utf-8")
    assert "http" not in file.read_text(encoding="utf-8")


def test_styles_that_come_often_are_written_once_and_are_no_other_pictures() -> None:
    one = (
        '<svg width="1"><g style="fill: red"/><g style="fill: red"/><g style="fill: red"/><g style="fill: blue"/></svg>'
    )
    found = slim(one)
    (name,) = set(re.findall(r'class="([^"]+)"', found))
    assert found.count(f'class="{name}"') == 3 and found.count("fill: red") == 1
    assert f'<svg width="1"><style>.{name}{{fill: red}}</style>' in found and '<g style="fill: blue"/>' in found
    assert name not in slim(one.replace("red", "green"))
    assert slim("<svg><g/></svg>") == "<svg><g/></svg>\n"
    idle = '<metadata>by whom</metadata><g id="a"><text transform="rotate(-0 1 2)"/></g><g id="b"/><use href="#b"/>'
    assert slim(idle) == '<g><text/></g><g id="b"/><use href="#b"/>\n'
    fonts = "<text style=\"font: 7px 'DejaVu Sans', 'Vera', 'A Sans Serif', sans-serif; text-anchor: end\"/>"
    assert slim(fonts) == "<text style=\"font: 7px 'DejaVu Sans', sans-serif; text-anchor: end\"/>\n"
