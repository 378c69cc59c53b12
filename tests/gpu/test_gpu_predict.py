"""A pipeline on a GPU that predicts: the same bits whoever speaks, also where that changes within an answer."""

from pathlib import Path
from typing import Any

import pytest
import torch

from steerpipe import Pipeline
from steerpipe.core.timeline import Timeline, overlap_seconds
from steerpipe.intake.edits import paste
from steerpipe.predict.files import save
from steerpipe.predict.sight import Decision
from steerpipe.predict.trajectory import Trajectory
from steerpipe.predict.trajectory_networks import Architecture, build
from steerpipe.predict.trials import Trials
from steerpipe.runtime.predicting import Choice
from steerpipe.tiny import write_tiny
from tests.runtime.drafting import GREEDY as DRAFTED
from tests.runtime.drafting import Desk, keys

if torch.cuda.is_available():  # importing kernels needs triton
    from steerpipe.runtime.prediction_gpu import questions_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
PROMPT = "Can you tell me a story about a dog that lives by the sea?"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 72, "ignore_eos": True, "logprobs": 3}
SETTINGS: dict[str, Any] = {"device": "cuda", "profile": False, "kv_memory": "64MiB", "max_context": 512}
TURNS = [(2, 1), (3, 2), (5, 1)]  # tokens of a turn, rounds


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unseen") / "model"
    write_tiny("qwen2_moe", folder, num_experts=24, num_experts_per_tok=4)
    return folder


def choice_of(pipe: Pipeline) -> Choice:
    assert pipe.prediction is not None and isinstance(pipe.prediction.steering, Choice)
    return pipe.prediction.steering


def force(pipe: Pipeline, turn: int, rounds: int) -> Choice:
    """Everybody speaks again and again: a trial ends and another begins in the middle of an answer."""
    choice = choice_of(pipe)
    names = ["none", *(each.name for each in choice._speakers)]
    choice.trials = Trials(names, turn_tokens=turn, rounds=rounds, first_rest_tokens=3, longest_rest_tokens=3)
    return choice


def bits(pipe: Pipeline) -> Any:
    found = pipe.generate(PROMPT, **GREEDY)
    return found.token_ids, found.logprobs, found.top_logprobs


def whole_bits(model: Path | None) -> Any:
    with Pipeline(model, **SETTINGS, fast_memory="100%") as whole:
        assert whole.budget.resident and whole.prediction is None
        return bits(whole)


@pytest.mark.parametrize("budget", [{}, {"pin": "0"}, {"policy": "lfru"}], ids=["direct", "served", "lfru"])
def test_no_bit_depends_on_who_predicts_when(budget: dict[str, Any]) -> None:
    expected = whole_bits(None)
    for fast, (turn, rounds) in zip(("12.5%", "25%", "50%"), TURNS, strict=True):
        with Pipeline(**SETTINGS, **budget, fast_memory=fast) as tight:
            choice = force(tight, turn, rounds)
            for _ in range(2):
                assert bits(tight) == expected, (fast, turn)
            assert len(tight.prediction.verdicts) >= 4  # type: ignore[union-attr]
            names = choice.scorecard.names
            assert len(names) == (2 if "pin" in budget else 4)  # both drivers, where the device could
            assert all(choice.scorecard.total(name).decisions > 50 for name in names)
            tight.experts.check_integrity()  # type: ignore[union-attr]


def test_an_answer_that_is_cancelled_and_a_batch_between_change_no_bit() -> None:
    expected = whole_bits(None)
    with Pipeline(**SETTINGS, fast_memory="25%") as tight:
        force(tight, 2, 1)
        for cut in (1, 5, 9):
            for number, _ in enumerate(tight.stream(PROMPT, **GREEDY)):
                if number == cut:
                    break
            assert bits(tight) == expected
            tight.generate_batch([PROMPT, PROMPT[10:]], temperature=0, max_tokens=cut, ignore_eos=True)
        assert bits(tight) == expected
        tight.experts.check_integrity()  # type: ignore[union-attr]


def drafted(pipe: Pipeline) -> list[int]:
    desk = Desk(pipe)
    desk.drafts = pipe.drafts()
    draft = desk.drafts.open("a", settings=DRAFTED)
    desk.type(draft, [paste(0, PROMPT[:30], 0.0), *keys(PROMPT[30:], 1.0, at=30)])
    tokens = desk.answer(desk.drafts.submit(draft))
    desk.close()
    return tokens


def test_drafts_beside_it_change_no_token() -> None:
    with Pipeline(**SETTINGS, fast_memory="100%") as whole:
        expected = drafted(whole)
    with Pipeline(**SETTINGS, fast_memory="25%") as tight:
        force(tight, 2, 1)
        for _ in range(3):
            assert drafted(tight) == expected
        tight.experts.check_integrity()  # type: ignore[union-attr]


