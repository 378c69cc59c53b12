"""How much stall a forecast of an answer's first 16 tokens can save, by replay, and beside it what live steps wait for.

    PYTHONPATH=src:. python benchmarks/typing_bound.py LOG [--prompts 40] [--live 5] [--share 0.25] [--json OUT]

Routing is recorded from nano for the openings of a keystroke log. Then each answer's first 16 tokens run through the
product's table and policy (LFRU), beginning with
  cold              an empty cache
  warm              what the answer before left
  ... + forecast    the same, after the product's plan for the forecast has been carried out (draft_plan)
  ... + oracle      the same, with the plan for a forecast that knows the 16 tokens
and then what the prompt's last four tokens keep, which come in at Enter in each case;
  Belady            the experts of the oracle, and every eviction knows the 16 tokens: nobody can miss less
Every miss is waited for: --block-ms, by default 0.69, which is 17.3 MB (Qwen1.5-MoE) over PCIe 4 (25 GB/s).

--live: the first answers are also decoded by nano itself over a link that is paced (--pace) to the same ratio of
transfer to compute; stalls are given in transfers of one block, so that both can be compared.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.typing_openings import Answered, answer
from steerpipe.bench.typing_prompts import read_prompts
from steerpipe.core.config import EngineConfig
from steerpipe.core.ids import ExpertId, SequenceId
from steerpipe.engine.tokenizer import TextCodec
from steerpipe.model.decoder import Decoder
from steerpipe.model.kv_cache import KvPool
from steerpipe.model.step import PROMPT_TAIL, decode_rows, prefill_rows
from steerpipe.predict.openings import FIRST_TOKENS, OpeningTable, find_openings
from steerpipe.runtime.calibrating import open_subject
from steerpipe.runtime.draft_plan import plan_opening
from steerpipe.runtime.models import EMBEDDED
from steerpipe.store.policies import Lfru
from steerpipe.store.reader import open_pack
from steerpipe.store.residency import SlotTable
from steerpipe.transfer.source import LadderSource

CPU, ID = torch.device("cpu"), SequenceId(0)
Routing = NDArray[np.uint8]  # [tokens, layers, k]
Counts = NDArray[np.float64]  # [layers * experts]


@dataclass(frozen=True)
class Case:
    """Experts that are there when the answer begins, and what the policy has counted of each."""

    there: NDArray[np.int64]
    counts: Counts


def uses(routing: Routing, experts: int) -> Counts:
    per_layer = [np.bincount(routing[:, layer].ravel(), minlength=experts) for layer in range(routing.shape[1])]
    return np.concatenate(per_layer).astype(np.float64)


def best(counts: Counts, slots: int) -> NDArray[np.int64]:
    return np.argsort(-counts, kind="stable")[:slots]


def steered(case: Case, rates: Counts, slots: int) -> Case:
    """After the product's plan for `rates` uses per token has been carried out."""
    present = np.zeros(len(rates), dtype=np.bool_)
    present[case.there] = True
    plan = plan_opening(rates, case.counts, present, slots)
    chosen = np.concatenate([plan.keep, plan.send])
    rest = case.there[~np.isin(case.there, chosen)]
    kept = rest[np.argsort(-case.counts[rest], kind="stable")][: slots - len(chosen)]
    counts = case.counts.copy()
    counts[plan.wanted] = np.maximum(counts[plan.wanted], rates[plan.wanted] * FIRST_TOKENS)
    return Case(np.concatenate([chosen, kept]), counts)


def cases(table: OpeningTable, answered: Answered, before: Counts, slots: int) -> dict[str, Case]:
    _, prompt, routing = answered
    experts = table.answer.shape[1]
    seen = uses(routing[:prompt], experts)
    told = table.forecast(seen.reshape(table.answer.shape), prompt).ravel().astype(np.float64)
    known = uses(routing[prompt : prompt + FIRST_TOKENS], experts) / FIRST_TOKENS
    kept = (uses(routing[prompt - PROMPT_TAIL : prompt], experts) > 0).astype(np.float64)
    nothing = np.zeros(0, np.int64)
    begun = {"cold": Case(nothing, np.zeros_like(before)), "warm": Case(best(before, slots), before)}
    return {
        f"{name}{what}": entered(case if rates is None else steered(case, rates, slots), kept, slots)
        for name, case in begun.items()
        for what, rates in (("", None), (" + forecast", told), (" + oracle", known))
    }


def entered(case: Case, kept: Counts, slots: int) -> Case:
    """After the last tokens of the prompt, whose experts stay: those that count least go."""
    counts = case.counts + kept
    there = np.union1d(case.there, np.flatnonzero(kept))
    return Case(there[np.argsort(-counts[there], kind="stable")][:slots], counts)


