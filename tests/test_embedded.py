"""The model inside the package: it is whole, small enough, answers unnamed, and is what transformers computes."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from steerpipe import Pipeline
from steerpipe.cli import app
from steerpipe.core.errors import InputError
from steerpipe.runtime import models
from steerpipe.runtime.models import EMBEDDED, find_model
from steerpipe.store.formats import DenseFormat, ExpertFormat
from steerpipe.store.reader import open_pack
from steerpipe.store.unpack import unpack
from steerpipe.store.verify import verify

DRAFT = EMBEDDED.parent / "draft"
ROOT = Path(__file__).parent.parent
NEW_TOKENS = 24
PROMPTS = (
    "Hi! How are you?", "Do you like dogs?", "What is your favourite film?", "Can you find me a restaurant?",
    "I need a ticket for tomorrow evening.", "Did you know that octopuses have three hearts?", "I like football.",
    "What music do you listen to?", "Why is the sky blue?", "Tom has 3 apples and buys 5 more. How many has he now?",
    "Write a function that adds two numbers.", "Once upon a time there was a king", "def fibonacci(n):",
    "What is 12 times 12?", "Where do you live?", "I am so tired today.", "Have you ever been to the moon?",
    "The weather is nice, isn't it?", "Could you order a pizza for me?", "Good night!",
)  # fmt: skip


def size_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def test_nano_and_draft_are_as_small_as_promised() -> None:
    assert size_bytes(EMBEDDED) <= 33_000_000
    assert size_bytes(DRAFT) <= 3_000_000


def test_nano_has_the_routing_geometry_of_qwen1_5_moe() -> None:
    pack = open_pack(EMBEDDED)
    moe = pack.spec.moe(0)
    assert (len(pack.spec.moe_layers), moe.experts, moe.top_k) == (24, 60, 4)
    assert pack.manifest.expert_format is ExpertFormat.INT4
    assert pack.manifest.dense_format is DenseFormat.INT8


@pytest.mark.parametrize("folder", [EMBEDDED, DRAFT], ids=["nano", "draft"])
def test_every_byte_is_the_one_that_was_packed(folder: Path) -> None:
    assert not verify(folder).problems


def test_the_draft_reads_the_same_tokens() -> None:
    assert (DRAFT / "tokenizer.json").read_bytes() == (EMBEDDED / "tokenizer.json").read_bytes()
    with Pipeline(DRAFT, threads=1) as pipe:
        assert pipe.generate("Hi! How are you?", max_tokens=4, ignore_eos=True).timings.predicted_n == 4


def test_generate_without_a_model_answers_with_the_embedded_one() -> None:
    result = CliRunner().invoke(app, ["generate", "-p", "Do you like dogs?", "--seed", "1", "--threads", "1", "--json"])
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["text"].strip()
    with Pipeline(EMBEDDED, threads=1) as pipe:
        assert pipe.generate("Do you like dogs?", seed=1).text == told["text"]


def test_the_answer_ends_by_itself_and_takes_the_defaults_of_the_pack() -> None:
    with Pipeline(threads=1) as pipe:
        settings = pipe.settings()
        assert settings.temperature > 0 and settings.frequency_penalty > 0
        assert settings.max_tokens == 256
        assert pipe.generate("Good night!", seed=0).finish_reason.value == "stop"


def test_an_installation_without_the_model_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(models, "EMBEDDED", tmp_path)
    with pytest.raises(InputError, match="no embedded one") as told:
        find_model(None)
    assert "name a model" in told.value.fix


def test_unpacked_it_gives_the_same_greedy_tokens_in_transformers(tmp_path: Path) -> None:
    """One forward pass over prompt and answer: where each token of the answer is the likeliest one after those before
    it, greedy decoding in transformers gives that answer."""
    with Pipeline(dtype="float32", threads=1) as pipe:
        plain = {"temperature": 0.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}  # transformers has neither
        given = [pipe.generate(p, **plain, max_tokens=NEW_TOKENS) for p in PROMPTS]
    unpack(EMBEDDED, tmp_path / "hf")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    for prompt, answer in zip(PROMPTS, given, strict=True):
        ids = torch.tensor([answer.prompt_token_ids + answer.token_ids])
        with torch.inference_mode():
            likeliest = theirs(ids).logits[0, len(answer.prompt_token_ids) - 1 : -1].argmax(-1)
        assert likeliest.tolist() == list(answer.token_ids), prompt


@pytest.mark.slow
def test_an_installed_wheel_answers_offline(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        assert "steerpipe/assets/draft/dense.safetensors" in packed.namelist()
        packed.extractall(tmp_path / "site")
    answer = subprocess.run(
        [sys.executable, "-m", "steerpipe", "generate", "-p", "Do you like dogs?", "--max-tokens", "16", "--json"],
        cwd=tmp_path,
        env={
            "PYTHONPATH": str(tmp_path / "site"),
            "HOME": str(tmp_path),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        },
        capture_output=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr.decode()
    assert json.loads(answer.stdout)["text"].strip()
