"""Trains the reuse forecast for nano and tests what eviction by it is worth on held-out prompts.

    python benchmarks/train_reuse.py --documents heldout.jsonl.gz --chats chats.json --out FOLDER

Text and split are those of train_predictors.py. Leaves results.json (miss rates of every ranking, residency and kind
of text; LFRU's half-life is chosen on training prompts) and reuse.safetensors in FOLDER. Everything on the device;
with --seconds no new forecast is trained after that time, --scale shortens every schedule, for trials.
"""

import argparse
import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.predictor_material import CONTEXT, load_nano, read_text
from benchmarks.reuse_bench import (
    SHARES,
    CacheStreams,
    StreamForecasts,
    answer_rows,
    closed_shares,
    document_rows,
    microseconds,
)
from steerpipe.predict.reuse import ReuseConfig, ReuseForecast
from steerpipe.predict.reuse_file import NAME, load_reuse, save_reuse
from steerpipe.predict.stored import Training
from steerpipe.runtime.models import find_model
from steerpipe.store.policies import HALF_LIFE_TOKENS
from steerpipe.store.reader import open_pack
from steerpipe.train.material import collect
from steerpipe.train.reuse import ReuseMaterial, gather_material, gather_states, train_reuse
from steerpipe.train.reuse_cache import BeladyRanking, LfruRanking, LruRanking, Ranking, ReuseRanking, SightedRanking
from steerpipe.train.reuse_recipe import ReuseRecipe

HALF_LIVES = (8.0, 16.0, 32.0, 64.0, 128.0, 256.0)
SIGHTS = (0, 1, 2, 4, 8, 16)  # tokens
KINDS = {"documents": document_rows, "answers": answer_rows}


FOUR = ReuseRecipe()


@dataclass(frozen=True)
class Variant:
    """One way to train a forecast."""

    recipe: ReuseRecipe = FOUR
    share: float = 1.0  # of the training stream
    strangers: bool = False  # control: the states of other tokens
    effort: float = 0.3  # of the steps


TWO = ReuseRecipe(taps=(11, 23))  # as good to compare with, and half the time
VARIANTS = {
    "shipped": Variant(effort=1.0),
    "two taps": Variant(TWO),
    "1/4 of the tokens": Variant(TWO, share=1 / 4),
    "1/16 of the tokens": Variant(TWO, share=1 / 16),
    "1/64 of the tokens": Variant(TWO, share=1 / 64),
    "no history": Variant(replace(TWO, history=1e-3)),
    "no context": Variant(replace(TWO, context_tokens=0.05)),
    "control": Variant(TWO, strangers=True),
    "tap 23": Variant(replace(TWO, taps=(23,))),
    "four taps": Variant(),
    "own expansions": Variant(replace(FOUR, shared=False)),
    "rank 24": Variant(replace(TWO, rank=24)),
    "rank 512": Variant(replace(TWO, rank=512)),
    "horizon 6": Variant(replace(TWO, horizon_tokens=6.0)),
    "horizon 24": Variant(replace(TWO, horizon_tokens=24.0)),
}


