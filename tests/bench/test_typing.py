"""`bench typing`: prompts as people typed them, and the same answers whatever is done meanwhile."""

import time
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from steerpipe.bench.typing import ARMS, TypingOptions, render_typing, run_typing
from steerpipe.bench.typing_prompts import TypedPrompt, lay_over, read_prompts, read_texts
from steerpipe.bench.typing_run import EnterKey, TypingClock
from steerpipe.cli import app
from steerpipe.core.config import EngineConfig
from steerpipe.core.errors import InputError
from steerpipe.core.events import TokenEvent
from steerpipe.core.ids import SequenceId
from steerpipe.core.sampling import SamplingSettings
from steerpipe.engine.request import Opening, Request
from steerpipe.intake.draft import Draft
from steerpipe.intake.edits import DraftEdit, paste

EXAMPLE = Path(__file__).parents[2] / "examples" / "keystrokes.jsonl"
CONFIG = EngineConfig(fast_memory="25%", threads=1, profile=False, predict="off", max_context=1024)


def words(text: str) -> int:
    return 2 * len(text.split())


def typed(edits: tuple[DraftEdit, ...]) -> str:
    draft = Draft()
    for edit in edits:
        draft.apply(edit)
    return draft.text


def test_a_prompt_ends_with_a_sentence_and_enter_comes_when_the_next_key_came() -> None:
    for prompt in read_prompts(EXAMPLE, words, 10):
        assert typed(prompt.edits) == prompt.text and prompt.text.rstrip()[-1] in ".?!"
        assert 30 <= prompt.tokens == words(prompt.text) <= 200
        assert prompt.edits[0].seconds == 0 and prompt.last_pause_seconds >= 0


def test_the_last_seconds_are_typed_and_the_rest_is_there() -> None:
    whole = read_prompts(EXAMPLE, words, 1)[0]
    last = whole.last(2.0)
    assert typed((paste(0, last.already, 0.0), *last.edits)) == whole.text and last.enter_seconds == 2.0
    assert 0 < len(last.edits) < len(whole.edits) and last.already
    assert last.last_pause_seconds == pytest.approx(whole.last_pause_seconds)
    assert whole.last(1e9) == whole


def test_the_timing_of_a_log_is_laid_over_other_texts() -> None:
    prompts = lay_over(EXAMPLE, ["What is this?", "And that?"], words)
    assert [typed(prompt.edits) for prompt in prompts] == ["What is this?", "And that?"]
    assert all(prompt.enter_seconds > prompt.edits[-1].seconds > 0.1 for prompt in prompts)


def test_texts_come_from_json_lines(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"turns": ["one", "two"]}\n{"prompt": "three"}\n{"text": "four"}\n[1]\n')
    assert read_texts(file) == ["one", "three", "four"]
    file.write_text("no json")
    with pytest.raises(InputError, match="cannot be read"):
        read_texts(file)


def test_a_virtual_clock_skips_what_is_waited_for() -> None:
    clock = TypingClock(virtual=True)
    begin = clock.now()
    clock.wait_until(begin + 1000)
    assert 1000 <= clock.now() - begin < 1001


def test_a_virtual_clock_skips_nothing_while_something_is_on_its_way() -> None:
    looks: list[float] = []

    def moving() -> bool:
        looks.append(clock.now())
        return len(looks) < 4

    clock = TypingClock(virtual=True, moving=moving)
    begin = clock.now()
    clock.wait_until(begin + 1000)
    assert len(looks) == 4 and looks[-1] - begin < 1000 <= clock.now() - begin


def opening() -> Opening:
    event = TokenEvent(SequenceId(0), 7, "Yes")
    return Opening(Request((1, 2), SamplingSettings()), 3, (event,))


def test_enter_is_pressed_in_the_middle_of_a_step_and_tells_what_was_known_when_it_began() -> None:
    clock = TypingClock(virtual=True)
    entered = clock.now() + 0.01
    key, known, until = EnterKey(clock, entered), opening(), clock.now() + 60
    with key.waiting(known):
        while key.told is None:
            assert clock.now() < until
            time.sleep(0.001)
    assert key.told is known and entered <= key.first <= clock.now()


def test_enter_is_not_pressed_before_its_time() -> None:
    clock = TypingClock(virtual=True)
    key = EnterKey(clock, clock.now() + 1000)
    with key.waiting(opening()):
        pass
    assert key.told is None


def test_an_unknown_part_is_an_error() -> None:
    with pytest.raises(InputError, match="is no part of steering"):
        TypingOptions(("all", "everything"))


def test_promotion_without_ram_is_refused() -> None:
    with pytest.raises(InputError, match="promotion fills RAM") as caught:
        run_typing(None, CONFIG, [], TypingOptions(("nothing", "promotion")), lambda _: None)
    assert "--ram" in caught.value.fix


def test_promotion_is_refused_where_ram_holds_every_expert_before_any_arm_is_run() -> None:
    prompt = read_prompts(EXAMPLE, words, 1)[0]
    said: list[str] = []
    with pytest.raises(InputError, match="nothing to promote") as caught:
        run_typing(None, replace(CONFIG, ram="2GiB"), [prompt], TypingOptions(("nothing", "promotion")), said.append)
    assert "less --ram" in caught.value.fix and not said


def test_every_arm_gives_the_same_tokens_and_steering_comes_first() -> None:
    prompt: TypedPrompt = read_prompts(EXAMPLE, words, 1)[0]
    kept: list[int] = []
    results = run_typing(
        None, CONFIG, [prompt], TypingOptions(("nothing", "all"), last_seconds=3.0), lambda _: None,
        lambda found: kept.append(len(found)),
    )  # fmt: skip
    assert kept == [1, 2]
    nothing, everything = (result.answers[0] for result in results)
    assert nothing.token_ids == everything.token_ids and len(nothing.token_ids) == 16
    assert nothing.prefilled_tokens == 0 < everything.prefilled_tokens
    assert nothing.told_tokens == 0 and everything.told_tokens <= everything.ahead_tokens <= 8
    assert nothing.left_tokens > 69 and everything.left_tokens < 48
    assert "token_ids" not in results[0].as_json()["answers"][0]
    assert render_typing(results, [prompt], "x").row_count == 2


def test_arms_are_all_different() -> None:
    assert len(set(ARMS.values())) == len(ARMS)


def test_the_command_says_what_is_wrong(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text("nonsense\n")
    result = CliRunner().invoke(app, ["bench", "typing", str(log)])
    assert result.exit_code == 2 and "is not JSON" in result.output


def test_prompts_that_there_are_not_cannot_be_skipped() -> None:
    result = CliRunner().invoke(app, ["bench", "typing", str(EXAMPLE), "--skip", "1000"])
    assert result.exit_code == 2 and "no more than 1000" in result.output


def test_at_least_one_prompt_is_typed() -> None:
    result = CliRunner().invoke(app, ["bench", "typing", str(EXAMPLE), "--prompts", "0"])
    assert result.exit_code == 2 and "--prompts" in result.output
