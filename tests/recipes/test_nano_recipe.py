"""The recipe of the embedded model, run small on a CPU: the same code that trains it on a GPU."""

import gzip
import json
import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from recipes.nano.__main__ import main
from recipes.nano.answers import Answer, answer_figures, repeats
from recipes.nano.checkpoint import CHECKPOINT
from recipes.nano.commands import UNFINISHED
from recipes.nano.config import END_OF_TEXT_ID, PRESETS, SPECIAL_TOKENS, ModelShape, Preset
from recipes.nano.corpus import Document, Tokens, batches, epoch_windows, scoring_windows, split_held_back, tokenise
from recipes.nano.evaluate import bits_per_byte, greedy_agreement
from recipes.nano.experts import routed_experts, top_k
from recipes.nano.export import export_model, import_model
from recipes.nano.model import Decoder, load_entropy
from recipes.nano.optimizer import UPDATE_RMS, MuonAdamW, newton_schulz
from recipes.nano.routing import lru_hit_rate, overlap, routing_statistics
from recipes.nano.tokenizer import OPENING, load_tokenizer, save_tokenizer, train_tokenizer
from recipes.nano.train import Clock, Run, rate_factor
from steerpipe import Pipeline
from steerpipe.model.checkpoint import open_checkpoint
from steerpipe.store.formats import DenseFormat, ExpertFormat
from steerpipe.store.pack import write_pack
from steerpipe.store.plan import PackOptions
from steerpipe.transfer.trace_file import read_recording

CPU = torch.device("cpu")
SMOKE = PRESETS["smoke"]
WORDS = ("alpha", "beta", "gamma", "delta", "of", "the", "and", "résumé")


def toy_documents(count: int, seed: int) -> list[Document]:
    rng = random.Random(seed)
    said = (" ".join(rng.choices(WORDS, k=rng.randint(3, 150))) for _ in range(count))
    return [Document(rng.choice("ab"), f"<|im_start|>user\n{text}<|im_end|>\n") for text in said]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    for seed, (name, count) in enumerate({"train-0": 120, "heldout": 12}.items()):
        with gzip.open(folder / f"{name}.jsonl.gz", "wt") as lines:
            for document in toy_documents(count, seed):
                lines.write(json.dumps({"src": document.source, "text": document.text}) + "\n")
    return folder


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    learnt = train_tokenizer((document.text for document in toy_documents(120, 0)), SMOKE.shape.vocabulary)
    save_tokenizer(learnt, folder, SMOKE.shape.context)
    return folder


@pytest.fixture(scope="module")
def tokens(tokenizer_folder: Path) -> Tokens:
    return tokenise(iter(toy_documents(120, 0)), load_tokenizer(tokenizer_folder), close=True)