def misses(routing: Routing, case: Case, experts: int, slots: int) -> int:
    """Of the product's table and policy."""
    names = [ExpertId(layer, expert) for layer in range(routing.shape[1]) for expert in range(experts)]
    policy = Lfru(len(names))
    policy.restore(case.counts, 0.0)
    table = SlotTable(names, slots, policy, transient_limit=2)
    for number in case.there:
        table.begin(names[number], transient=False, now=0.0)
        table.finish(names[number])
    missed = 0
    for token, row in enumerate(routing, start=1):
        for layer, chosen in enumerate(row):
            wanted = [ExpertId(layer, int(expert)) for expert in chosen]
            there = table.ready(wanted)
            for expert in wanted:
                table.touch(expert, float(token))
            for expert in there:
                table.pin(expert)
            for expert in set(wanted) - set(there):
                table.begin(expert, transient=False, now=float(token))
                table.finish(expert)
                table.pin(expert)
                missed += 1
            for expert in wanted:
                table.unpin(expert)
    return missed


def least_misses(routing: Routing, experts: int, slots: int) -> int:
    """Belady, beginning with the experts that are used first."""
    layers = routing.shape[1]
    steps = [[layer * experts + int(e) for e in row[layer]] for row in routing for layer in range(layers)]
    uses_of: dict[int, list[int]] = {}
    for at, wanted in enumerate(steps):
        for expert in wanted:
            uses_of.setdefault(expert, []).append(at)
    there = set(sorted(uses_of, key=lambda expert: uses_of[expert][0])[:slots])
    missed = 0
    for at, wanted in enumerate(steps):
        for expert in wanted:
            if expert not in there:
                missed += 1
                if len(there) >= slots:
                    there.remove(max(there - set(wanted), key=lambda e: next((u for u in uses_of[e] if u > at), 10**9)))
                there.add(expert)
    return missed


class Live:
    """Nano over a paced link. Everything but the experts is computed once per answer."""

    def __init__(self, pace: float, slots: int) -> None:
        self._subject = open_subject(None, EngineConfig(dtype="float32", threads=1))
        self._spec = self._subject.rehearsal.spec
        self._decoder = Decoder(self._spec, self._subject.weights, CPU)
        self._pool = KvPool(self._spec, torch.float32, CPU, 64)
        self._pack, self._pace, self._slots = open_pack(EMBEDDED), pace, slots

    @property
    def block_seconds(self) -> float:
        return self._pack.layout(self._spec.moe_layers[0]).block_bytes / self._pace

    def run(self, answered: Answered, chosen: dict[str, Case]) -> dict[str, tuple[float, int]]:
        """Seconds that leases waited, and misses, of each case."""
        ids, prompt, _ = answered
        begun = self._pool.sequence()
        self._decoder.forward(prefill_rows(ID, begun, ids[:prompt].tolist(), CPU), self._subject.source, [0])
        found = {}
        for name, case in chosen.items():
            with LadderSource.open(self._pack, slots=self._slots, dtype=torch.float32, pace=self._pace) as source:
                assert isinstance(source.policy, Lfru)
                source.policy.restore(case.counts, 0.0)
                source.warm(source.experts[number] for number in case.there)
                source.check_integrity()  # when all have come
                before, kv = source.counters(), begun.fork()
                for token in ids[prompt : prompt + FIRST_TOKENS].tolist():
                    self._decoder.forward(decode_rows([ID], [kv], [token], CPU, cell=1), source, [0])
                spent = source.counters() - before
                kv.free()
            found[name] = spent.stall_seconds + spent.late_seconds, spent.misses
        begun.free()
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", type=Path)
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--live", type=int, default=0)
    parser.add_argument("--pace", type=float, default=2.2e6, help="bytes per second; nano's blocks have 16 KiB")
    parser.add_argument("--share", type=float, default=0.25)
    parser.add_argument("--block-ms", type=float, default=0.69)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    codec = TextCodec.load(EMBEDDED)
    texts = [each.text for each in read_prompts(given.log, lambda text: len(codec.encode_part(text)), given.prompts)]
    table = find_openings(EMBEDDED)
    assert table is not None, "nano has a table of openings"
    layers, experts = table.answer.shape
    slots = int(given.share * layers * experts)
    live = Live(given.pace, slots) if given.live else None
    replayed: dict[str, list[int]] = {}
    waited: dict[str, list[tuple[float, int, int]]] = {}  # in blocks, live misses, replayed misses
    before = np.zeros(layers * experts)
    for number, each in enumerate(answer(None, texts, given.prompts)):
        _, prompt, routing = each
        first, chosen = routing[prompt : prompt + FIRST_TOKENS], cases(table, each, before, slots)
        for name, case in chosen.items():
            replayed.setdefault(name, []).append(misses(first, case, experts, slots))
        replayed.setdefault("Belady", []).append(least_misses(first, experts, slots))
        if live is not None and 0 < number <= given.live:  # the first has no answer before it
            for name, (seconds, missed) in live.run(each, chosen).items():
                waited.setdefault(name, []).append((seconds / live.block_seconds, missed, replayed[name][-1]))
            print(number, {name: [round(value) for value in found[-1]] for name, found in waited.items()}, flush=True)
        before = uses(first, experts)
    rows = {}
    for name, counts in replayed.items():
        rows[name] = {"misses": fmean(counts), "stall_ms": fmean(counts) * given.block_ms}
        if name in waited:
            stall, missed, same = (fmean(column) for column in zip(*waited[name], strict=True))
            rows[name] |= {"live_blocks": stall, "live_misses": missed, "replayed_blocks": same}
        print(name, {key: round(value, 1) for key, value in rows[name].items()}, flush=True)
    print(json.dumps(rows))
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
