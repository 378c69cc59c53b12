"""The recipe's commands. `python -m recipes.nano COMMAND --help` says what each needs.

tokenizer  --corpus DIR --out DIR                     learn the vocabulary
train      --corpus DIR --tokenizer DIR --out DIR     train, or go on; exports OUT/hf when the plan is done
evaluate   MODEL_DIR --corpus DIR                     held-out bits per byte, by source
routing    MODEL_DIR --corpus DIR                     load, locality and lookahead on held-out text
agreement  MODEL_DIR OTHER_DIR --corpus DIR           how often two models' greedy choices agree on held-out text
answers    [MODEL_DIR] --prompts FILE                 do answers end, do they loop; --trace keeps their routing
"""

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # some machines advertise AMX and trap on it

from recipes.nano import commands

COMMANDS: dict[str, Callable[..., int | None]] = {
    "tokenizer": commands.learn_tokenizer,
    "train": commands.train,
    "evaluate": commands.evaluate,
    "routing": commands.routing,
    "agreement": commands.agreement,
    "answers": commands.answers,
}


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m recipes.nano", description=__doc__, allow_abbrev=False)
    top.formatter_class = argparse.RawDescriptionHelpFormatter
    verbs = top.add_subparsers(dest="command", required=True)

    tokenizer = verbs.add_parser("tokenizer")
    train = verbs.add_parser("train")
    for verb in (tokenizer, train):
        verb.add_argument("--corpus", type=Path, required=True, help="folder of train-*.jsonl.gz and heldout.jsonl.gz")
        verb.add_argument("--out", type=Path, required=True)
    tokenizer.add_argument("--vocabulary", type=int, default=8192)
    _train_arguments(train)

    for name in ("evaluate", "routing", "agreement"):
        verb = verbs.add_parser(name)
        verb.add_argument("model", type=Path, help="a Hugging Face folder written by this recipe, or a pack of one")
        if name == "agreement":
            verb.add_argument("other", type=Path, help="another one with the same tokenizer")
        verb.add_argument("--corpus", type=Path, required=True)
        verb.add_argument("--json", type=Path, dest="figures_to", help="also write the figures here")
    _answers_arguments(verbs.add_parser("answers"))
    return top


def _train_arguments(train: argparse.ArgumentParser) -> None:
    train.add_argument("--preset", choices=("nano", "draft", "smoke"), default="nano")
    train.add_argument(
        "--smoke", action="store_const", const="smoke", dest="preset", help="the same code, tiny, for a CPU"
    )
    train.add_argument(
        "--tokenizer", type=Path, help="folder of tokenizer.json; learnt into OUT/tokenizer if not given"
    )
    train.add_argument("--teacher", type=Path, help="Hugging Face folder to distil from (draft)")
    train.add_argument("--minutes", type=float, default=9.0, help="stop by the clock; the same command goes on later")
    train.add_argument(
        "--checkpoint-seconds", type=float, default=60.0, help="a kill loses at most so much (default: %(default)s)"
    )
    train.add_argument("--plan", type=json.loads, default={}, help="JSON that replaces values of the preset's plan")
    train.add_argument("--seed", type=int)


def _answers_arguments(answers: argparse.ArgumentParser) -> None:
    answers.add_argument("model", type=Path, nargs="?", help="folder or pack; the embedded model if not given")
    answers.add_argument("--prompts", type=Path, required=True, help='lines of {"turns": [opener, ...]}')
    answers.add_argument("--rounds", type=int, default=1, help="answers to each opener")
    answers.add_argument("--seed", type=int, default=0, help="of the first answer; the next one has the next seed")
    answers.add_argument("--sampling", type=json.loads, default={}, help="JSON that replaces the model's defaults")
    answers.add_argument("--trace", type=Path, dest="trace_to", help="also write the routing here, for `replay`")
    answers.add_argument("--json", type=Path, dest="figures_to", help="also write the figures here")


def main(arguments: list[str]) -> int:
    given: dict[str, Any] = vars(parser().parse_args(arguments))
    return COMMANDS[given.pop("command")](**given) or 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
