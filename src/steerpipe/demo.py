"""`steerpipe demo`: the embedded model answers with less and less memory, then every family against transformers."""

import tempfile
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from steerpipe.core.events import Completion
from steerpipe.doctor.cpu import model_name
from steerpipe.runtime.pipeline import Pipeline
from steerpipe.tiny import FAMILIES, write_tiny

_PROMPT = "The experts that a token needs are known only when it is there; or are they?"
_NEW_TOKENS = 64
_THREADS = 1
_MOST_DIFFERENCE = 1e-3  # of log probabilities; fp32 gives 2e-5 at most
_QUESTION = "Do you like dogs?"
_BUDGETS = ("auto", "50%", "25%", "12.5%")  # auto: all of them, where they fit
_ANSWER_TOKENS = 48
_SEED = 6


@dataclass(frozen=True, slots=True)
class FamilyCheck:
    """One family against transformers, in fp32."""

    family: str
    greatest_difference: float  # of log probabilities along the greedy path
    same_tokens: int  # of `_NEW_TOKENS` greedy ones
    chunking_changes_bits: bool
    tokens_per_second: float
    budget_changes_bits: bool = False  # two experts in memory, the others on the disk

    @property
    def differs(self) -> bool:
        """Whether anything is not as it must be. NaN differs from everything."""
        alike = self.same_tokens == _NEW_TOKENS and self.greatest_difference <= _MOST_DIFFERENCE
        return self.chunking_changes_bits or self.budget_changes_bits or not alike


@dataclass(frozen=True, slots=True)
class BudgetCheck:
    """The embedded model's answer with so many experts in memory, against the answer with all of them."""

    budget: str
    slots: int
    hit_rate: float  # share of the routed experts that were in memory
    tokens_per_second: float
    changes_bits: bool


@dataclass(frozen=True, slots=True)
class DemoReport:
    """All families, the embedded model at every budget, and the machine that the speeds are of."""

    machine: str
    threads: int
    families: tuple[FamilyCheck, ...]
    question: str
    answer: str
    budgets: tuple[BudgetCheck, ...]

    @property
    def differing(self) -> list[str]:
        budgets = [f"the embedded model at {check.budget}" for check in self.budgets if check.changes_bits]
        return budgets + [check.family for check in self.families if check.differs]

    @property
    def verdict(self) -> str:
        """One line."""
        if self.differing:
            return f"DIFFERENT: {', '.join(self.differing)}. Trust no answer here; `steerpipe doctor` may say why."
        return (
            f"All {len(self.families)} families compute what transformers computes; no chunk or budget changes a bit."
        )

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "differing": self.differing}


def check_family(family: str, folder: Path) -> FamilyCheck:
    """Writes a tiny checkpoint, continues a prompt with both implementations, and compares."""
    write_tiny(family, folder)
    engine: dict[str, Any] = {"dtype": "float32", "threads": _THREADS, "cache_dir": str(folder.parent)}
    options: dict[str, Any] = {"temperature": 0.0, "max_tokens": _NEW_TOKENS, "ignore_eos": True, "logprobs": 0}
    with Pipeline(folder, **engine) as pipe:
        ids = pipe.encode(_PROMPT, raw=True)
        ours = pipe.generate(ids, **options)
    with Pipeline(folder, prefill_chunk=16, **engine) as pipe:
        chunked = pipe.generate(ids, **options)
    with Pipeline(folder, fast_memory="1%", profile=False, **engine) as pipe:
        squeezed = pipe.generate(ids, **options)
    expected_ids, expected_logprobs = _transformers(folder, ids)
    differences = [abs(ours.logprobs[i].logprob - expected_logprobs[i]) for i in range(_NEW_TOKENS)]
    return FamilyCheck(
        family=family,
        greatest_difference=max(differences),
        same_tokens=sum(a == b for a, b in zip(ours.token_ids, expected_ids, strict=True)),
        chunking_changes_bits=ours.logprobs != chunked.logprobs,
        budget_changes_bits=ours.logprobs != squeezed.logprobs,
        tokens_per_second=_rate(ours),
    )


