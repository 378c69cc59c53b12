"""What a pipeline joins on a GPU, as far as it can be seen without one: budgets, the table of memory, the source."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from steerpipe import Pipeline
from steerpipe.core.budget import ExpertBudget
from steerpipe.core.config import EngineConfig
from steerpipe.core.errors import CapacityError, ConfigError, TransferError
from steerpipe.core.ids import ExpertId
from steerpipe.core.resolve import resolve
from steerpipe.model.kv_cache import KvPool
from steerpipe.model.weights import build_weights
from steerpipe.runtime.experts import expert_facts, open_blocks, settle_budget
from steerpipe.runtime.facts import gather_facts
from steerpipe.runtime.memory import memory_rows
from steerpipe.runtime.profiles import ProfileKeeper
from steerpipe.store.cache import packed
from steerpipe.store.reader import Pack, open_pack
from steerpipe.tiny import write_tiny

GIB = 2**30
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    folder = tmp_path_factory.mktemp("cuda-wiring")
    write_tiny("olmoe", folder / "model")  # 4 layers of 8 experts
    return open_pack(packed(folder / "model", folder / "cache"))


def settled(pack: Pack, **settings: str) -> tuple[ExpertBudget, dict[tuple[str, str], int]]:
    """The budget on a made-up machine with a GPU, and its table of memory."""
    facts = replace(
        gather_facts(pack.spec, pack.folder), has_cuda=True, free_cuda_bytes=3 * GIB, free_ram_bytes=8 * GIB
    )
    config = EngineConfig(**settings)  # type: ignore[arg-type]
    resolved = resolve(config, facts)
    experts = expert_facts(pack, torch.bfloat16, resolved.device)
    budget = settle_budget(config, resolved, facts, experts)
    return budget, {(row.what, row.where): row.size_bytes for row in memory_rows(resolved, facts, budget, experts)}


def test_a_slot_of_a_gpu_is_as_large_as_a_block(pack: Pack) -> None:
    block = pack.layout(0).block_bytes
    assert expert_facts(pack, torch.bfloat16, "cuda").slot_bytes == block
    assert expert_facts(pack, torch.float32, "cpu").slot_bytes == 3 * 64 * 32 * 4


def test_every_tier_stands_in_the_table_with_its_bytes(pack: Pack) -> None:
    block = pack.layout(0).block_bytes
    budget, rows = settled(pack, fast_memory="25%", ram=f"{20 * block}", pin=f"{12 * block}")
    assert (budget.slots, budget.ram_bytes, budget.pinned_bytes) == (8, 20 * block, 12 * block)
    assert rows["expert slots", "GPU"] == 8 * block
    assert rows["experts behind the slots", "page-locked RAM"] == 12 * block
    assert rows["experts behind the slots", "RAM"] == 8 * block
    assert rows["all experts", "disk"] == 32 * block
    assert rows["dense weights", "GPU"] > 0 and rows["keys and values, at most", "GPU"] > 0


def test_a_model_that_fits_takes_no_ram(pack: Pack) -> None:
    budget, rows = settled(pack)
    assert budget.resident and budget.slots == 32
    assert {where for _, where in rows} == {"GPU"}


def test_without_a_word_about_ram_everything_is_page_locked(pack: Pack) -> None:
    budget, rows = settled(pack, fast_memory="25%")
    assert budget.pinned_bytes == budget.ram_bytes == 32 * pack.layout(0).block_bytes
    assert ("experts behind the slots", "RAM") not in rows


def test_a_budget_below_two_experts_names_the_smallest(pack: Pack) -> None:
    with pytest.raises(ConfigError) as caught:
        settled(pack, fast_memory="10kB")
    assert f"{2 * pack.layout(0).block_bytes:,} bytes" in caught.value.fix
    with pytest.raises(CapacityError, match="only 8 GiB of RAM are free"):
        settled(pack, fast_memory="25%", pin="9GiB")


@pytest.mark.parametrize("pin", ["0", "1GiB"])
def test_page_locked_memory_is_refused_where_there_is_no_gpu(pack: Pack, pin: str) -> None:
    with pytest.raises(ConfigError, match="only a GPU copies from page-locked memory"):
        Pipeline(pack.folder, device="cpu", pin=pin)


@pytest.mark.parametrize(("pinned", "pageable"), [(32, 0), (12, 8), (0, 32), (0, 0)])
def test_the_source_holds_what_the_budget_says(pack: Pack, pinned: int, pageable: int, tmp_path: Path) -> None:
    block = pack.layout(0).block_bytes
    budget = ExpertBudget(
        8, (pinned + pageable) * block, None, resident=False, reason="", pinned_bytes=pinned * block
    )  # fmt: skip
    opened = open_blocks(pack, budget, "lru", CPU, None)
    ladder, source = opened.ladder, opened.source
    assert ladder is not None and not source.resident
    for layer in range(4):
        with source.lease(layer, [1, 5]) as lease:
            assert sorted(expert for wave in lease.waves() for expert in wave) == [1, 5]
    counters = ladder.counters()
    assert (counters.leased, counters.misses) == (8, 8)
    assert ladder.residents == [ExpertId(layer, expert) for layer in range(4) for expert in (1, 5)]
    keeper = ProfileKeeper(pack, tmp_path, file=tmp_path / "profile.json")
    assert keeper.keep(ladder)
    ladder.close()
    ladder.close()
    again = open_blocks(pack, budget, "lru", CPU, None).ladder
    assert again is not None
    keeper = ProfileKeeper(pack, tmp_path, file=tmp_path / "profile.json")
    assert keeper.warm(again, 8) == 8
    again.close()


def test_a_model_without_experts_needs_no_source(pack: Pack) -> None:
    opened = open_blocks(pack, ExpertBudget(0, 0, None, resident=True, reason=""), "lfru", CPU, None)
    assert opened.ladder is None and opened.source.resident


def test_with_a_slot_for_everybody_everything_is_loaded_at_once(pack: Pack) -> None:
    told: list[tuple[int, int]] = []
    budget = ExpertBudget(32, 0, None, resident=True, reason="")
    opened = open_blocks(pack, budget, "lfru", CPU, lambda done, total: told.append((done, total)))
    assert opened.source.resident and opened.ladder is not None
    assert len(opened.ladder.residents) == 32
    assert told and told[-1][0] == told[-1][1]
    opened.ladder.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here: make test-gpu")
def test_an_engine_answers_through_the_gpus_decoder_and_source(pack: Pack) -> None:
    """In Triton's interpreter, joined as `Pipeline` does it on a GPU; the CPU's decoder gives the same tokens."""
    from steerpipe.model.gpu.decoder import GpuDecoder

    asked = {"temperature": 0, "max_tokens": 2, "ignore_eos": True, "logprobs": 0}
    config = EngineConfig(device="cpu", dtype="float32", profile=False)
    budget = ExpertBudget(8, 0, None, resident=False, reason="")
    with Pipeline(pack.folder, config=config) as pipe:
        expected = pipe.generate([70, 71], **asked)
        weights = build_weights(pipe.spec, pack.family.names, pack.read_dense(), torch.float32, CPU)
        pool = KvPool(pipe.spec, torch.float32, CPU, capacity_blocks=4)
        opened = open_blocks(pack, budget, "lfru", CPU, None)
        decoder = GpuDecoder(pipe.spec, weights, pool, CPU, max_batch=2)
        pipe.budget = budget
        pipe._parts = pipe._join(decoder, opened, pool, config, None)
        got = pipe.generate([70, 71], **asked)
        counters = pipe.counters()
        assert counters is not None and counters.leased >= 2 * 4 * 2  # steps, layers, top-2
        assert pipe.experts is opened.source
    assert got.token_ids == expected.token_ids
    assert [each.logprob for each in got.logprobs] == pytest.approx(
        [each.logprob for each in expected.logprobs], abs=1e-3
    )
    with pytest.raises(TransferError):  # closed with the pipeline
        opened.source.lease(0, [1])
