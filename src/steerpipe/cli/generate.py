"""`steerpipe generate`: one prompt, one answer."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from steerpipe.cli import options
from steerpipe.cli.answers import quality_json, show_cover, show_memory, show_prediction, show_quality, show_timings
from steerpipe.cli.shared import Debug, Json, Model, Predict, app, guarded, progress_bar, quiet_transformers
from steerpipe.core.errors import InputError
from steerpipe.core.timeline import MOST_SPANS, Timeline
from steerpipe.core.whole_file import check_place

if TYPE_CHECKING:
    from steerpipe.core.config import EngineConfig
    from steerpipe.core.events import Completion
    from steerpipe.runtime.answer import Answer
    from steerpipe.runtime.pipeline import Pipeline
    from steerpipe.transfer.counters import LadderCounters


@app.command()
def generate(
    model: Model = None,
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="text to answer; - reads it from stdin")] = "",
    system: options.System = None,
    raw: Annotated[bool, typer.Option("--raw", help="continue the text as it is, without the chat template")] = False,
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    top_k: Annotated[int | None, typer.Option(help="sample among the k likeliest; 0 is off")] = None,
    top_p: options.TopP = None,
    min_p: Annotated[float | None, typer.Option(help="drop tokens below this share of the likeliest")] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="above 1 discourages repeats")] = None,
    presence_penalty: Annotated[float | None, typer.Option(help="-2 to 2, once per token that occurred")] = None,
    frequency_penalty: Annotated[float | None, typer.Option(help="-2 to 2, per occurrence of a token")] = None,
    seed: options.Seed = None,
    stop: Annotated[list[str] | None, typer.Option(help="end before this text; may be given several times")] = None,
    stop_token_id: Annotated[list[int] | None, typer.Option(help="end at this token; may be repeated")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="go on after an end token")] = False,
    logprobs: Annotated[int | None, typer.Option(help="log probabilities of each token and of the n likeliest")] = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    threads: options.Threads = None,
    max_context: options.MaxContext = None,
    prefill_chunk: options.PrefillChunk = None,
    kv_memory: options.KvMemory = None,
    fast_memory: options.FastMemory = None,
    ram: options.Ram = None,
    pin: options.Pin = None,
    pace: options.Pace = None,
    policy: options.Policy = None,
    quality: options.Quality = None,
    quality_profile: options.QualityProfile = None,
    cover: options.Cover = None,
    predict: Predict = None,
    profile: options.Profile = None,
    cache_dir: options.CacheDir = None,
    timeline: Annotated[
        Path | None, typer.Option(help="write compute, copies and waits as a trace for Perfetto or Chrome")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with a table named engine")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Answer one prompt: text as it comes, or --json with ids, log probabilities and timings."""
    from steerpipe.core.config import load_config
    from steerpipe.core.sampling import SamplingSettings

    flags = {
        "dtype": dtype, "device": device, "threads": threads, "max_context": max_context,
        "prefill_chunk": prefill_chunk, "kv_memory": kv_memory, "fast_memory": fast_memory, "ram": ram, "pin": pin,
        "pace": pace, "policy": policy, "quality": quality, "quality_profile": quality_profile, "cover": cover,
        "predict": predict, "profile": profile, "cache_dir": cache_dir,
    }  # fmt: skip
    sampling = {
        "max_tokens": max_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p,
        "repetition_penalty": repetition_penalty, "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty, "seed": seed, "stop": tuple(stop) if stop else None,
        "stop_token_ids": tuple(stop_token_id) if stop_token_id else None,
        "ignore_eos": ignore_eos or None, "logprobs": logprobs,
    }  # fmt: skip

    def run() -> None:
        text = _prompt_text(prompt)
        turns = _turns(text, system, raw)
        SamplingSettings().override(**sampling)  # a wrong value is told before gigabytes are read
        if timeline is not None:
            check_place(timeline, "the timeline")
        spans = Timeline() if timeline is not None else None
        settings = load_config(flags, file=config)
        with _open_pipeline(model, settings, spans, quiet=as_json) as pipe:
            if spans is not None and pipe.budget.resident:
                raise InputError("every expert is resident: a timeline is of a ladder", fix="give --fast-memory 25%")
            before = pipe.counters()
            with _written(spans, timeline):
                answer = pipe.stream(turns, raw=raw, **sampling)
                _tell(answer, pipe, before, as_json=as_json)
            if not as_json:
                show_quality(answer.completion, pipe, settings.quality)
                show_cover(answer.completion, settings.cover)

    guarded(run, debug)


@contextmanager
def _written(spans: Timeline | None, file: Path | None) -> Iterator[None]:
    """Writes what was noted when the block ends, also of an answer that Ctrl-C or an error ended."""
    try:
        yield
    finally:
        if spans is not None and file is not None and spans.spans():
            spans.write(file)
            if spans.dropped:
                print(f"{file} has the newest {MOST_SPANS:,} spans; {spans.dropped:,} did not fit", file=sys.stderr)


def _tell(answer: "Answer", pipe: "Pipeline", before: "LadderCounters | None", *, as_json: bool) -> None:
    if as_json:
        plain = sys.stdout.encoding.lower() != "utf-8"
        print(json.dumps(completion_json(answer.completion, pipe), ensure_ascii=plain), flush=True)
        return
    show_memory(pipe)
    for event in answer:
        print(event.text, end="", flush=True)
    print()
    after = pipe.counters()
    show_timings(answer.completion, None if after is None or before is None else after - before)
    show_prediction(pipe)


def completion_json(completion: "Completion", pipe: "Pipeline") -> dict[str, Any]:
    """The form of `generate --json`. `logprobs` is null unless asked for, `experts` and
    `prediction` where every expert is resident, `quality` and `cover` where the answer is exact."""
    decode, counters = pipe.codec.decode, pipe.counters()
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
        "config": {name: value for name, value in asdict(pipe.config).items() if name != "choices"},
        "memory": [asdict(row) for row in pipe.memory],
        "experts": counters and counters.as_json(),
        "prediction": pipe.prediction and pipe.prediction.as_json(),
        "quality": quality_json(completion, pipe),
        "cover": completion.covered and completion.covered.as_json(),
    }


def _prompt_text(prompt: str) -> str:
    if prompt == "-" and sys.stdin is None:
        raise InputError("there is no stdin to read the prompt from", fix='give it with -p "..."')
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


def _open_pipeline(model: str | None, config: "EngineConfig", timeline: Timeline | None, *, quiet: bool) -> "Pipeline":
    from steerpipe.runtime.pipeline import Pipeline

    quiet_transformers()
    with progress_bar("loading", quiet=quiet) as progress:
        return Pipeline(model, config=config, progress=progress, timeline=timeline)