def _transformers(folder: Path, prompt: tuple[int, ...]) -> tuple[list[int], list[float]]:
    """Greedy ids and their log probabilities, from the reference implementation."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    given = torch.tensor([prompt])
    with torch.inference_mode():
        out = model.generate(
            given, attention_mask=torch.ones_like(given), do_sample=False, max_new_tokens=_NEW_TOKENS,
            min_new_tokens=_NEW_TOKENS, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        ids = out[0, len(prompt) :].tolist()
        logits = model(out).logits[0, len(prompt) - 1 : -1].float()
    logprobs = logits.log_softmax(-1)
    return ids, [float(logprobs[i, token]) for i, token in enumerate(ids)]


def check_budgets(console: Console) -> tuple[str, tuple[BudgetCheck, ...]]:
    """The embedded model's answer, shown as it comes, and what each budget makes of it."""
    checks: list[BudgetCheck] = []
    whole: Completion | None = None
    for budget in _BUDGETS:
        with Pipeline(fast_memory=budget, profile=False, dtype="float32", threads=_THREADS) as pipe:
            answer = pipe.stream(_QUESTION, seed=_SEED, max_tokens=_ANSWER_TOKENS, logprobs=0)
            for event in answer:
                if whole is None:
                    console.print(event.text, end="", style="cyan", soft_wrap=True, highlight=False, markup=False)
            given, counters = answer.completion, pipe.counters()
            whole = whole or given
            checks.append(
                BudgetCheck(
                    budget=budget,
                    slots=pipe.budget.slots,
                    hit_rate=counters.hits / counters.leased if counters and counters.leased else 1.0,
                    tokens_per_second=_rate(given),
                    changes_bits=given.logprobs != whole.logprobs or given.token_ids != whole.token_ids,
                )
            )
    assert whole is not None, "there is at least one budget"
    return whole.text, tuple(checks)


def _rate(answer: Completion) -> float:
    return (answer.timings.predicted_n - 1) / answer.timings.predicted_ms * 1e3  # the first is the prompt's


def run_demo(console: Console) -> DemoReport:
    """The embedded model, then all families, a table each, and a verdict. Takes some seconds."""
    console.print(f"[bold]> {_QUESTION}[/bold]")
    answer, budgets = check_budgets(console)
    console.print("\n", _budget_table(budgets))
    checks = []
    with tempfile.TemporaryDirectory() as scratch, console.status("writing and comparing tiny checkpoints"):
        for family in FAMILIES:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                checks.append(check_family(family, Path(scratch) / family))
    report = DemoReport(model_name(), _THREADS, tuple(checks), _QUESTION, answer, budgets)
    console.print(_table(report))
    console.print(report.verdict, style="bold red" if report.differing else "green", soft_wrap=True, highlight=False)
    return report


def _budget_table(budgets: tuple[BudgetCheck, ...]) -> Table:
    table = Table(title="the embedded model, 1,440 experts of which only so many may be in memory")
    for name in ("budget", "experts in memory", "found there", "tokens/s", "the same answer"):
        table.add_column(name, justify="right")
    for check in budgets:
        table.add_row(
            check.budget,
            str(check.slots),
            f"{check.hit_rate:.0%}",
            f"{check.tokens_per_second:.0f}",
            "other bits" if check.changes_bits else "same bits",
            style="bold red" if check.changes_bits else "",
        )
    return table


def _table(report: DemoReport) -> Table:
    threads = f"{report.threads} thread{'s' if report.threads > 1 else ''}"
    table = Table(
        title=f"steerpipe against transformers, fp32, {_NEW_TOKENS} greedy tokens, tiny random models",
        caption=f"tokens/s on {report.machine}, {threads}",
    )
    names = ("family", "log p differs by", "same tokens", "chunks of 16", "two experts in memory", "tokens/s")
    for name in names:
        table.add_column(name, justify="left" if name == "family" else "right")
    for check in report.families:
        table.add_row(
            check.family,
            f"{check.greatest_difference:.1e}",
            f"{check.same_tokens} of {_NEW_TOKENS}",
            "other bits" if check.chunking_changes_bits else "same bits",
            "other bits" if check.budget_changes_bits else "same bits",
            f"{check.tokens_per_second:.0f}",
            style="bold red" if check.differs else "",
        )
    return table
