"""`steerpipe chat`: a conversation in the terminal that is prepared while you type."""

import sys
from contextlib import closing
from typing import TYPE_CHECKING, Annotated

import typer

from steerpipe.cli import options
from steerpipe.cli.answers import quality_line, show_memory, show_prediction
from steerpipe.cli.shared import Debug, Model, Predict, app, guarded, progress_bar, quiet_transformers
from steerpipe.core.errors import InputError

if TYPE_CHECKING:
    from steerpipe.core.config import EngineConfig
    from steerpipe.runtime.pipeline import Pipeline


@app.command()
def chat(
    model: Model = None,
    system: options.System = None,
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    seed: options.Seed = None,
    drafts: Annotated[
        bool, typer.Option("--drafts/--no-drafts", help="prepare the answer while you type, or begin at Enter")
    ] = True,
    dtype: options.Dtype = None,
    device: options.Device = None,
    threads: options.Threads = None,
    max_context: Annotated[int | None, typer.Option(help="tokens of the whole conversation")] = None,
    fast_memory: options.FastMemory = None,
    ram: options.Ram = None,
    pace: options.Pace = None,
    quality: options.Quality = None,
    quality_profile: options.QualityProfile = None,
    cover: options.Cover = None,
    predict: Predict = None,
    config: options.Config = None,
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
