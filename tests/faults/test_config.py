"""A config.json that asks for something we do not compute stops the load with the key's name and what to do."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from steerpipe.core.errors import UnsupportedConfigError
from steerpipe.model.checkpoint import read_spec
from steerpipe.model.families import FAMILIES
from steerpipe.model.spec import ModelSpec
from tests.faults import folders
from tests.faults.running import generate, refused

OWN_REPOSITORY = "take config.json from the model's own repository"


def spec_of(family: str, **changes: Any) -> ModelSpec:
    raw = {key: value for key, value in (folders.CONFIGS[family] | changes).items() if value is not ...}
    return read_spec(FAMILIES[family], raw, "config.json")


def complaint(family: str, **changes: Any) -> str:
    with pytest.raises(UnsupportedConfigError) as caught:
        spec_of(family, **changes)
    return str(caught.value)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_configs_that_the_tests_damage_are_good(family: str) -> None:
    assert spec_of(family).family == family


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention_sinks", True),
        ("attention_chunk_size", 64),
        ("final_logit_softcapping", 30.0),
        ("logit_scale", 0.5),
        ("routed_scaling_factor", 2.5),
        ("scoring_func", "sigmoid"),
        ("auto_map", {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}),
        ("frobnicate", 0),
        ("frobnicate", False),
        ("frobnicate", ""),
    ],
)
def test_a_key_that_nobody_knows_stops_the_load(family: str, key: str, value: object) -> None:
    message = complaint(family, **{key: value})
    assert f"{key} = {value!r}" in message
    assert "may change the numbers" in message
    assert f"if {key!r} is a spelling mistake or inert, remove it" in message


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize(
    "said",
    [
        ["FooForCausalLM"],
        ["{}ForSequenceClassification"],
        ["{}ForCausalLM", "{}ForSequenceClassification"],
        ["{}Model"],
        "{}ForCausalLM",
        [7],
        {"a": 1},
        True,
    ],
    ids=str,
)
def test_another_class_of_the_same_type_stops_the_load(family: str, said: Any) -> None:
    own = FAMILIES[family].architecture.removesuffix("ForCausalLM")
    if isinstance(said, list | str):
        said = json.loads(json.dumps(said).replace("{}", own))
    message = complaint(family, architectures=said)
    assert f"of {family}, only {own}ForCausalLM is computed" in message
    assert (said[-1] if isinstance(said, list) and isinstance(said[0], str) else repr(said)) in message
    assert "take the release for text generation" in message


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("said", [..., None, []])
def test_a_config_need_not_name_its_class(family: str, said: object) -> None:
    assert spec_of(family, architectures=said) == spec_of(family)


def test_an_unknown_key_gets_the_nearest_one_as_a_hint() -> None:
    assert "did you mean 'norm_topk_prob'?" in complaint("qwen3_moe", norm_topk_probs=True)


def test_all_unknown_keys_are_named_at_once() -> None:
    message = complaint("mixtral", zeta=1, alpha=2)
    assert "alpha = 2, zeta = 1" in message


def test_a_long_value_is_shortened() -> None:
    assert len(complaint("mixtral", junk=list(range(5000)))) < 500


@pytest.mark.parametrize("value", [None, {}, []])
def test_a_key_without_content_is_no_request(value: object) -> None:
    assert spec_of("mixtral", frobnicate=value) == spec_of("mixtral")


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("quantization_config", {"quant_method": "gptq", "bits": 4, "group_size": 128}),
        ("quantization_config", {"quant_method": "awq", "bits": 4, "modules_to_not_convert": None}),
        ("quantization_config", {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}),
        ("quantization", {"group_size": 64, "bits": 4}),
        ("quantization_config", True),
    ],
)
def test_a_quantised_release_is_refused_as_such(family: str, key: str, said: Any) -> None:
    message = complaint(family, **{key: said})
    method = said.get("quant_method", "unnamed") if isinstance(said, dict) else said
    assert f"config.json has a {key} ({method})" in message
    assert "take the release in bfloat16 or float16" in message


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize(
    ("key", "value"),
    [("hidden_act", "gelu"), ("hidden_act", "silu "), ("partial_rotary_factor", 0.5)],
)
def test_a_known_key_with_a_value_that_is_not_computed(family: str, key: str, value: object) -> None:
    message = complaint(family, **{key: value})
    assert f"config.json says {key} = {value!r}; only" in message
    assert "run this model through transformers" in message


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_an_unknown_kind_of_rope_names_the_known_ones(family: str, key: str) -> None:
    message = complaint(family, **{key: {"rope_type": "mrope", "factor": 2.0}})
    assert "config.json says rope_type = 'mrope'" in message
    assert "default, linear, dynamic, yarn, llama3, longrope" in message


@pytest.mark.parametrize(
    ("rope", "words"),
    [
        ({"rope_type": "default", "mrope_section": [16, 24]}, "mrope_section = [16, 24]"),
        ({"rope_type": "linear", "factor": 2.0, "beta_fast": 32}, "beta_fast = 32"),
        ({"rope_type": "default", "partial_rotary_factor": 0.25}, "partial_rotary_factor = 0.25"),
        ({"rope_type": "linear"}, "has no 'factor'"),
        ({"rope_type": "linear", "factor": 0}, "factor = 0"),
        ({"rope_type": "linear", "factor": float("nan")}, "factor = nan"),
        ({"rope_type": "dynamic", "factor": "2"}, "factor = '2'"),
        ({"rope_type": "yarn", "factor": 4.0, "beta_fast": 0}, "beta_fast = 0"),
        ({"rope_type": "yarn", "factor": 4.0, "truncate": 1}, "truncate = 1"),
        ({"rope_type": "yarn", "factor": 4.0, "mscale": -9.0}, "mscale = -9.0"),
        ({"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}, "high_freq_factor = 4"),
        ({"rope_type": "longrope", "factor": 2, "short_factor": [1], "long_factor": [1]}, "1 entries for 4 rotated"),
        ({"rope_type": "longrope", "short_factor": [0] * 4, "long_factor": [1] * 4}, "short_factor = [0, 0, 0, 0]"),
        ({"rope_theta": 1.0}, "rope_theta = 1.0"),
        ({"rope_theta": -1}, "rope_theta = -1"),
        (["linear", 2.0], "an object is needed"),
        ({"rope_type": "default", "type": "linear", "factor": 2.0}, "rope_type = 'default', type = 'linear'"),
    ],
)
def test_rope_settings_that_cannot_be_computed(rope: object, words: str) -> None:
    message = complaint("qwen3_moe", rope_theta=..., rope_parameters=rope)
    assert words in message
    assert "config.json" in message


@pytest.mark.parametrize(
    ("family", "changes", "both"),
    [
        ("qwen3_moe", {"num_local_experts": 8}, "num_experts = 4, num_local_experts = 8"),
        ("mixtral", {"num_experts": 8}, "num_experts = 8, num_local_experts = 4"),
        ("olmoe", {"dtype": "bfloat16"}, "dtype = 'bfloat16', torch_dtype = 'float32'"),
        (
            "qwen2_moe",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
            "rope_theta = 10000.0, rope_parameters.rope_theta = 500000.0",
        ),
        (
            "mixtral",
            {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            "rope_parameters = {'rope_type': 'default'}, rope_scaling = {'rope_type': 'linear', 'factor': 2.0}",
        ),
    ],
)
def test_old_and_new_spelling_must_agree(family: str, changes: dict[str, Any], both: str) -> None:
    message = complaint(family, **changes)
    assert f"says the same thing twice and differently: {both}" in message
    assert "keep one of the two keys" in message


def test_old_and_new_spelling_may_say_the_same() -> None:
    said = {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000},
        "num_local_experts": 4,
        "dtype": "float32",
    }
    assert spec_of("qwen3_moe", **said) == spec_of("qwen3_moe")


REQUIRED = [
    "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "max_position_embeddings",
    "num_experts_per_tok", "intermediate_size",
]  # fmt: skip


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("key", REQUIRED)
@pytest.mark.parametrize("gone", [..., None])
def test_a_required_key_that_is_missing_or_null(family: str, key: str, gone: object) -> None:
    message = complaint(family, **{key: gone})
    assert f"config.json has no {key!r}" in message
    assert "the file is not a complete model config" in message


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("key", REQUIRED)
@pytest.mark.parametrize("value", ["32", 32.0, 32.5, -1, 0, True, [32], {"a": 1}, float("nan"), float("inf"), 10**30])
def test_a_size_must_be_a_whole_number(family: str, key: str, value: object) -> None:
    message = complaint(family, **{key: value})
    assert f"config.json says {key} = {value!r}: a whole number from " in message
    assert OWN_REPOSITORY in message


@pytest.mark.parametrize("value", ["1e-6", 0, -1e-6, float("nan"), float("inf"), True, 10**400])
def test_an_epsilon_must_be_a_number_above_zero(value: object) -> None:
    assert "config.json says rms_norm_eps = " in complaint("olmoe", rms_norm_eps=value)


@pytest.mark.parametrize("value", [0, 1, "false", "no", []])
def test_a_flag_must_be_true_or_false(value: object) -> None:
    message = complaint("qwen2_moe", tie_word_embeddings=value, norm_topk_prob=value)
    assert f"= {value!r}: true or false is needed" in message


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("mixtral", {"num_experts_per_tok": 5}, "num_experts_per_tok = 5, but there are only 4 experts"),
        ("qwen3_moe", {"num_attention_heads": 3}, "3 heads of 8 over 2 key-value heads"),
        ("mixtral", {"num_attention_heads": 64, "num_key_value_heads": 64}, "64 heads of 0"),
        ("olmoe", {"num_attention_heads": 6, "num_key_value_heads": 6}, "6 heads of 5"),
        ("qwen3_moe", {"head_dim": 7}, "4 heads of 7"),
        ("mixtral", {"num_hidden_layers": 10**6}, "num_hidden_layers = 1000000: a whole number from 1 to 1000"),
        ("mixtral", {"num_local_experts": 10**8}, "num_experts = 100000000: a whole number from 1 to 10000"),
        (
            "mixtral",
            {"num_hidden_layers": 1000, "num_local_experts": 10_000},
            "asks for 10000000 experts in 1000 layers",
        ),
        ("olmoe", {"clip_qkv": -8.0}, "clip_qkv = -8.0: a number above 0 is needed"),
        ("olmoe", {"clip_qkv": "8"}, "clip_qkv = '8': a finite number is needed"),
        ("qwen2_moe", {"layer_types": ["full_attention", "linear_attention"]}, "layer_types full_attention, linear"),
        ("qwen2_moe", {"layer_types": ["full_attention"]}, "has 1 layer_types for 2 layers"),
        ("qwen2_moe", {"layer_types": ["full_attention"] * 3}, "has 3 layer_types for 2 layers"),
        ("qwen2_moe", {"layer_types": "full_attention"}, "a list of strings is needed"),
        ("qwen2_moe", {"layer_types": ["sliding_attention"] * 2}, "but use_sliding_window is off"),
        ("qwen2_moe", {"use_sliding_window": True, "sliding_window": None}, "but gives no sliding_window"),
        ("qwen3_moe", {"use_sliding_window": True}, "but gives no sliding_window"),
        ("qwen3_moe", {"layer_types": ["full_attention"] * 2}, "layer_types = "),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step = 0"),
        ("qwen3_moe", {"mlp_only_layers": [0.5]}, "mlp_only_layers = [0.5]"),
        ("qwen3_moe", {"use_qk_norm": False}, "use_qk_norm = False; only True"),
        ("qwen3_moe", {"qkv_bias": True}, "qkv_bias = True; only False"),
        ("qwen3_moe", {"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size = 64; only 0"),
        ("mixtral", {"attention_bias": True}, "attention_bias = True; only False"),
        ("mixtral", {"head_dim": "8"}, "head_dim = '8'"),
    ],
)
def test_sizes_and_switches_that_do_not_fit_each_other(family: str, changes: dict[str, Any], words: str) -> None:
    message = complaint(family, **changes)
    assert words in message
    assert "config.json" in message


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "auto", 16])
def test_weights_of_a_kind_that_cannot_be_loaded(folder: Path, dtype: object) -> None:
    folders.edit_config(folder, torch_dtype=dtype)
    message = refused(folder)
    assert f"config.json says the weights are {dtype}" in message
    assert "only float32, bfloat16, float16 can be loaded" in message


def damage(write: Callable[[dict[str, Any]], str | bytes]) -> Callable[[Path], None]:
    def apply(file: Path) -> None:
        text = write(json.loads(file.read_text()))
        file.write_bytes(text if isinstance(text, bytes) else text.encode())

    return apply


@pytest.mark.parametrize(
    ("apply", "words"),
    [
        (damage(lambda raw: json.dumps(raw)[:-20]), "config.json is not JSON"),
        (damage(lambda _: ""), "config.json is not JSON"),
        (damage(lambda _: b"\xff\xfe{\x00"), "config.json is not JSON"),
        (damage(lambda _: b"\x00" * 64), "config.json is not JSON"),
        (damage(lambda _: "[" * 100_000), "config.json is not JSON"),
        (damage(lambda _: '{"hidden_size": ' + "9" * 5000 + "}"), "config.json is not JSON"),
        (damage(lambda _: "[1, 2]"), "config.json is not a JSON object"),
        (damage(lambda _: "null"), "config.json is not a JSON object"),
        (damage(lambda raw: json.dumps(raw | {"rms_norm_eps": float("nan")})), "rms_norm_eps = nan"),
        (damage(lambda raw: json.dumps(raw | {"rope_theta": float("inf")})), "rope_theta = inf"),
        (damage(lambda raw: json.dumps(raw | {"frobnicate": 1})), "frobnicate = 1"),
        (
            damage(lambda raw: json.dumps(raw | {"model_type": "gpt_bigcode"})),
            "a 'gpt_bigcode' model; known are mixtral",
        ),
        (damage(lambda raw: json.dumps(raw | {"model_type": None})), "'None' model"),
        (damage(lambda raw: json.dumps({k: v for k, v in raw.items() if k != "model_type"})), "'unnamed' model"),
    ],
)
def test_a_damaged_config_is_told_on_stderr_with_status_two(
    folder: Path, apply: Callable[[Path], None], words: str
) -> None:
    apply(folder / "config.json")
    message = refused(folder)
    assert words in message
    assert str(folder) in message


def test_an_unknown_family_says_how_to_add_one(folder: Path) -> None:
    folders.edit_config(folder, model_type="deepseek_v3")
    message = refused(folder)
    assert "is a 'deepseek_v3' model; known are mixtral, olmoe, qwen2_moe, qwen3_moe" in message
    assert "docs/add-a-model.md" in message


def test_the_undamaged_folder_generates(folder: Path) -> None:
    result = generate(folder)
    assert result.exit_code == 0, result.output
