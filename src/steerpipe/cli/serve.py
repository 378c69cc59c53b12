"""`steerpipe serve`: the OpenAI-compatible server."""

import logging
from typing import TYPE_CHECKING, Annotated

import typer

from steerpipe.cli import options
from steerpipe.cli.shared import Debug, Model, Predict, app, guarded
from steerpipe.core.errors import CapacityError, ConfigError, InputError, SteerpipeError
from steerpipe.core.units import parse_bytes

if TYPE_CHECKING:
    from steerpipe.server.messages import Failure
    from steerpipe.server.service import Service


@app.command()
def serve(
    model: Model = None,
    host: Annotated[str, typer.Option(help="address to listen on; all but this machine need a key")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes any that is free")] = 8000,
    api_key: Annotated[list[str] | None, typer.Option(help="a user's key; better in STEERPIPE_API_KEY")] = None,
    model_name: Annotated[str | None, typer.Option(help="as clients call the model; default: its folder")] = None,
    allowed_host: Annotated[list[str] | None, typer.Option(help="a name under which the server is reached")] = None,
    cors_origin: Annotated[list[str] | None, typer.Option(help="a web page that may ask: https://host")] = None,
    max_queue: Annotated[int, typer.Option(help="answers that may wait; one more is refused with 429")] = 256,
    max_body: Annotated[str, typer.Option(help="largest body of a request")] = "4MiB",
    timeout: Annotated[float, typer.Option(help="seconds for a whole request, waiting included")] = 600.0,
    grace: Annotated[float, typer.Option(help="seconds that running requests get at the end")] = 30.0,
    drafts: Annotated[
        bool, typer.Option("--drafts/--no-drafts", help="work on prompts while they are typed (WebSocket)")
    ] = True,
    max_batch: Annotated[int | None, typer.Option(help="answers computed together; 1: one after the other")] = None,
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
    predict: Predict = None,
    profile: options.Profile = None,
    cache_dir: options.CacheDir = None,
    config: options.Config = None,
    debug: Debug = False,
) -> None:
    """Answer over HTTP in the form of OpenAI's API, until Ctrl-C."""
    flags = {
        "max_batch": max_batch, "dtype": dtype, "device": device, "threads": threads, "max_context": max_context,
        "prefill_chunk": prefill_chunk, "kv_memory": kv_memory, "fast_memory": fast_memory, "ram": ram, "pin": pin,
        "pace": pace, "policy": policy, "quality": quality, "quality_profile": quality_profile, "predict": predict,
        "profile": profile, "cache_dir": cache_dir,
    }  # fmt: skip

    def run() -> None:
        from steerpipe.core.config import load_config, read_api_keys

        _need_server()
        from steerpipe.server.serving import LoadFailedError, Serving
        from steerpipe.server.settings import ServerSettings

        settings = ServerSettings(
            host=host, port=port, api_keys=tuple(api_key) if api_key else read_api_keys(), model_name=model_name,
            allowed_hosts=tuple(allowed_host or ()), cors_origins=tuple(cors_origin or ()), max_queue=max_queue,
            max_body_bytes=parse_bytes(max_body), timeout_seconds=timeout, grace_seconds=grace,
            drafts=drafts,
        )  # fmt: skip
        engine = load_config(flags, file=config)
        if engine.cover is not None:
            raise ConfigError("the server has no cover tokens", fix="leave cover out; generate and chat have them")
        logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
        logging.getLogger("steerpipe.server").setLevel(logging.INFO)
        try:
            Serving(model, engine, settings, _announce).run()
        except LoadFailedError as problem:
            raise _error_of(problem.failure) from None

    guarded(run, debug)


def _need_server() -> None:
    try:
        import fastapi  # noqa: F401
        import uvicorn  # noqa: F401
        import websockets  # noqa: F401
    except ModuleNotFoundError as missing:
        raise ConfigError(f"{missing.name} is not installed", fix="pip install 'steerpipe[server]'") from None


def _announce(address: str, service: "Service") -> None:
    keys, facts = len(service.settings.api_keys), service.asker.facts
    who = f"{keys} API key{'s' if keys > 1 else ''}" if keys else "no API key"
    room = f"{facts.max_batch} answers at once, {facts.max_context} tokens each"
    print(f"{service.name} at {address}/v1 · {who} · {room} · page at {address}", flush=True)


def _error_of(failure: "Failure") -> SteerpipeError:
    """What the engine process said, as it would have been raised here."""
    kinds: dict[str, type[SteerpipeError]] = {"input": InputError, "capacity": CapacityError}
    return kinds.get(failure.kind, SteerpipeError)(failure.what, fix=failure.fix)
