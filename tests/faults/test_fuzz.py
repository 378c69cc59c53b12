"""Random damage to any file of a checkpoint ends in an answer or in words, never in a traceback."""

import contextlib
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steerpipe.core.errors import CheckpointError
from steerpipe.model.checkpoint import read_spec
from steerpipe.model.families import FAMILIES
from tests.faults import folders
from tests.faults.running import generate

FILES = ["config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]


def flip(raw: bytes, chance: random.Random) -> bytes:
    """One to four bytes changed, taken away or put in."""
    damaged = bytearray(raw)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(damaged))
        match chance.randrange(4):
            case 0:
                damaged[at] ^= 1 << chance.randrange(8)
            case 1:
                damaged[at] = chance.choice(b'0123456789-."{}[],:eE \x00\xff')
            case 2:
                del damaged[at]
            case _:
                damaged.insert(at, chance.choice(b'0123456789-."{}[],:'))
    return bytes(damaged)


def check(folder: Path, what: str) -> None:
    result = generate(folder, "--json")
    if result.exit_code == 0:
        assert result.stdout.startswith("{"), what
        return
    assert isinstance(result.exception, SystemExit), f"{what}: {result.exception!r}"
    assert result.exit_code in (1, 2), what
    assert result.stdout == "", what
    assert result.stderr.startswith("error: ") and "fix: " in result.stderr, what


def damage(folder: Path, name: str, rounds: int, seed: int, first: int | None = None) -> None:
    """`first`: only that many bytes at the beginning are damaged."""
    file = folder / name
    good = file.read_bytes()
    for i in range(seed, seed + rounds):
        chance = random.Random(i)
        file.write_bytes(flip(good[:first], chance) + (good[first:] if first else b""))
        check(folder, f"{name}, seed {i}: {file.read_bytes()[:300]!r}")
    file.write_bytes(good)


@pytest.mark.parametrize("name", FILES)
def test_damaged_text_files(folder: Path, name: str) -> None:
    damage(folder, name, rounds=60, seed=0)


def test_a_damaged_generation_config(folder: Path) -> None:
    (folder / "generation_config.json").write_text(
        '{"do_sample": true, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "eos_token_id": [2, 3]}'
    )
    damage(folder, "generation_config.json", rounds=60, seed=0)


_LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6) | st.just(10**400)
_JSON = _LEAVES | st.lists(_LEAVES, max_size=3) | st.dictionaries(st.text(max_size=4), _LEAVES, max_size=2)
_KEYS = sorted({key for config in folders.CONFIGS.values() for key in config})
_ROPE_KEYS = [
    "rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "attention_factor", "beta_fast",
    "beta_slow", "truncate", "mscale", "mscale_all_dim", "low_freq_factor", "high_freq_factor", "short_factor",
    "long_factor", "partial_rotary_factor",
]  # fmt: skip
_KINDS = st.sampled_from(["default", "linear", "dynamic", "yarn", "llama3", "longrope"])
_ROPES = st.builds(
    lambda kind, rest: {"rope_type": kind} | rest, _KINDS, st.dictionaries(st.sampled_from(_ROPE_KEYS), _JSON)
)


@settings(max_examples=400)
@given(
    family=st.sampled_from(sorted(FAMILIES)),
    changes=st.dictionaries(st.sampled_from([*_KEYS, "layer_types", "head_dim", "qkv_bias"]), _JSON, max_size=3),
    rope=st.none() | _ROPES,
)
def test_values_of_any_kind_are_read_or_refused(family: str, changes: dict[str, object], rope: object) -> None:
    raw = folders.CONFIGS[family] | changes | ({"rope_parameters": rope} if rope else {})
    with contextlib.suppress(CheckpointError):
        read_spec(FAMILIES[family], raw, "config.json")


def test_a_damaged_header(folder: Path) -> None:
    damage(folder, "model.safetensors", rounds=100, seed=0, first=1500)


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_damaged_text_files_at_length(folder: Path, name: str) -> None:
    damage(folder, name, rounds=800, seed=1000)


@pytest.mark.slow
def test_a_damaged_header_at_length(folder: Path) -> None:
    damage(folder, "model.safetensors", rounds=3000, seed=1000, first=1500)
