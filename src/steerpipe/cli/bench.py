"""`steerpipe bench`: what this machine does with models of a shape, floors first. Weights are made up."""

from pathlib import Path
from typing import Annotated

import typer

from steerpipe.cli.shared import Debug, Model, app, guarded

benches = typer.Typer(no_args_is_help=True, help="Measure this machine: floors first, then medians, then JSON.")
app.add_typer(benches, name="bench")

JsonFile = Annotated[Path | None, typer.Option("--json", help="write everything to this file, as it grows")]


@benches.command()
def decode(
    shape: Annotated[str, typer.Option(help="qwen1.5-moe, qwen3-30b, olmoe, mixtral or nano")] = "qwen3-30b",
    formats: Annotated[str, typer.Option("--format", help="of the experts: bf16,int8,int4")] = "bf16",
    residency: Annotated[str, typer.Option(help="percent of all experts that have slots: 100,50,25,0")] = "100",
    context: Annotated[str, typer.Option(help="tokens that are there already: 128,4k,32k")] = "128",
    batch: Annotated[str, typer.Option(help="sequences decoded together: 1,2,4,8")] = "1",
    routing: Annotated[str, typer.Option(help="a recorded file, generator, model, or auto")] = "auto",
    tokens: Annotated[int, typer.Option(help="measured in each repeat")] = 128,
    repeat: Annotated[int, typer.Option(help="how often")] = 3,
    warmup: Annotated[int, typer.Option(help="tokens before them")] = 32,
    prefill: Annotated[int, typer.Option(help="tokens of a prompt that is measured too; 0: none")] = 0,
    policy: Annotated[str, typer.Option(help="which expert leaves a slot first: lfru or lru")] = "lfru",
    driver: Annotated[str, typer.Option(help="who brings what one row misses: auto, direct (itself), served")] = "auto",
    predict: Annotated[str, typer.Option(help="whose forecasts of --routing: heads, lookahead, perfect …")] = "none",
    horizon: Annotated[int, typer.Option(help="layers that they look ahead: 1, 2 or 3")] = 2,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    dtype: Annotated[str, typer.Option(help="of dense weights: auto, bfloat16 or float32")] = "auto",
    seed: Annotated[int, typer.Option(help="of weights and routing")] = 0,
    json_file: JsonFile = None,
    debug: Debug = False,
) -> None:
    """Milliseconds per token with made-up weights of a shape: all experts resident, and within budgets of slots.

    Residency 0 means that every expert is a miss. On a CPU a small shape (nano) is measured, all resident.
    """

    def run() -> None:
        from steerpipe.bench import command
        from steerpipe.bench.options import parse_options

        options = parse_options(
            shape=shape, formats=formats, residency=residency, context=context, batch=batch, routing=routing,
            tokens=tokens, repeats=repeat, warmup=warmup, prefill=prefill, policy=policy, driver=driver,
            predict=predict, horizon=horizon, device=device, dtype=dtype, seed=seed,
        )  # fmt: skip
        command.decode(options, json_file)

    guarded(run, debug)


@benches.command()
def link(
    disk: Annotated[Path | None, typer.Option(help="a folder on the disk that is measured too")] = None,
    json_file: JsonFile = None,
    debug: Debug = False,
) -> None:
    """Rates of the link between host memory and the GPU: pinned, pageable, by block size, one by one and queued."""

    def run() -> None:
        from steerpipe.bench import command

        command.link(json_file, disk)

    guarded(run, debug)


@benches.command()
def serve(
    model: Model = None,
    clients: Annotated[str, typer.Option(help="how many ask at once, one row each")] = "1,8",
    answers: Annotated[int, typer.Option(help="for each number of clients")] = 16,
    tokens: Annotated[int, typer.Option(help="of each answer")] = 64,
    url: Annotated[str | None, typer.Option(help="a server that runs; default: one is started")] = None,
    api_key: Annotated[str | None, typer.Option(help="for that server")] = None,
    max_batch: Annotated[int | None, typer.Option(help="answers computed together")] = None,
    json_file: JsonFile = None,
    debug: Debug = False,
) -> None:
    """Tokens per second and waiting times of the server, by number of clients, in one run."""

    def run() -> None:
        from steerpipe.bench import serve_command
        from steerpipe.bench.serve import ServeOptions

        options = ServeOptions(serve_command.parse_clients(clients), answers, tokens)
        arguments = [*([model] if model else []), *(["--max-batch", str(max_batch)] if max_batch else [])]
        serve_command.serve(options, url=url, key=api_key, arguments=arguments, json_file=json_file)

    guarded(run, debug)


@benches.command()
def typing(
    log: Annotated[Path, typer.Argument(help="keystroke log, such as examples/keystrokes.jsonl")],
    model: Annotated[
        str | None, typer.Option(help="checkpoint folder, pack, or hub name; default: the embedded")
    ] = None,
    texts: Annotated[Path | None, typer.Option(help="JSON lines of prompts, typed with the log's timing")] = None,
    prompts: Annotated[int, typer.Option(min=1, help="how many, at most")] = 100,
    skip: Annotated[int, typer.Option(min=0, help="of the log, so many first: to measure in parts")] = 0,
    arms: Annotated[str, typer.Option(help="what is done while typing: nothing,prefill,…,all")] = "nothing,prefill,all",
    cold: Annotated[bool, typer.Option("--cold", help="every prompt finds an empty cache of experts")] = False,
    real_time: Annotated[
        bool, typer.Option("--real-time", help="wait for the keys instead of skipping the time")
    ] = False,
    last: Annotated[
        float | None, typer.Option(help="type only so many seconds before Enter; what came before is computed")
    ] = None,
    fast_memory: Annotated[str, typer.Option(help="slots for experts: 4GiB, or 25% of them")] = "25%",
    ram: Annotated[str | None, typer.Option(help="memory for experts in RAM, slots included")] = None,
    pace: Annotated[str | None, typer.Option(help="slow the link to so many bytes per second")] = None,
    dtype: Annotated[str, typer.Option(help="auto, bfloat16 or float32")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    threads: Annotated[int | None, typer.Option(help="CPU threads")] = None,
    json_file: JsonFile = None,
    debug: Debug = False,
) -> None:
    """Milliseconds from Enter to the first token, with and without the work that is done while somebody types."""

    def run() -> None:
        from steerpipe.bench import typing_command
        from steerpipe.bench.typing import TypingOptions
        from steerpipe.core.config import load_config

        options = TypingOptions(tuple(arms.split(",")), warm=not cold, virtual=not real_time, last_seconds=last)
        flags = {
            "fast_memory": fast_memory, "ram": ram, "pace": pace, "dtype": dtype, "device": device,
            "threads": threads, "profile": False, "predict": "off",
        }  # fmt: skip
        typing_command.run(model, load_config(flags), log, texts, prompts, options, json_file, skip)

    guarded(run, debug)
