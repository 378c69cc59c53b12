"""A pipeline under a memory budget: the same bits, honest figures, and a cache that does not start cold."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from steerpipe import Pipeline
from steerpipe.cli import app
from steerpipe.core.errors import ConfigError
from steerpipe.core.events import FinishReason
from steerpipe.model.checkpoint import open_checkpoint
from steerpipe.store.formats import parse_dense_format, parse_expert_format
from steerpipe.store.pack import PackOptions, write_pack
from steerpipe.tiny import write_tiny

PROMPT = "The quick brown fox jumps over the lazy dog, again and again and again."
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "ignore_eos": True, "logprobs": 3}


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_tiny("qwen2_moe", folder / "checkpoint")
    options = PackOptions(parse_expert_format("int4"), parse_dense_format("int8"))
    write_pack(open_checkpoint(folder / "checkpoint"), folder / "pack", options)
    return folder / "pack"


@pytest.mark.parametrize(
    "budget",
    [
        {"fast_memory": "100%"},
        {"fast_memory": "25%"},
        {"fast_memory": "10%"},
        {"fast_memory": "25%", "ram": "1MiB"},
        {"ram": "100KiB"},
        {"fast_memory": "25%", "policy": "lru"},
        {"pace": "20MB"},
        {"fast_memory": "2MiB", "kv_memory": "shared"},
    ],
    ids=str,
)
def test_a_budget_changes_no_bit(pack: Path, budget: dict[str, str]) -> None:
    with Pipeline(pack) as whole, Pipeline(pack, profile=False, **budget) as tight:
        expected, got = whole.generate(PROMPT, **GREEDY), tight.generate(PROMPT, **GREEDY)
        assert (got.token_ids, got.logprobs, got.top_logprobs) == (
            expected.token_ids,
            expected.logprobs,
            expected.top_logprobs,
        )
        counters = tight.counters()
        assert whole.counters() is None and counters is not None
        assert counters.hits + counters.late + counters.misses == counters.leased > 0


def test_shared_pages_are_all_the_experts_when_nothing_runs(pack: Path) -> None:
    with Pipeline(pack, profile=False, fast_memory="2MiB", kv_memory="shared") as pipe:
        answer = pipe.stream(PROMPT, **GREEDY)
        tokens = iter(answer)
        next(tokens)
        running = pipe.pages()
        assert running is not None and running.kv > 0 and running.experts > 0
        answer.cancel()
        ended = pipe.pages()
        assert ended is not None and ended.kv == 0 and ended.experts == running.experts + running.kv
        assert [row.what for row in pipe.memory][1] == "experts, and keys and values"
        assert pipe.memory[1].size_bytes <= 2 << 20
    with Pipeline(pack, profile=False, kv_memory="shared") as roomy:  # everything fits
        assert roomy.budget.resident and roomy.pages() is None


def test_the_table_of_what_lies_where_keeps_to_the_budget(pack: Path) -> None:
    with Pipeline(pack, fast_memory="50%", ram="1MiB", profile=False) as pipe:
        rows = {row.what: row for row in pipe.memory}
        assert rows["expert slots"].size_bytes == 12 * 3 * 64 * 32 * 4
        assert "12 of 24 experts (50.0%)" in rows["expert slots"].why
        assert rows["expert slots"].size_bytes + rows["experts behind the slots"].size_bytes <= 2**20
        assert rows["all experts"].where == "disk"


def test_a_budget_below_two_experts_names_the_smallest(pack: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        Pipeline(pack, fast_memory="30kB")
    assert f"{2 * 3 * 64 * 32 * 4:,} bytes" in caught.value.fix


def test_the_second_run_starts_where_the_first_ended(pack: Path) -> None:
    profile = pack / "profile.json"
    profile.unlink(missing_ok=True)
    with Pipeline(pack, fast_memory="50%") as first:
        cold = first.generate(PROMPT, **GREEDY)
    assert profile.is_file()
    learnt = json.loads(profile.read_text())
    assert len(learnt["counts"]) == 24 and 0 < len(learnt["warm"]) <= 12
    with Pipeline(pack, fast_memory="50%") as second:
        second.experts.check_integrity()  # type: ignore[attr-defined]  # waits until nothing moves
        assert len(second.experts.residents) == 12  # type: ignore[attr-defined]
        warm = second.generate(PROMPT, **GREEDY)
        counters = second.counters()
        assert counters is not None and counters.prefetch.hits > 0
    assert (warm.token_ids, warm.logprobs) == (cold.token_ids, cold.logprobs)
    profile.unlink()


def test_no_profile_is_written_where_nobody_wants_one(pack: Path) -> None:
    with Pipeline(pack, fast_memory="50%", profile=False) as pipe:
        pipe.generate(PROMPT, **GREEDY)
    assert not (pack / "profile.json").exists()


def test_a_damaged_profile_costs_nothing_but_the_warmth(pack: Path) -> None:
    (pack / "profile.json").write_text("{")
    with Pipeline(pack, fast_memory="50%") as pipe:
        pipe.generate(PROMPT, **GREEDY)
    assert json.loads((pack / "profile.json").read_text())["schema"] == 1
    (pack / "profile.json").unlink()


def test_closing_twice_is_closing_once(pack: Path) -> None:
    pipe = Pipeline(pack, fast_memory="25%", profile=False)
    answer = pipe.stream(PROMPT, **GREEDY)
    next(iter(answer))
    pipe.close()
    pipe.close()
    assert answer.completion.finish_reason is FinishReason.CANCELLED


def test_the_command_line_says_where_the_time_went(pack: Path) -> None:
    words = ["generate", str(pack), "-p", "hello", "--max-tokens", "4", "--fast-memory", "25%", "--no-profile"]
    shown = CliRunner().invoke(app, words)
    assert shown.exit_code == 0
    assert "6 of 24 experts (25.0%)" in shown.stderr.replace("\n", " ").replace("  ", " ") or "25.0%" in shown.stderr
    assert "waiting for misses" in shown.stderr and "waiting for misses" not in shown.stdout
    told = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
    assert told["experts"]["leased"] > 0
    assert {row["what"] for row in told["memory"]} >= {"expert slots", "dense weights", "all experts"}


def test_shared_pages_are_no_more_than_the_model_fills(pack: Path) -> None:
    with Pipeline(pack, profile=False, pace="1GB", kv_memory="shared", max_context=256, max_batch=1) as pipe:
        pages = pipe.budget.pages
        assert pages is not None
        assert (pages.pages - pages.kv_pages - 1) * pages.shape.slots < 24 <= pages.slots
