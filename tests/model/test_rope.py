"""Rotary frequencies of every kind against transformers' own, in both spellings of the config."""

import json
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.mixtral.modeling_mixtral import MixtralRotaryEmbedding, apply_rotary_pos_emb

from steerpipe.model.checkpoint import read_spec
from steerpipe.model.families import FAMILIES
from steerpipe.model.rope import RopeTable, frequencies, rotate
from steerpipe.model.spec import RopeKind, RopeSpec
from tests.golden.cases import ROPE_KINDS, YARN, longrope
from tests.support.tiny import config_of

HEAD = 32
KINDS = ROPE_KINDS | {
    "longrope": longrope(HEAD),
    "longrope with its own attention factor": longrope(HEAD) | {"attention_factor": 1.2},
    "yarn of a short context": YARN | {"original_max_position_embeddings": 16, "factor": 32.0},
    "yarn whose ramp has no width": YARN | {"beta_fast": 4.0, "beta_slow": 4.0, "truncate": False},
}

every_kind = pytest.mark.parametrize("kind", KINDS)


def transformers_of(rope: dict[str, Any]) -> tuple[torch.Tensor, float]:
    """Frequencies and attention factor of transformers."""
    embedding = MixtralRotaryEmbedding(config_of("mixtral", head_dim=HEAD, rope_parameters=rope))
    return embedding.inv_freq, embedding.attention_scaling


def spec_of(**keys: Any) -> RopeSpec:
    raw = json.loads(config_of("mixtral", head_dim=HEAD).to_json_string())
    del raw["rope_parameters"]
    return read_spec(FAMILIES["mixtral"], raw | keys, "config.json").rope


@every_kind
def test_frequencies_and_attention_factor_are_those_of_transformers(kind: str) -> None:
    want, factor = transformers_of(KINDS[kind])
    spec = spec_of(rope_parameters=KINDS[kind])
    torch.testing.assert_close(frequencies(spec), want, rtol=3e-6, atol=0)
    assert spec.attention_factor == pytest.approx(factor, rel=1e-12)


@every_kind
def test_the_old_spelling_means_the_same(kind: str) -> None:
    scaling = dict(KINDS[kind])
    theta = scaling.pop("rope_theta")
    scaling["type"] = scaling.pop("rope_type")
    assert spec_of(rope_theta=theta, rope_scaling=scaling) == spec_of(rope_parameters=KINDS[kind])


def test_the_kinds_differ() -> None:
    """Otherwise the comparison would show nothing. `dynamic` is the default within the trained context."""
    found = {name: frequencies(spec_of(rope_parameters=rope)) for name, rope in ROPE_KINDS.items()}
    plain = frequencies(spec_of(rope_theta=10_000.0))
    assert torch.equal(found["dynamic"], plain)
    for name in ("default", "linear", "yarn", "yarn not truncated", "llama3"):
        assert not torch.allclose(found[name], plain, rtol=1e-2), name
    assert not torch.equal(found["yarn"], found["yarn not truncated"])


@pytest.mark.parametrize("positions", [[0, 1, 2], [1023, 1024, 1025], [4000, 7]])
def test_cosines_and_sines_are_those_of_transformers(positions: list[int]) -> None:
    embedding = MixtralRotaryEmbedding(config_of("mixtral", head_dim=HEAD, rope_parameters=YARN))
    cos, sin = embedding(torch.zeros(1), torch.tensor([positions]))  # [1, T, D]: both halves alike
    table = RopeTable(spec_of(rope_parameters=YARN), torch.device("cpu"))
    turn = table.rows(torch.tensor(positions), max(positions))
    torch.testing.assert_close(turn[:, 0], cos[0, :, : HEAD // 2], rtol=0, atol=2e-4 if max(positions) > 1e3 else 1e-6)
    torch.testing.assert_close(turn[:, 1], sin[0, :, : HEAD // 2], rtol=0, atol=2e-4 if max(positions) > 1e3 else 1e-6)


def test_an_entry_does_not_depend_on_how_far_the_table_reaches() -> None:
    spec = spec_of(rope_parameters=ROPE_KINDS["llama3"])
    at = torch.tensor([3, 500, 1000])
    short, long = RopeTable(spec, torch.device("cpu")), RopeTable(spec, torch.device("cpu"))
    long.rows(torch.tensor([9000]), 9000)
    assert torch.equal(short.rows(at, 1000), long.rows(at, 1000))


def test_a_rotation_turns_pairs_half_a_head_apart_as_in_transformers() -> None:
    spec = RopeSpec(RopeKind.DEFAULT, 100.0, HEAD)
    turn = RopeTable(spec, torch.device("cpu")).rows(torch.arange(5), 4)  # [5, 2, 16]
    x = torch.randn(5, 3, HEAD)
    cos, sin = (torch.cat([turn[:, i], turn[:, i]], dim=-1)[None] for i in (0, 1))  # [1, 5, 32]
    want, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos, sin)
    torch.testing.assert_close(rotate(x, turn), want[0].transpose(0, 1), rtol=1e-6, atol=1e-6)
    assert torch.equal(rotate(x, turn)[0], x[0]), "position 0 is not turned"


def test_a_rotation_is_computed_in_fp32_and_rounded_once() -> None:
    turn = RopeTable(RopeSpec(RopeKind.DEFAULT, 100.0, 8), torch.device("cpu")).rows(torch.tensor([7]), 7)
    x = torch.randn(1, 2, 8).bfloat16()
    assert torch.equal(rotate(x, turn), rotate(x.float(), turn).bfloat16())


def test_longrope_ends_where_its_short_factors_do() -> None:
    """Beyond the original context the frequencies of all keys that are stored already would have to change."""
    raw = json.loads(config_of("mixtral", head_dim=HEAD, rope_parameters=longrope(HEAD)).to_json_string())
    assert read_spec(FAMILIES["mixtral"], raw, "config.json").max_context == 256


def test_a_dynamic_model_of_transformers_agrees_up_to_the_trained_context() -> None:
    config = config_of("mixtral", head_dim=HEAD, rope_parameters=ROPE_KINDS["dynamic"], max_position_embeddings=64)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        model(torch.zeros(1, 64, dtype=torch.int64))
    torch.testing.assert_close(model.model.rotary_emb.inv_freq, frequencies(spec_of(rope_theta=10_000.0)))