@pytest.fixture(scope="module")
def trained(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run")
    assert main(["train", "--smoke", "--corpus", str(corpus), "--out", str(out)]) == 0
    return out


def toy_tokens(*lengths: int) -> Tokens:
    starts = np.cumsum([0, *lengths])
    ids = (np.arange(starts[-1]) % 300 + 3).astype(np.uint16)
    return Tokens(ids, starts, np.array(["a"] * len(lengths)), np.array(lengths) * 2)


# --- the whole recipe


def test_smoke_run_learns_and_scores_itself(trained: Path) -> None:
    entries = [json.loads(line) for line in (trained / "log.jsonl").read_text().splitlines()]
    scores = [entry["held_back_bits_per_byte"]["total"] for entry in entries if "held_back_bits_per_byte" in entry]
    held_out = json.loads((trained / "heldout.json").read_text())
    assert scores[-1] < 1.0  # random words of a list of eight: about 0.6; untrained 1.9
    assert held_out["total"]["bits_per_byte"] == pytest.approx(scores[-1], rel=0.1)
    assert held_out["total"]["bytes"] == sum(len(d.text.encode()) for d in toy_documents(12, 1))


def test_transformers_computes_the_same_logits(trained: Path) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(trained / "hf", dtype=torch.float32)
    ours = import_model(trained / "hf", CPU)
    ids = torch.randint(0, ours.shape.vocabulary, (40,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        hidden, _ = ours(ids, torch.arange(40), torch.tensor([0, 40], dtype=torch.int32))
        torch.testing.assert_close(ours.logits(hidden), theirs(ids[None]).logits[0], rtol=1e-4, atol=1e-4)


def test_export_round_trips_bit_for_bit(trained: Path, tmp_path: Path) -> None:
    first = import_model(trained / "hf", CPU)
    export_model(first, trained / "hf", tmp_path)
    second = import_model(tmp_path, CPU)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert (tmp_path / "config.json").read_text() == (trained / "hf" / "config.json").read_text()


def test_a_dense_draft_loads_in_transformers(tokenizer_folder: Path, tmp_path: Path) -> None:
    shape = ModelShape(320, 64, 2, 32, 2, experts=0, top_k=0, expert_width=0, shared_width=0, dense_width=48)
    ours = Decoder(shape)
    export_model(ours, tokenizer_folder, tmp_path, torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.arange(20) + 3
    with torch.no_grad():
        hidden, routers = ours(ids, torch.arange(20), torch.tensor([0, 20], dtype=torch.int32))
        torch.testing.assert_close(ours.logits(hidden), theirs(ids[None]).logits[0], rtol=1e-4, atol=1e-4)
    assert routers == []
    assert sum(p.numel() for p in Decoder(PRESETS["draft"].shape).parameters()) < 2_800_000  # 3 MB as int8, with scales


def test_nano_is_the_size_that_ships() -> None:
    with torch.device("meta"):
        model = Decoder(PRESETS["nano"].shape)
    experts = sum(p.numel() for name, p in model.named_parameters() if name.endswith(("mlp.gate_up", "mlp.down")))
    total = sum(p.numel() for p in model.parameters())
    assert experts == 24 * 60 * 3 * 192 * 48
    assert (
        24 * 60 * 16_384 + (total - experts) < 32_300_000
    )  # int4 blocks of 16 KiB, int8 dense; 0.7 MB for the tokenizer


def test_a_run_stopped_by_the_clock_asks_to_be_called_again(corpus: Path, tmp_path: Path) -> None:
    command = ["train", "--smoke", "--corpus", str(corpus), "--out", str(tmp_path), "--plan", '{"epochs": 0.2}']
    assert main([*command, "--minutes", "0", "--checkpoint-seconds", "5"]) == UNFINISHED
    assert (tmp_path / CHECKPOINT).exists()
    assert not (tmp_path / "hf").exists()
    assert main(command) == 0
    assert (tmp_path / "hf" / "model.safetensors").exists()


def test_a_teacher_changes_the_draft(trained: Path, tokens: Tokens, tmp_path: Path) -> None:
    teacher = import_model(trained / "hf", CPU)
    plan = SMOKE.plan.changed(epochs=0.1, teacher_share=0.7)
    runs = [Run(Preset(SMOKE.shape, plan), tokens, tokens, tmp_path / str(i), t) for i, t in enumerate((None, teacher))]
    for run in runs:
        run.advance(Clock())
    alone, taught = (run.model.embedding for run in runs)
    assert not torch.equal(alone, taught)


# --- resuming


@pytest.mark.parametrize("stop_at", [3, 31])
def test_a_resumed_run_gives_the_same_weights_bit_for_bit(tokens: Tokens, tmp_path: Path, stop_at: int) -> None:
    preset = Preset(SMOKE.shape, SMOKE.plan.changed(epochs=1.5))
    train, held_back = split_held_back(tokens, 0)
    whole = Run(preset, train, held_back, tmp_path / "whole")
    assert whole.advance(Clock())
    first = Run(preset, train, held_back, tmp_path / "pieces")
    for _ in range(stop_at):
        first._step()
    first.save()
    second = Run(preset, train, held_back, tmp_path / "pieces")
    assert second.progress.step == stop_at
    assert second.advance(Clock())
    assert second.progress.step == whole.progress.step > stop_at
    for name, tensor in whole.optimizer.tensors().items():
        assert torch.equal(tensor, second.optimizer.tensors()[name]), name
    for mine, theirs in zip(whole.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_checkpoint_of_another_plan_is_refused(tokens: Tokens, tmp_path: Path) -> None:
    Run(SMOKE, tokens, tokens, tmp_path).save()
    with pytest.raises(ValueError, match=r"epochs 2.0 -> 3.0"):
        Run(Preset(SMOKE.shape, SMOKE.plan.changed(epochs=3.0)), tokens, tokens, tmp_path)


def test_a_killed_run_goes_on_from_its_last_checkpoint(
    tokens: Tokens, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(SMOKE, tokens, tokens, tmp_path)
    step = run._step

    def killed_at_step_5() -> tuple[torch.Tensor, torch.Tensor]:
        if run.progress.step == 5:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(run, "_step", killed_at_step_5)
    with pytest.raises(KeyboardInterrupt):
        run.advance(Clock(checkpoint_every_seconds=0.0))
    assert Run(SMOKE, tokens, tokens, tmp_path).progress.step == 5


def test_a_half_written_checkpoint_is_not_one(tokens: Tokens, tmp_path: Path) -> None:
    (tmp_path / f"{CHECKPOINT}.partial").write_bytes(b"cut short")
    assert Run(SMOKE, tokens, tokens, tmp_path).progress.step == 0


# --- windows and the measure


def test_every_token_of_a_text_is_scored_once() -> None:
    tokens = toy_tokens(5, 64, 65, 200)
    windows, owners = scoring_windows(tokens, 64)
    (batch,) = batches(tokens, windows, 1000, partial=True)
    assert batch.targets.tolist() == tokens.ids.tolist()
    assert owners.tolist() == [0, 1, 2, 2, 3, 3, 3, 3]
    assert (batch.inputs[batch.bounds[:-1]] == END_OF_TEXT_ID).all()
    inner = np.setdiff1d(np.arange(len(batch.targets)), batch.bounds)
    assert (batch.inputs[inner] == batch.targets[inner - 1]).all()
    assert batch.positions.max() == 63


def test_batches_divide_an_epoch_and_can_start_anywhere() -> None:
    tokens = toy_tokens(5, 64, 65, 200, 31)
    windows = epoch_windows(tokens, 64, {}, seed=0, epoch=0)
    every = list(batches(tokens, windows, 50))
    assert len(every) == 365 // 50
    assert all(len(b.inputs) == 50 and b.bounds[-1] == 50 for b in every)
    later = list(batches(tokens, windows, 50, first_batch=4))
    assert [b.targets.tolist() for b in later] == [b.targets.tolist() for b in every[4:]]
    rest = list(batches(tokens, windows, 50, partial=True))
    assert sorted(np.concatenate([b.targets for b in rest])) == sorted(tokens.ids)


def test_an_epoch_reads_sources_by_weight_and_cuts_anew() -> None:
    tokens = toy_tokens(300, 300)
    assert np.diff(epoch_windows(tokens, 64, {"a": 3.0}, 0, 0)).sum() == 1800
    first, again, second = (epoch_windows(tokens, 64, {}, 0, epoch) for epoch in (0, 0, 1))
    assert np.array_equal(first, again)
    assert {tuple(w) for w in first} != {tuple(w) for w in second}
    assert np.diff(first).max() <= 64


def test_bits_per_byte_of_a_uniform_model() -> None:
    tokens, model = toy_tokens(5, 200), Decoder(SMOKE.shape)
    torch.nn.init.zeros_(model.embedding)  # tied: all logits are 0, each token costs ln(vocabulary)
    score = bits_per_byte(model, tokens, 100)["total"]
    assert (score.tokens, score.text_bytes) == (205, 410)
    assert score.bits_per_byte == pytest.approx(math.log2(320) / 2)
    assert score.perplexity == pytest.approx(320)


def test_bits_per_byte_by_hand() -> None:
    tokens, model = toy_tokens(400), Decoder(SMOKE.shape).eval()
    nats = 0.0
    for window in torch.from_numpy(tokens.ids.astype(np.int64)).split(SMOKE.shape.context):
        inputs = torch.cat([torch.tensor([END_OF_TEXT_ID]), window[:-1]])
        bounds = torch.tensor([0, len(window)], dtype=torch.int32)
        with torch.no_grad():
            logits = model.logits(model(inputs, torch.arange(len(window)), bounds)[0])
        nats -= float(logits.log_softmax(-1)[torch.arange(len(window)), window].sum())
    assert bits_per_byte(model, tokens, 4096)["a"].bits_per_byte == pytest.approx(nats / math.log(2) / 800, rel=1e-6)


def test_a_window_does_not_see_its_neighbours() -> None:
    model, bounds = Decoder(SMOKE.shape).eval(), torch.tensor([0, 10, 24], dtype=torch.int32)
    positions = torch.cat([torch.arange(10), torch.arange(14)])
    ids = torch.arange(24) + 5
    with torch.no_grad():
        before, _ = model(ids, positions, bounds)
        after, _ = model(torch.cat([ids[:10] + 50, ids[10:]]), positions, bounds)
    torch.testing.assert_close(before[10:], after[10:])
    assert not torch.allclose(before[:10], after[:10])


def test_held_back_documents_are_of_every_source_and_not_trained_on(tokens: Tokens) -> None:
    train, held_back = split_held_back(tokens, 0)
    assert set(held_back.sources) == {"a", "b"}
    assert len(train) + len(held_back) == len(tokens)
    assert len(train.ids) + len(held_back.ids) == len(tokens.ids)


# --- experts and optimiser


def test_routed_experts_equal_the_masked_dense_product() -> None:
    torch.manual_seed(0)
    leaves = [torch.randn(33, 16), torch.randn(33, 8), torch.randn(8, 24, 16), torch.randn(8, 16, 12)]
    results = []
    for routed in (True, False):
        x, logits, gate_up, down = (leaf.clone().requires_grad_() for leaf in leaves)
        probability = logits.softmax(-1)
        if routed:
            out, load = routed_experts(x, *top_k(probability, 2), gate_up, down)
            assert load.sum() == 66
        else:
            value, expert = probability.topk(2)
            weight = torch.zeros_like(probability).scatter(1, expert, value)
            gate, up = torch.einsum("th,ewh->tew", x, gate_up).chunk(2, -1)
            out = torch.einsum("tew,ehw,te->th", F.silu(gate) * up, down, weight)
        (out * torch.arange(16)).sum().backward()
        results.append([out, *(leaf.grad for leaf in (x, logits, gate_up, down))])
    for mine, reference in zip(*results, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-4, atol=1e-3)


def test_top_k_is_torch_topk() -> None:
    probability = torch.rand(50, 60, generator=torch.Generator().manual_seed(0)).softmax(-1)
    for mine, reference in zip(top_k(probability, 4), probability.topk(4), strict=True):
        assert torch.equal(mine, reference)


def test_newton_schulz_orthogonalises_each_matrix_of_a_batch() -> None:
    matrices = (
        torch.randn(5, 12, 48, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 5)[:, None, None]
    )
    values = torch.linalg.svdvals(newton_schulz(matrices))
    assert values.min() > 0.6
    assert values.max() < 1.3
    left, _, right = torch.linalg.svd(matrices, full_matrices=False)
    assert F.cosine_similarity(newton_schulz(matrices).flatten(1), (left @ right).flatten(1)).min() > 0.97


def test_muon_moves_matrices_by_the_stated_rms_and_leaves_routers_to_adamw() -> None:
    model = Decoder(SMOKE.shape)
    optimizer = MuonAdamW(model.named_parameters(), weight_decay=0.0)
    assert {name.split(".")[-1] for name in optimizer.matrices} == {"qkv", "out", "gate_up", "down"}
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step(matrix_rate=0.1, vector_rate=0.01)
    for name, parameter in model.named_parameters():
        rms = (parameter.detach() - before[name]).square().mean().sqrt()
        expected = 0.1 * UPDATE_RMS if name in optimizer.matrices else 0.01
        assert rms == pytest.approx(expected, rel=0.25), name


def test_the_rate_warms_up_and_ends_at_nothing() -> None:
    factors = [rate_factor(step, 100, 10) for step in range(100)]
    assert factors[0] == pytest.approx(0.1)
    assert max(factors) == 1.0
    assert factors[-1] == pytest.approx(1 / 90)
    assert factors[10:] == sorted(factors[10:], reverse=True)


# --- routing statistics


def test_routing_statistics_of_the_smoke_model(trained: Path, tokens: Tokens) -> None:
    model = import_model(trained / "hf", CPU)
    figures = routing_statistics(model, tokens, 512, lru_tokens=200)
    assert figures["tokens"] == len(tokens.ids)
    assert figures["lru_tokens"] == 200
    assert len(figures["load_entropy"]) == 2
    assert set(figures["lookahead_recall"]) == {"1"}  # two layers: only one lies ahead of another
    rates = list(figures["lru_hit_rate"].values())
    assert rates == sorted(rates)
    assert greedy_agreement(model, model, tokens, 512) == 1.0


def test_load_entropy_is_one_when_even_and_zero_for_one_expert() -> None:
    assert load_entropy(torch.tensor([[5, 5, 5, 5], [9, 0, 0, 0]])).tolist() == pytest.approx([1.0, 0.0])


def test_overlap_counts_shared_experts() -> None:
    assert overlap(torch.tensor([[1, 2, 3, 4]]), torch.tensor([[4, 9, 1, 8]])).tolist() == [0.5]


def test_lru_hit_rate_by_hand() -> None:
    trace = np.array([[[0]], [[1]], [[0]], [[2]], [[1]], [[0]]])  # with 2 slots: miss miss hit miss miss miss
    assert lru_hit_rate(trace, 2) == pytest.approx(1 / 6)
    assert lru_hit_rate(trace, 3) == pytest.approx(3 / 6)


# --- text


def test_the_tokenizer_round_trips_and_keeps_markup_whole(tokenizer_folder: Path) -> None:
    tokenizer = load_tokenizer(tokenizer_folder)
    text = "<|im_start|>user\n  résumé 123\t→ 🙂\r\n<|im_end|>\n"
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == [0, 1, 2]
    assert ids[0] == 1
    assert 2 in ids


def test_the_chat_template_is_chatml(tokenizer_folder: Path) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer_folder)
    chat = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == OPENING + "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_a_system_message_replaces_the_opening_small_talk(tokenizer_folder: Path) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer_folder)
    text = tokenizer.apply_chat_template([{"role": "system", "content": "be brief"}], tokenize=False)
    assert text == "<|im_start|>system\nbe brief<|im_end|>\n"


def test_repeats_means_four_grams_four_times() -> None:
    assert repeats((1, 2, 3, 4) * 4)
    assert not repeats((1, 2, 3, 4) * 3)
    assert not repeats((1, 2))
    figures = answer_figures([Answer("p", "text", (1, 2, 3, 4) * 4, ended=False), Answer("p", " ", (), ended=True)])
    assert figures == {"answers": 2, "ended": 0.5, "repeating": 0.5, "empty": 0.5, "median_tokens": 16}


def test_answers_are_counted_and_their_routing_is_a_trace(trained: Path, tmp_path: Path) -> None:
    openers, trace, figures = (tmp_path / name for name in ("openers.jsonl", "trace.safetensors", "figures.json"))
    openers.write_text(json.dumps({"turns": ["of", "again"]}) + "\n" + json.dumps({"turns": ["the"]}) + "\n")
    options = ["--prompts", str(openers), "--rounds", "2", "--sampling", '{"max_tokens": 3, "ignore_eos": true}']
    pack = tmp_path / "pack"
    write_pack(open_checkpoint(trained / "hf"), pack, PackOptions(ExpertFormat.INT4, DenseFormat.INT8))
    main(["answers", str(pack), *options, "--trace", str(trace), "--json", str(figures)])
    told = json.loads(figures.read_text())
    assert (told["answers"], told["ended"], told["median_tokens"]) == (4, 0.0, 3)
    recording = read_recording(trace, experts=8)
    assert recording.routing.shape == (4 * 2, 2, 2)  # the last token of an answer is never read
    assert recording.sequence.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    stored = load_file(trace)
    assert len(stored["prompt_routing"]) == told["prompt_tokens"] == len(stored["prompt_sequence"])
    with Pipeline(pack, threads=1) as pipe:
        first, second = (pipe.encode(opener) for opener in ("of", "the"))
    shared = next(at for at, (left, right) in enumerate(zip(first, second, strict=False)) if left != right)
    assert shared > 10
    own = [len(first) - shared, len(second) - shared]
    assert np.bincount(stored["prompt_sequence"]).tolist() == [len(first), own[1], *own]


def test_a_pack_is_scored_by_what_its_codes_mean(trained: Path, corpus: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(trained / "hf")
    write_pack(checkpoint, tmp_path / "same", PackOptions())
    write_pack(checkpoint, tmp_path / "int4", PackOptions(ExpertFormat.INT4, DenseFormat.INT8))
    exact, same, coarse = (
        import_model(folder, CPU) for folder in (trained / "hf", tmp_path / "same", tmp_path / "int4")
    )
    for left, right, quantised in zip(exact.parameters(), same.parameters(), coarse.parameters(), strict=True):
        assert torch.equal(left, right)
        assert (left - quantised).norm() < 0.15 * left.norm() + 1e-6
    assert any(not torch.equal(a, b) for a, b in zip(exact.parameters(), coarse.parameters(), strict=True))
    main(["evaluate", str(tmp_path / "int4"), "--corpus", str(corpus), "--json", str(tmp_path / "scores.json")])
    whole = json.loads((trained / "heldout.json").read_text())["total"]["bits_per_byte"]
    assert json.loads((tmp_path / "scores.json").read_text())["total"]["bits_per_byte"] == pytest.approx(
        whole, rel=0.05
    )


def test_what_is_exported_carries_its_card(trained: Path) -> None:
    assert "Trained on" in (trained / "hf" / "README.md").read_text()
