"""Everything in memory: the weights are the checkpoint's, aligned, and a lease is one wave."""

import pytest
import torch

from steerpipe.core.errors import CapacityError
from steerpipe.model.checkpoint import Checkpoint
from steerpipe.store import resident
from steerpipe.store.resident import ResidentExperts, resident_bytes

CPU = torch.device("cpu")


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe", "mixtral", "olmoe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_expert_is_gate_rows_then_up_rows_and_down(
    tiny: dict[str, Checkpoint], family: str, dtype: torch.dtype
) -> None:
    source = tiny[family]
    experts = ResidentExperts.load(source, dtype, CPU)
    for layer in source.spec.moe_layers:
        routed = range(source.spec.moe(layer).experts)
        with experts.lease(layer, routed) as lease:
            (wave,) = lease.waves()
        for expert in routed:
            gate, up, down = source.read_expert(layer, expert)
            assert torch.equal(wave.table[expert].gate_up, torch.cat((gate, up)).to(dtype))
            assert torch.equal(wave.table[expert].down, down.to(dtype))


def test_weights_own_contiguous_memory_that_starts_on_a_cache_line(checkpoint: Checkpoint) -> None:
    experts = ResidentExperts.load(checkpoint, torch.bfloat16, CPU)
    with experts.lease(0, [0, 1]) as lease:
        tensors = [t for wave in lease.waves() for w in wave.table.values() for t in (w.gate_up, w.down)]
    assert all(t.is_contiguous() and t.data_ptr() % 64 == 0 for t in tensors)
    assert all(t.untyped_storage().nbytes() == t.nbytes for t in tensors)


def test_a_lease_is_one_wave_of_what_was_asked_for_in_ascending_order(checkpoint: Checkpoint) -> None:
    experts = ResidentExperts.load(checkpoint, torch.float32, CPU)
    with experts.lease(1, [3, 0, 2]) as lease:
        waves = list(lease.waves())
    assert [wave.experts for wave in waves] == [(0, 2, 3)]
    assert waves[0].table.keys() == {0, 2, 3}


def test_the_same_expert_cannot_be_leased_twice_at_once(checkpoint: Checkpoint) -> None:
    experts = ResidentExperts.load(checkpoint, torch.float32, CPU)
    with pytest.raises(AssertionError, match="leased twice"):
        experts.lease(0, [1, 1])


def test_progress_ends_at_the_size_of_all_experts(checkpoint: Checkpoint) -> None:
    seen: list[tuple[int, int]] = []
    ResidentExperts.load(checkpoint, torch.bfloat16, CPU, lambda done, total: seen.append((done, total)))
    total = resident_bytes(checkpoint.spec, torch.bfloat16)
    assert total == 2 * 4 * 3 * 32 * 16 * 2  # layers, experts, matrices, H, I, bytes
    assert seen[0] == (0, total)
    assert seen[-1] == (total, total)
    assert seen == sorted(seen)


def test_too_little_memory_is_a_capacity_error_with_the_amount(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> torch.Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(resident.torch, "empty", refuse)
    monkeypatch.setattr(type(checkpoint), "read_expert", lambda *_: (torch.zeros(16, 32),) * 2 + (torch.zeros(32, 16),))
    with pytest.raises(CapacityError, match=r"24 KiB as torch\.bfloat16 on cpu"):
        ResidentExperts.load(checkpoint, torch.bfloat16, CPU)
