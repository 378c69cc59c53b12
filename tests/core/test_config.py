"""Where settings come from, and that nothing is accepted and ignored."""

from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steerpipe.core.config import EngineConfig, cache_folder, load_config
from steerpipe.core.errors import ConfigError


def write(folder: Path, text: str) -> Path:
    file = folder / "engine.toml"
    file.write_text(text)
    return file


def test_defaults_when_nothing_is_said() -> None:
    assert load_config({}, {}) == EngineConfig()
    assert load_config({"dtype": None, "threads": None}, {}) == EngineConfig()


def test_flags_beat_the_environment_which_beats_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, '[engine]\ndtype = "bfloat16"\nthreads = 3\nmax_batch = 2\n')
    environ = {"STEERPIPE_THREADS": "5", "STEERPIPE_MAX_BATCH": "6", "PATH": "/bin"}
    config = load_config({"max_batch": 7}, environ, file)
    assert config == EngineConfig(dtype="bfloat16", threads=5, max_batch=7)


@given(st.sets(st.sampled_from(["flag", "environment", "file"])))
def test_the_strongest_source_wins(tmp_path_factory: pytest.TempPathFactory, sources: set[str]) -> None:
    file = write(tmp_path_factory.mktemp("config"), "[engine]\nmax_context = 30\n" if "file" in sources else "")
    environ = {"STEERPIPE_MAX_CONTEXT": "20"} if "environment" in sources else {}
    flags = {"max_context": 10} if "flag" in sources else {}
    by_strength = [("flag", 10), ("environment", 20), ("file", 30)]
    expected = next((value for source, value in by_strength if source in sources), None)
    assert load_config(flags, environ, file).max_context == expected


def test_the_process_environment_is_read_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEERPIPE_KV_MEMORY", "1GiB")
    assert load_config().kv_memory == "1GiB"


