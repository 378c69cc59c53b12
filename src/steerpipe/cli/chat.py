"""`steerpipe chat`: a conversation in the terminal that is prepared while you type."""

import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from steerpipe.cli.answers import quality_line, show_memory, show_prediction
from steerpipe.cli.shared import Debug, Model, Predict, app, guarded, progress_bar, quiet_transformers
from steerpipe.core.errors import InputError

if TYPE_CHECKING:
    from steerpipe.core.config import EngineConfig
    from steerpipe.runtime.pipeline import Pipeline


@app.command()
def chat(
    model: Model = None,
    system: Annotated[str | None, typer.Option(help="system message for the chat template")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="most tokens of an answer")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; default: the model's own")] = None,
    top_p: Annotated[float | None, typer.Option(help="sample among the likeliest of total probability p")] = None,
    seed: Annotated[int | None, typer.Option(help="same seed, same text")] = None,
    drafts: Annotated[
        bool, typer.Option("--drafts/--no-drafts", help="prepare the answer while you type, or begin at Enter")
    ] = True,
    dtype: Annotated[str | None, typer.Option(help="auto, float32 or bfloat16")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads")] = None,
    max_context: Annotated[int | None, typer.Option(help="tokens of the whole conversation")] = None,
    fast_memory: Annotated[str | None, typer.Option(help="slots for experts: auto, 4GiB, or 25% of them")] = None,
    ram: Annotated[str | None, typer.Option(help="memory for experts in RAM, slots included without a GPU")] = None,
    pace: Annotated[str | None, typer.Option(help="slow the link to so many bytes per second")] = None,
    quality: Annotated[
        str | None,
        typer.Option(help="answers without missing experts: exact, high, balanced, fast, a miss policy, or a plan"),
    ] = None,
    quality_profile: Annotated[str | None, typer.Option(help="what `steerpipe calibrate` wrote")] = None,
    cover: Annotated[
        str | None, typer.Option(help="first tokens that do not wait for experts, a number or auto; changes text")
    ] = None,
    predict: Predict = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with a table named engine")] = None,
    debug: Debug = False,
) -> None:
    """Talk to a model. While you type, what you have written is computed; after a pause the answer is begun.

    Enter sends, Alt-Enter makes a new line, Ctrl-C stops an answer, Ctrl-D or /quit ends. /help says more.
    """
    from steerpipe.core.config import load_config
    from steerpipe.core.sampling import SamplingSettings

    flags = {
        "dtype": dtype, "device": device, "threads": threads, "max_context": max_context, "fast_memory": fast_memory,
        "ram": ram, "pace": pace, "quality": quality, "quality_profile": quality_profile, "cover": cover,
        "predict": predict,
    }  # fmt: skip
    sampling = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}

    def run() -> None:
        if not sys.stdin.isatty() or not sys.stdout.isatty():
            raise InputError("a chat needs a terminal", fix="steerpipe generate -p - answers one text from stdin")
        try:
            from steerpipe.cli.chat_screen import ChatScreen
        except ModuleNotFoundError as missing:
            raise InputError("prompt_toolkit is not installed", fix='pip install "steerpipe[chat]"') from missing
        from steerpipe.runtime.chat_thread import ChatThread

        SamplingSettings().override(**sampling)  # a wrong value is told before gigabytes are read
        chosen = load_config(flags, file=config)
        with _open(model, chosen) as pipe:
            if not pipe.codec.has_chat_template:
                raise InputError(f"{pipe.folder} has no chat template", fix="steerpipe generate --raw continues a text")
            show_memory(pipe)
            settings = pipe.settings(**sampling)
            with closing(ChatThread(pipe, settings, system=system, drafts=drafts)) as thread:
                ChatScreen(
                    thread, pipe.folder.name, drafts=drafts,
                    lossy=lambda turn: quality_line(turn.substituted, pipe, chosen.quality),
                ).run()  # fmt: skip
            show_prediction(pipe)

    guarded(run, debug)


def _open(model: str | None, config: "EngineConfig") -> "Pipeline":
    from steerpipe.runtime.pipeline import Pipeline

    quiet_transformers()
    with progress_bar("loading", quiet=False) as progress:
        return Pipeline(model, config=config, progress=progress)
