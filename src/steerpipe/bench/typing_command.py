"""`steerpipe bench typing`: what is printed, and where the JSON goes."""

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from steerpipe.bench.report import machine, write_json
from steerpipe.bench.typing import ArmResult, TypingOptions, device_of, render_typing, run_typing
from steerpipe.bench.typing_prompts import lay_over, read_prompts, read_texts
from steerpipe.core.config import EngineConfig
from steerpipe.core.errors import InputError
from steerpipe.engine.tokenizer import TextCodec
from steerpipe.runtime.models import find_model


def run(
    model: str | None, config: EngineConfig, log: Path, texts: Path | None, count: int, options: TypingOptions,
    json_file: Path | None, skip: int = 0,
) -> None:  # fmt: skip
    """The table, and one JSON line last."""
    console = Console(highlight=False)
    codec = TextCodec.load(find_model(model))

    def tokens(text: str) -> int:
        return len(codec.encode_part(text))

    if texts is None:
        prompts = read_prompts(log, tokens, skip + count)[skip:]
    else:
        prompts = lay_over(log, read_texts(texts)[skip : skip + count], tokens)
    if not prompts:
        raise InputError(f"there are no more than {skip} prompts", fix="give a smaller --skip")
    content = {
        "prompts": len(prompts), "warm": options.warm, "virtual": options.virtual,
        "last_seconds": options.last_seconds, "fast_memory": config.fast_memory, "ram": config.ram,
        "pace": config.pace, "dtype": config.dtype, "machine": machine(device_of(config)),
    }  # fmt: skip

    def keep(results: Sequence[ArmResult]) -> None:
        write_json(json_file, content | {"arms": [result.as_json() for result in results]})

    results = run_typing(model, config, prompts, options, lambda text: console.print(text), keep)
    clock = "waiting for keys skipped" if options.virtual else "in real time"
    state = "one engine for all" if options.warm else "each with an empty cache"
    console.print(render_typing(results, prompts, f"typing, {clock}, {state}, pace {config.pace or 'none'}"))
    short = [{name: value for name, value in result.as_json().items() if name != "answers"} for result in results]
    print(json.dumps(content | {"arms": short}))