def test_settings_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        EngineConfig().max_batch = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("flags", "environ", "toml", "what", "fix"),
    [
        ({"dtpye": "auto"}, {}, "", "dtpye is not a setting", "did you mean dtype?"),
        ({}, {"STEERPIPE_MAXCONTEXT": "1"}, "", "STEERPIPE_MAXCONTEXT is not a setting", "mean STEERPIPE_MAX_CONTEXT?"),
        ({}, {}, "[engine]\nthread = 1", "engine.toml: thread is not a setting", "did you mean"),
        ({"zzz": 1}, {}, "", "zzz is not a setting", "the settings are dtype, device, threads, max_context"),
        ({"dtype": "fp8"}, {}, "", "dtype is 'fp8' (str)", "dtype must be one of auto, float32, bfloat16"),
        ({}, {"STEERPIPE_DEVICE": "tpu"}, "", "STEERPIPE_DEVICE is 'tpu'", "must be one of auto, cpu, cuda"),
        ({}, {"STEERPIPE_THREADS": "two"}, "", "STEERPIPE_THREADS is 'two' (str)", "must be an integer from 1 to 256"),
        ({}, {"STEERPIPE_THREADS": ""}, "", "STEERPIPE_THREADS is ''", "must be an integer from 1 to 256"),
        ({}, {"STEERPIPE_THREADS": "-1"}, "", "STEERPIPE_THREADS is '-1'", "must be an integer from 1 to 256"),
        ({"threads": 0}, {}, "", "threads is 0 (int)", "threads must be an integer from 1 to 256"),
        ({"threads": True}, {}, "", "threads is True (bool)", "threads must be an integer from 1 to 256"),
        ({"threads": 2.0}, {}, "", "threads is 2.0 (float)", "threads must be an integer from 1 to 256"),
        ({"prefill_chunk": 100}, {}, "", "prefill_chunk is 100", "prefill_chunk must be a positive multiple of 16"),
        ({"prefill_chunk": 0}, {}, "", "prefill_chunk is 0", "prefill_chunk must be a positive multiple of 16"),
        ({}, {}, '[engine]\nmax_batch = "8"', "engine.toml: max_batch is '8' (str)", "max_batch must be an integer"),
        ({}, {}, "[engine]\nkv_memory = 512", "engine.toml: kv_memory is 512 (int)", "kv_memory must be an amount"),
        ({"kv_memory": "lots"}, {}, "", "kv_memory is 'lots'", 'such as "512MiB"'),
        ({"kv_memory": "0MiB"}, {}, "", "kv_memory is '0MiB'", 'such as "512MiB"'),
        ({}, {}, "[engines]\ndtype = 'auto'", "engine.toml has 'engines'", "put every setting under [engine]"),
        ({}, {}, "dtype = 'auto'", "engine.toml has 'dtype'", "put every setting under [engine]"),
        ({}, {}, "engine = 3", "engine.toml: engine is 3", "make engine a table: [engine]"),
        ({}, {}, "[engine]\n\nthreads = = 3\n", "line 3", "correct that line"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_its_place_and_its_fix(
    tmp_path: Path, flags: dict[str, object], environ: dict[str, str], toml: str, what: str, fix: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(flags, environ, write(tmp_path, toml))
    assert what in caught.value.what
    assert fix in caught.value.fix


def test_a_weaker_source_is_checked_even_when_a_stronger_one_hides_it() -> None:
    with pytest.raises(ConfigError, match="STEERPIPE_THREADS"):
        load_config({"threads": 1}, {"STEERPIPE_THREADS": "many"})
    for name in ("THREADS", "PACE"):
        with pytest.raises(ConfigError, match=f"STEERPIPE_{name} is '999"):
            load_config({}, {f"STEERPIPE_{name}": "9" * 5000})


def test_a_missing_file_and_a_binary_one_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml cannot be read: No such file"):
        load_config({}, {}, tmp_path / "absent.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"binary\.toml is not UTF-8"):
        load_config({}, {}, tmp_path / "binary.toml")


def test_variables_that_kubernetes_sets_are_left_alone() -> None:
    names = ["SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_HTTP", "PORT", "PORT_80_TCP", "PORT_80_TCP_ADDR"]
    assert load_config({}, {f"STEERPIPE_{name}": "tcp://10.0.0.1:80" for name in names}) == EngineConfig()


def test_the_constructor_is_as_strict_as_the_loader() -> None:
    with pytest.raises(ConfigError, match="prefill_chunk is 17"):
        EngineConfig(prefill_chunk=17)
    with pytest.raises(ConfigError, match="max_batch is None"):
        EngineConfig(max_batch=None)  # type: ignore[arg-type]


def test_every_setting_can_come_from_the_environment() -> None:
    texts = {
        "dtype": "float32", "device": "cpu", "threads": "2", "max_context": "64",
        "prefill_chunk": "32", "kv_memory": "1MiB", "max_batch": "3", "cache_dir": "/somewhere",
        "fast_memory": "25%", "ram": "2GiB", "pin": "1GiB", "pace": "1GB", "policy": "lru", "profile": "False",
        "predict": "off", "quality": "fast", "quality_profile": "/some/quality.json", "cover": "4",
    }  # fmt: skip
    assert texts.keys() == {field.name for field in fields(EngineConfig)}
    config = load_config({}, {f"STEERPIPE_{name.upper()}": text for name, text in texts.items()})
    assert {name: str(getattr(config, name)) for name in texts} == texts


def test_the_cache_is_where_it_is_set_else_in_the_users_cache() -> None:
    set_there = load_config({"cache_dir": "/big/disk"}, {})
    assert cache_folder(set_there, {"XDG_CACHE_HOME": "/xdg"}) == Path("/big/disk")
    assert cache_folder(EngineConfig(), {"XDG_CACHE_HOME": "/xdg"}) == Path("/xdg/steerpipe")
    assert cache_folder(EngineConfig(), {}) == Path.home() / ".cache" / "steerpipe"
