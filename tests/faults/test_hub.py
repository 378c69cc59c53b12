"""Models by hub name, against a hub on this machine. One process runs the cases in order, then the tests look."""

import json
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.faults import drive, folders
from tests.faults.hub_server import BROKEN, COMMIT, GATED, UNAUTHORISED, Hub, files_of, serving

BULK = dict.fromkeys(("pytorch_model.bin", "consolidated.00.pt", "consolidated.safetensors", "a.gguf"), b"x" * 50)
NESTED = {"original/consolidated.safetensors": b"x" * 50, "onnx/config.json": b"{}", ".gitattributes": b""}


@dataclass(frozen=True)
class Done:
    status: int
    stdout: str
    stderr: str

    @property
    def text(self) -> str:
        assert self.status == 0, self.stderr
        return str(json.loads(self.stdout)["text"])

    @property
    def refusal(self) -> str:
        assert self.status == 2, self.stderr
        assert self.stdout == ""
        assert self.stderr.startswith("error: ") and "\n  fix: " in self.stderr
        assert "Traceback" not in self.stderr
        return self.stderr


def run(home: Path, names: list[str], **environment: str) -> list[Done]:
    """`steerpipe generate NAME --json` for each name, in one new process with its own cache."""
    settings = {"HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "*"} | environment
    options = ["-p", "Hi there", "--max-tokens", "4", "--dtype", "float32", "--threads", "1", "--json"]
    ended = subprocess.run(
        [sys.executable, drive.__file__],
        input=json.dumps([["generate", name, *options] for name in names]),
        env=os.environ | settings, cwd=home, text=True, capture_output=True, timeout=120, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    *noise, last = ended.stdout.splitlines()
    assert not noise
    done = []
    for status, stdout, stderr, exception in json.loads(last):
        assert exception is None, exception
        done.append(Done(status, stdout, stderr))
    return done


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Hub:
    folder = folders.build(tmp_path_factory.mktemp("hub") / "model")
    good = files_of(folder)
    folders.shard(folder)
    sharded = files_of(folder)
    config = json.loads(good["config.json"])
    return Hub(
        {
            "tiny/good": sharded | BULK | NESTED,
            "tiny/pinned": good,
            "tiny/stranger": good | {"config.json": json.dumps(config | {"model_type": "martian"}).encode()},
            "tiny/odd-key": good | {"config.json": json.dumps(config | {"frobnicate": 1}).encode()},
            "tiny/pickled": {k: v for k, v in good.items() if k != "model.safetensors"} | BULK,
            "tiny/no-config": {k: v for k, v in good.items() if k != "config.json"},
            "tiny/no-tokenizer": {k: v for k, v in good.items() if "token" not in k},
            "tiny/gated": GATED,
            "tiny/private": UNAUTHORISED,
            "tiny/down": BROKEN,
            "tiny/cut": good,
            "tiny/short": good,
            "tiny/flaky": sharded,
        },
        faults={
            "tiny/cut/model.safetensors": ["cut"],
            "tiny/short/model.safetensors": ["short"],
            "tiny/flaky/model-00002-of-00002.safetensors": ["broken"],
        },
    )


NAMES = [
    "tiny/good", "tiny/good", f"tiny/pinned@{COMMIT}", "tiny/pinned@nowhere", "tiny/stranger", "tiny/odd-key",
    "tiny/pickled", "tiny/no-config", "tiny/no-tokenizer", "tiny/gated", "tiny/private", "tiny/absent", "tiny/down",
    "tiny/cut", "tiny/short", "tiny/short", "tiny/flaky", "tiny/flaky",
]  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def done(hub: Hub, home: Path) -> dict[str, list[Done]]:
    found: dict[str, list[Done]] = {}
    with serving(hub):
        for name, result in zip(NAMES, run(home, NAMES, HF_ENDPOINT=hub.address), strict=True):
            found.setdefault(name, []).append(result)
    return found


def test_a_model_is_fetched_and_answers(done: dict[str, list[Done]]) -> None:
    first, again = done["tiny/good"]
    assert first.text == again.text == done[f"tiny/pinned@{COMMIT}"][0].text
    assert first.stderr == again.stderr == ""


def test_only_what_is_needed_is_fetched_and_only_once(done: dict[str, list[Done]], hub: Hub) -> None:
    fetched = hub.fetched("tiny/good")
    assert len(fetched) == len(set(fetched))
    assert fetched[0] == "config.json"
    assert {
        "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json",
        "tokenizer.json", "chat_template.jinja",
    } <= set(fetched)  # fmt: skip
    assert set(fetched).isdisjoint(BULK | NESTED)


def test_what_follows_the_config_is_of_the_same_commit(done: dict[str, list[Done]], hub: Hub) -> None:
    later = [line for line in hub.log if line.startswith("GET /tiny/good/resolve/") and "config.json" not in line]
    assert later and all(f"/resolve/{COMMIT}/" in line for line in later)


def test_an_unknown_family_is_refused_before_its_weights_are_asked_for(done: dict[str, list[Done]], hub: Hub) -> None:
    message = done["tiny/stranger"][0].refusal
    assert "tiny/stranger is a 'martian' model; known are mixtral" in message
    assert hub.fetched("tiny/stranger") == ["config.json"]


def test_an_unknown_key_is_refused_before_the_weights_are_asked_for(done: dict[str, list[Done]], hub: Hub) -> None:
    message = done["tiny/odd-key"][0].refusal
    assert "config.json of tiny/odd-key has keys that are not understood" in message
    assert "frobnicate = 1" in message
    assert hub.fetched("tiny/odd-key") == ["config.json"]


def test_pickled_weights_are_not_even_fetched(done: dict[str, list[Done]], hub: Hub) -> None:
    assert "has neither model.safetensors nor" in done["tiny/pickled"][0].refusal
    assert set(hub.fetched("tiny/pickled")).isdisjoint(BULK)


@pytest.mark.parametrize(
    ("name", "words", "fix"),
    [
        ("tiny/absent", "neither a folder tiny/absent here nor a model tiny/absent on the hub", "check the spelling"),
        ("tiny/private", "the hub refuses access to tiny/private: Client error '401", "set HF_TOKEN to a token of an"),
        ("tiny/gated", "tiny/gated is gated", "accept its terms on the hub"),
        ("tiny/pinned@nowhere", "tiny/pinned has no revision nowhere", "leave the @revision away"),
        ("tiny/no-config", "tiny/no-config has no config.json", "give a model in transformers' form"),
        ("tiny/no-tokenizer", "no tokenizer in ", "copy the tokenizer files"),
        ("tiny/down", "the hub cannot be reached (Server error '500", "give a folder that holds the checkpoint"),
    ],
)
def test_each_way_of_failing_has_its_own_words(done: dict[str, list[Done]], name: str, words: str, fix: str) -> None:
    message = done[name][0].refusal
    assert words in message
    assert fix in message


def test_a_connection_that_is_cut_is_taken_up_again(done: dict[str, list[Done]], hub: Hub) -> None:
    assert done["tiny/cut"][0].text == done["tiny/good"][0].text
    assert hub.fetched("tiny/cut").count("model.safetensors") == 2


def test_a_file_that_arrives_short_is_not_used_and_the_next_run_fetches_it(done: dict[str, list[Done]]) -> None:
    first, second = done["tiny/short"]
    assert "tiny/short could not be fetched: Consistency check failed" in first.refusal
    assert "try again: what has arrived is kept" in first.refusal
    assert second.text == done["tiny/good"][0].text


def test_after_a_failure_only_what_is_missing_is_fetched(done: dict[str, list[Done]], hub: Hub) -> None:
    first, second = done["tiny/flaky"]
    assert "tiny/flaky could not be fetched: Server error '500" in first.refusal
    assert second.text == done["tiny/good"][0].text
    fetched = hub.fetched("tiny/flaky")
    assert fetched.count("config.json") == 1
    assert fetched.count("model-00002-of-00002.safetensors") == 2


def test_offline_uses_the_cache_and_says_what_it_lacks(done: dict[str, list[Done]], home: Path, tmp_path: Path) -> None:
    """A dead endpoint proves that nothing is asked for; half of one model's files are deleted from the cache."""
    shutil.copytree(home, tmp_path / "home", symlinks=True)
    snapshots = next((tmp_path / "home").glob("hub/models--tiny--flaky/snapshots/*"))
    (snapshots / "model-00001-of-00002.safetensors").resolve().unlink()
    names = ["tiny/good", "tiny/never-seen", "tiny/flaky"]
    good, unseen, gone = run(tmp_path / "home", names, HF_HUB_OFFLINE="1", HF_ENDPOINT="http://127.0.0.1:9")
    assert good.text == done["tiny/good"][0].text
    assert "there is no folder tiny/never-seen here" in unseen.refusal
    assert "HF_HUB_OFFLINE is set" in unseen.refusal
    assert "the download cache does not hold all of it, and HF_HUB_OFFLINE is set" in gone.refusal


def test_no_network_is_told_as_such(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        dead = f"http://127.0.0.1:{taken.getsockname()[1]}"
    (result,) = run(tmp_path, ["tiny/good"], HF_ENDPOINT=dead)
    message = result.refusal
    assert "there is no folder tiny/good here, the download cache does not hold all of it" in message
    assert "and the hub cannot be reached ([Errno 111] Connection refused)" in message
    assert "connect to the network, or give a folder that holds the checkpoint" in message
