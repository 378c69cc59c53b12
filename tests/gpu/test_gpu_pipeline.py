"""A pipeline on a GPU: budgets and tiers change no bit, what is printed is what is there, and it ends cleanly."""

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from steerpipe import Pipeline
from steerpipe.core.errors import ConfigError
from steerpipe.model.checkpoint import open_checkpoint
from steerpipe.store.formats import parse_expert_format
from steerpipe.store.pack import PackOptions, write_pack
from steerpipe.tiny import write_tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
PROMPT = "The quick brown fox jumps over the lazy dog, again and again and again, until the night is over."
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "ignore_eos": True, "logprobs": 3}
CASES = [("olmoe", "bf16"), ("qwen2_moe", "int4"), ("qwen3_moe", "int8")]  # every pair of tiers is in test_gpu_law
SETTINGS: dict[str, Any] = {"device": "cuda", "profile": False, "kv_memory": "64MiB"}


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    folder = tmp_path_factory.mktemp("packs")
    found = {}
    for family, form in CASES:
        if not (folder / family).exists():
            write_tiny(family, folder / family)
        found[family, form] = folder / f"{family}-{form}"
        write_pack(open_checkpoint(folder / family), found[family, form], PackOptions(parse_expert_format(form)))
    return found


BUDGETS = [
    {"fast_memory": "100%"},
    {"fast_memory": "50%"},
    {"fast_memory": "25%", "pin": "0"},
    {"fast_memory": "25%", "ram": "100KiB", "pin": "50KiB"},
    {"fast_memory": "25%", "ram": "1KiB"},
    {"fast_memory": "25%", "policy": "lru", "pace": "200MB"},
]


def bits(pipe: Pipeline) -> Any:
    one = pipe.generate(PROMPT, **GREEDY)
    several = pipe.generate_batch([PROMPT, PROMPT[:20], PROMPT[30:]], **GREEDY)
    return [(each.token_ids, each.logprobs, each.top_logprobs) for each in (one, *several)]


@pytest.mark.parametrize(("family", "form"), CASES)
def test_a_budget_changes_no_bit(packs: dict[tuple[str, str], Path], family: str, form: str) -> None:
    with Pipeline(packs[family, form], **SETTINGS) as whole:
        assert whole.budget.resident and whole.counters() is None
        expected, two_slots = bits(whole), {"fast_memory": f"{200 / whole.budget.slots}%"}
    for budget in [*BUDGETS, two_slots]:
        with Pipeline(packs[family, form], **SETTINGS | budget) as tight:
            assert bits(tight) == expected, budget
            counters = tight.counters()
            assert tight.budget.resident or counters is not None
            if counters is not None:
                assert counters.hits + counters.late + counters.misses == counters.leased > 0
                tight.experts.check_integrity()  # type: ignore[union-attr]


def test_the_card_is_given_back(packs: dict[tuple[str, str], Path]) -> None:
    with Pipeline(packs["olmoe", "bf16"], **SETTINGS) as pipe:
        pipe.generate(PROMPT, **GREEDY)
    del pipe
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    for _ in range(2):
        with Pipeline(packs["olmoe", "bf16"], **SETTINGS | {"fast_memory": "25%"}) as pipe:
            pipe.generate(PROMPT, **GREEDY)
            engine = weakref.ref(pipe.engine)
        assert engine() is None and pipe.prediction is None, "a closed pipeline holds on to its engine"
    assert torch.cuda.memory_allocated() <= before + 2**20


def test_a_second_run_starts_where_the_first_ended(packs: dict[tuple[str, str], Path]) -> None:
    learning = SETTINGS | {"profile": True, "fast_memory": "50%"}
    pack = packs["qwen3_moe", "int8"]
    with Pipeline(pack, **learning) as first:
        cold = bits(first)
    assert (pack / "profile.json").is_file()
    with Pipeline(pack, **learning) as second:
        assert bits(second) == cold
        counters = second.counters()
        assert counters is not None and counters.prefetch.hits > 0
    (pack / "profile.json").unlink()


def test_an_error_names_the_smallest_budget(packs: dict[tuple[str, str], Path]) -> None:
    with pytest.raises(ConfigError) as caught:
        Pipeline(packs["olmoe", "bf16"], **SETTINGS | {"fast_memory": "1kB"})
    assert "bytes" in caught.value.fix


def test_the_cpu_agrees_within_a_tolerance(packs: dict[tuple[str, str], Path]) -> None:
    """bf16 on both; the first token's log probability, before routing can have drifted far apart."""
    asked, here = GREEDY | {"max_tokens": 1}, SETTINGS | {"device": "cpu", "dtype": "bfloat16"}
    for case in CASES:
        with Pipeline(packs[case], **SETTINGS) as gpu, Pipeline(packs[case], **here) as cpu:
            left, right = (pipe.generate(PROMPT, **asked).logprobs[0].logprob for pipe in (gpu, cpu))
        assert left == pytest.approx(right, abs=0.3), case