class Run:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.start = options, time.monotonic()
        model, folder = load_nano(options.device)
        self.text = read_text(options.documents, options.chats, folder, options.tokens)
        self.log("loaded and tokenised")
        self.train = collect(model, self.text.train, max_tokens=CONTEXT, openings=self.text.openings)
        self.test = collect(model, self.text.test, max_tokens=CONTEXT, openings=self.text.openings)
        torch.backends.cuda.matmul.allow_tf32 = True  # after tracing: routing is recorded in full precision
        self.log(f"traced {self.train.rows:,} + {self.test.rows:,} tokens")
        self.tables: ReuseMaterial = gather_material(self.train, FOUR.config(self.train.geometry))
        self.log("tables of uses made")
        self.forecasts: dict[str, ReuseForecast] = {}
        self.results: dict[str, Any] = {
            "train_tokens": self.train.rows, "train_prompts": len(self.text.train),
            "held_out_tokens": self.test.rows, "held_out_prompts": len(self.text.test),
            "residencies": SHARES, "variants": {},
        }  # fmt: skip

    def log(self, line: str) -> None:
        print(f"{time.monotonic() - self.start:6.1f} s  {line}", flush=True)

    def learn(self, name: str, variant: Variant) -> None:
        begin = time.monotonic()
        steps = max(2, round(self.options.steps * variant.effort * self.options.scale))
        recipe = replace(variant.recipe, steps=steps, rows=self.options.rows)
        config = recipe.config(self.train.geometry)
        material = self._material(config, variant)
        trained = train_reuse(
            material, config, recipe.schedule, rank=recipe.rank, shared=recipe.shared, history=recipe.history
        )
        self.forecasts[name] = trained
        seconds, cost = time.monotonic() - begin, trained.cost()
        self.results["variants"][name] = {
            "tokens": material.tokens, "steps": steps, "seconds": round(seconds, 2), "history": trained.history,
            "parameters": cost.parameters, "multiply_adds": cost.multiply_adds,
        }  # fmt: skip
        self.log(f"{name}: {seconds:.1f} s, a doubling is worth {trained.history:.3f}")

    def _material(self, config: ReuseConfig, variant: Variant) -> ReuseMaterial:
        states, means = gather_states(self.train, config)
        if variant.strangers:
            away = self.train.rows // 2
            states = {layer: state.roll(away, 0) for layer, state in states.items()}
            means = {layer: mean.roll(away, 0) for layer, mean in means.items()}
        material = replace(self.tables, states=states, means=means)
        return material.first(max(2, round(material.tokens * variant.share)))

    def test_kind(self, kind: str) -> None:
        """Chooses LFRU's half-life on training prompts, then lets everybody loose on the held-out ones."""
        options = self.options
        rows = KINDS[kind](self.train, self.text.train, self.text.openings)
        tuning = CacheStreams.of(self.train, rows, options.streams, options.stream_tokens // 2)
        tuned = tuning.rates({str(each): LfruRanking(tuning.hot, tuning.layers, each) for each in HALF_LIVES})
        best = [min(HALF_LIVES, key=lambda each: tuned[str(each)][column]) for column in range(len(SHARES))]
        self.log(f"{kind}: LFRU tuned on {tuning.tokens:,} training tokens: half-lives {best}")
        rows = KINDS[kind](self.test, self.text.test, self.text.openings)
        streams = CacheStreams.of(self.test, rows, options.streams, options.stream_tokens)
        rates = streams.rates(self._rankings(streams))
        lfru = [rates[f"lfru {each:g}"][column] for column, each in enumerate(best)]
        closed = closed_shares(rates, lfru)
        self.results[kind] = {
            "test_tokens": streams.tokens, "streams": len(streams.rows), "tuning_tokens": tuning.tokens,
            "half_lives": best, "lfru": lfru, "miss_rates": rates, "closed": closed,
        }  # fmt: skip
        for name, row in rates.items():
            percent = " ".join(f"{100 * rate:6.2f}" for rate in row)
            self.log(f"{kind:10} {name:26} {percent}   closed {' '.join(f'{each:+.3f}' for each in closed[name])}")

    def _rankings(self, streams: CacheStreams) -> dict[str, Ranking]:
        hot, layers = streams.hot, streams.layers
        future = BeladyRanking(hot, layers)
        rankings: dict[str, Ranking] = {"lru": LruRanking(hot, layers), "belady": future}
        rankings |= {f"lfru {each:g}": LfruRanking(hot, layers, each) for each in HALF_LIVES}
        for each in SIGHTS:
            past = LfruRanking(hot, layers, HALF_LIFE_TOKENS)
            rankings[f"sees {each}"] = SightedRanking(future, past, layers, each)
        for name, forecast in self.forecasts.items():
            said = StreamForecasts(forecast, streams)
            rankings[name] = ReuseRanking(hot, layers, forecast.config.count_tokens, said)
        return rankings

    def keep(self) -> None:
        """Writes what there is so far."""
        out: Path = self.options.out
        out.mkdir(parents=True, exist_ok=True)
        self.results["device"] = torch.cuda.get_device_name() if self.train.device.type == "cuda" else "CPU"
        if (shipped := self.forecasts.get("shipped")) is not None:
            said = self.results["variants"]["shipped"]
            made = Training(said["tokens"], len(self.text.train), said["seconds"], self.results["device"], 0, "nano")
            self.results["file_bytes"] = save_reuse(
                shipped, out / NAME, made, open_pack(find_model(None)).manifest.source
            )
            self.results["microseconds"] = microseconds(shipped)
        (out / "results.json").write_text(json.dumps(self.results, indent=1), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=Path, required=True)
    parser.add_argument("--chats", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=1_950_000)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rows", type=int, default=16_384, help="tokens of a training step")
    parser.add_argument("--streams", type=int, default=40)
    parser.add_argument("--stream-tokens", type=int, default=1000)
    parser.add_argument("--variants", default=",".join(VARIANTS), help="which to train; may be empty")
    parser.add_argument("--kinds", default="documents,answers", help="of text to test on; answers need --chats")
    parser.add_argument("--given", type=Path, help="a trained forecast, to be tested with the others")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    run = Run(options)
    if options.given:
        run.forecasts["given"] = load_reuse(options.given, options.device)
    for name in filter(None, options.variants.split(",")):
        if time.monotonic() - run.start < options.seconds:
            run.learn(name, VARIANTS[name])
    for kind in options.kinds.split(","):
        run.test_kind(kind)
        run.keep()
    print(json.dumps({kind: run.results[kind]["closed"] for kind in KINDS if kind in run.results}))


if __name__ == "__main__":
    main()
