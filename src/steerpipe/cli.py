"""The command line. Each verb parses its options, calls one function, and shows the result.

Results go to stdout, everything else (progress, choices, errors) to stderr. Bad input exits with status 2 and no
traceback unless --debug is given.
"""

import io
import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from steerpipe import __version__
from steerpipe.core.errors import InputError, SteerpipeError

if TYPE_CHECKING:
    from steerpipe.core.events import Completion
    from steerpipe.runtime.pipeline import Pipeline

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

Model = Annotated[str | None, typer.Argument(help="checkpoint folder, pack, or hub name (owner/model)")]
Json = Annotated[bool, typer.Option("--json", help="print one JSON object on stdout and nothing else")]
Debug = Annotated[bool, typer.Option("--debug", help="show the traceback of an error")]


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"steerpipe {__version__}")
        raise typer.Exit


@app.callback()
def steerpipe(
    version: Annotated[
        bool, typer.Option("--version", help="show the version", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Run Mixture-of-Experts language models that are larger than the fast memory they run on."""


@app.command()
def generate(
    model: Model = None,
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="text to answer; - reads it from stdin")] = "",
    system: Annotated[str | None, typer.Option(help="system message for the chat template")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="continue the text as it is, without the chat template")] = False,
    max_tokens: Annotated[int | None, typer.Option(help="most tokens of the answer")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; default: the model's own")] = None,
    top_k: Annotated[int | None, typer.Option(help="sample among the k likeliest; 0 is off")] = None,
    top_p: Annotated[float | None, typer.Option(help="sample among the likeliest of total probability p")] = None,
    min_p: Annotated[float | None, typer.Option(help="drop tokens below this share of the likeliest")] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="above 1 discourages repeats")] = None,
    presence_penalty: Annotated[float | None, typer.Option(help="-2 to 2, once per token that occurred")] = None,
    frequency_penalty: Annotated[float | None, typer.Option(help="-2 to 2, per occurrence of a token")] = None,
    seed: Annotated[int | None, typer.Option(help="same seed, same text")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="end before this text; may be given several times")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="go on after an end token")] = False,
    logprobs: Annotated[int | None, typer.Option(help="log probabilities of each token and of the n likeliest")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32 or bfloat16")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads")] = None,
    max_context: Annotated[int | None, typer.Option(help="tokens of prompt and answer together")] = None,
    prefill_chunk: Annotated[int | None, typer.Option(help="prompt tokens per step, a multiple of 16")] = None,
    kv_memory: Annotated[str | None, typer.Option(help="memory for keys and values, such as 512MiB")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with an [engine] table")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Answer one prompt: text as it comes, or --json with ids, log probabilities and timings."""
    from steerpipe.core.config import load_config
    from steerpipe.core.sampling import SamplingSettings

    flags = {
        "dtype": dtype, "device": device, "threads": threads, "max_context": max_context,
        "prefill_chunk": prefill_chunk, "kv_memory": kv_memory,
    }  # fmt: skip
    sampling = {
        "max_tokens": max_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p,
        "repetition_penalty": repetition_penalty, "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty, "seed": seed, "stop": tuple(stop) if stop else None,
        "ignore_eos": ignore_eos or None, "logprobs": logprobs,
    }  # fmt: skip

    def run() -> None:
        text = _prompt_text(prompt)
        SamplingSettings().override(**sampling)  # a wrong value is told before gigabytes are read
        with _open_pipeline(model, load_config(flags, file=config), quiet=as_json) as pipe:
            answer = pipe.stream(_turns(text, system, raw), raw=raw, **sampling)
            if as_json:
                plain = sys.stdout.encoding.lower() != "utf-8"
                print(json.dumps(completion_json(answer.completion, pipe), ensure_ascii=plain), flush=True)
                return
            for event in answer:
                print(event.text, end="", flush=True)
            print()
            _show_timings(answer.completion)

    _guarded(run, debug)


@app.command()
def demo(as_json: Json = False, debug: Debug = False) -> None:
    """Show what the engine computes: tiny models of every family against transformers."""

    def run() -> None:
        from rich.console import Console

        from steerpipe.demo import run_demo

        _quiet_transformers()
        checks = run_demo(Console(quiet=as_json))
        if as_json:
            print(json.dumps([asdict(check) for check in checks]))

    _guarded(run, debug)


@app.command()
def doctor(as_json: Json = False, debug: Debug = False) -> None:
    """Measure this machine: CPU traps, memory, pinning, GPU, disk; say what is wrong and what to do."""

    def run() -> None:
        from steerpipe.doctor import render, run_doctor

        report = run_doctor()
        if as_json:
            print(json.dumps(asdict(report)))
        else:
            render(report)

    _guarded(run, debug)


def completion_json(completion: "Completion", pipe: "Pipeline") -> dict[str, Any]:
    """The form of `generate --json`. `logprobs` is null unless it was asked for."""
    decode = pipe.codec.decode
    entries = [
        {
            "token_id": chosen.token_id,
            "text": decode([chosen.token_id]),
            "logprob": chosen.logprob,
            "top": [{"token_id": t.token_id, "text": decode([t.token_id]), "logprob": t.logprob} for t in top],
        }
        for chosen, top in zip(completion.logprobs, completion.top_logprobs, strict=True)
    ]
    return {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "logprobs": entries or None,
        "finish_reason": completion.finish_reason.value,
        "timings": asdict(completion.timings),
        "prompt_token_ids": list(completion.prompt_token_ids),
        "config": {choice.name: choice.value for choice in pipe.config.choices},
    }


def _prompt_text(prompt: str) -> str:
    try:
        text = sys.stdin.read() if prompt == "-" else prompt
        text.encode()
    except UnicodeError:  # bytes that are not UTF-8; among arguments, Python hides them as lone surrogates
        raise InputError("the prompt is not UTF-8 text", fix="send it as UTF-8") from None
    if not text:
        raise InputError("there is no prompt", fix='give one: -p "Once upon a time", or -p - to read stdin')
    return text


def _turns(text: str, system: str | None, raw: bool) -> Any:
    if system is None:
        return text
    if raw:
        raise InputError("--system needs the chat template, and --raw goes without it", fix="drop one of the two")
    from steerpipe.engine.tokenizer import ChatMessage

    return [ChatMessage("system", system), ChatMessage("user", text)]


def _open_pipeline(model: str | None, config: Any, *, quiet: bool) -> "Pipeline":
    from rich.console import Console
    from rich.progress import Progress

    from steerpipe.runtime.pipeline import Pipeline

    _quiet_transformers()
    console = Console(stderr=True, quiet=quiet)
    with Progress(console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task("loading experts", total=None)
        return Pipeline(
            model, config=config, progress=lambda done, total: bar.update(task, completed=done, total=total)
        )


def _show_timings(completion: "Completion") -> None:
    from rich.console import Console

    timings = completion.timings
    rate = timings.predicted_n / timings.predicted_ms * 1e3 if timings.predicted_ms else 0.0
    Console(stderr=True, highlight=False).print(
        f"[dim]{timings.prompt_n} prompt tokens in {timings.prompt_ms:.0f} ms · {timings.predicted_n} tokens "
        f"in {timings.predicted_ms:.0f} ms ({rate:.1f} per second) · ended by {completion.finish_reason.value}[/dim]"
    )


def _quiet_transformers() -> None:
    """Its notices and bars are about files that we have checked ourselves."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _guarded(run: Callable[[], None], debug: bool) -> None:
    """Runs a verb; an error becomes two lines on stderr and an exit status."""
    try:
        run()
    except SteerpipeError as error:
        if debug:
            traceback.print_exc()
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_status) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    except BrokenPipeError:  # the reader has left; Python's own last flush must not find that out again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None


def main() -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character shows another
    app()


if __name__ == "__main__":
    main()