def test_a_model_never_seen_looks_ahead_and_a_switch_ends_it(tiny_model: Path) -> None:
    expected = whole_bits(tiny_model)
    with Pipeline(tiny_model, **SETTINGS, fast_memory="50%") as tight:
        choice = force(tight, 4, 1)
        first, second = (each.name for each in choice._speakers)
        assert first == "lookahead, 1 ahead" and second.endswith("ahead, by the host")
        assert bits(tight) == expected
        before = choice.scorecard.total("lookahead, 1 ahead").decisions
        assert before > 20
        choice.switch(on=False)
        assert bits(tight) == expected
        assert choice.scorecard.total("lookahead, 1 ahead").decisions == before
    with Pipeline(tiny_model, **SETTINGS, fast_memory="50%", predict="off") as silent:
        assert silent.prediction is not None and silent.prediction.steering is None
        assert bits(silent) == expected


def with_history(folder: Path, architecture: Architecture) -> Path:
    """A model beside which networks lie that have learnt nothing."""
    write_tiny("qwen2_moe", folder, num_experts=24, num_experts_per_tok=4, num_hidden_layers=4)
    networks = {Decision(target, 2): build(architecture, 24, 10) for target in range(4)}
    (folder / "predictors").mkdir()
    save(Trajectory(architecture, 24, networks), folder / "predictors" / "trajectory.safetensors")
    return folder


def test_a_transformer_beside_the_model_is_asked_inside_the_graph_and_beside_it(tmp_path: Path) -> None:
    folder, name = with_history(tmp_path / "model", Architecture.TRANSFORMER), "transformer (layers), 2 ahead"
    expected = whole_bits(folder)
    for budget, names in (({"pin": "0"}, [name]), ({}, [name, f"{name}, by the host"])):
        with Pipeline(folder, **SETTINGS, **budget, fast_memory="50%") as tight:
            choice = force(tight, 4, 1)
            assert [each.name for each in choice._speakers][-len(names) :] == names
            for _ in range(2):
                assert bits(tight) == expected
            assert all(choice.scorecard.total(each).decisions > 0 for each in names)
            asked = [questions_of(each) for each in choice._speakers[-len(names) :]]
            assert asked[-1].asked and all(each.seconds is not None and 0 < each.seconds < 0.1 for each in asked)
            assert all(f"{each} takes " in tight.prediction.beside() for each in names)  # type: ignore[union-attr,operator]
            tight.experts.check_integrity()  # type: ignore[union-attr]


def test_another_network_of_history_is_asked_beside_the_step_where_the_host_serves(tmp_path: Path) -> None:
    folder, name = with_history(tmp_path / "model", Architecture.MLP), "mlp (layers), 2 ahead"
    expected = whole_bits(folder)
    with Pipeline(folder, **SETTINGS, fast_memory="50%", pin="0") as served:
        choice = force(served, 4, 1)
        for _ in range(2):
            assert bits(served) == expected
        apart = choice._speakers[-1]
        asked = apart.predictor.questions
        assert apart.name == name and asked.possible >= asked.asked >= max(1, asked.in_time)
        assert 0 < asked.seconds < 0.1 and "us a question beside layers of" in served.prediction.beside()  # type: ignore[union-attr,operator]
        assert 0 < choice.scorecard.total(name).decisions <= asked.asked
        served.experts.check_integrity()  # type: ignore[union-attr]
    with Pipeline(folder, **SETTINGS, fast_memory="50%") as direct:
        choice = force(direct, 4, 1)
        assert len(choice._speakers) == 3 and choice._speakers[-1].name == name
        for _ in range(2):
            assert bits(direct) == expected
        assert choice._speakers[-1].predictor.questions.asked
        direct.experts.check_integrity()  # type: ignore[union-attr]


def test_heads_foresee_most_of_what_is_missing() -> None:
    """The kernels' heads from the shipped 4-bit files name what they name on a CPU (docs/predictors.md: .905)."""
    with Pipeline(**SETTINGS, fast_memory="25%") as tight:
        choice = force(tight, 40, 1)
        for _ in range(3):
            bits(tight)
        heads, lookahead = (choice.scorecard.total(name) for name in ("trained heads, 1 ahead", "lookahead, 1 ahead"))
        assert heads.recall > 0.75 and heads.recall_on_misses > 0.5 and lookahead.recall > 0.6
        assert heads.recall > lookahead.recall
        counters = tight.counters()
        assert counters is not None and 0 < heads.used + lookahead.used <= heads.sent + lookahead.sent
        assert counters.prefetch.hits + counters.prefetch.late >= heads.used
        said = tight.prediction.as_json()  # type: ignore[union-attr]
        assert said is not None and len(said["scores"]["trained heads, 1 ahead"]["layers"]["missing"]) == 24


def test_a_timeline_shows_every_layer_and_guesses_that_move_meanwhile() -> None:
    timeline = Timeline()
    with Pipeline(**SETTINGS, fast_memory="25%", timeline=timeline) as tight:
        force(tight, 4, 1)
        tight.generate(PROMPT, temperature=0, max_tokens=20, ignore_eos=True)
    compute, guesses = timeline.spans("stream 0: compute"), timeline.spans("stream 1: guesses")
    assert len([span for span in compute if span.name.startswith("layer")]) == 19 * 2 * 24
    assert guesses and all(span.seconds >= 0 for span in timeline.spans())
    assert overlap_seconds(guesses, compute) > 0.9 * sum(span.seconds for span in guesses)
    assert timeline.spans("stream 1: copies")  # of the prompt
