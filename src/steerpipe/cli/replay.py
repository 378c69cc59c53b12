"""`steerpipe replay`: a recorded run on a simulated machine, on a virtual clock."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from steerpipe.cli.shared import Debug, Json, app, guarded
from steerpipe.core.errors import ConfigError
from steerpipe.core.units import parse_bytes

if TYPE_CHECKING:
    from steerpipe.transfer.recorded import Recording

WARMUP_TOKENS: Final = 200  # as the arena: a tenth of the tokens, or half of few


@app.command()
def replay(
    trace: Annotated[
        Path | None,
        typer.Argument(help="a trace, or safetensors with 'routing' [tokens, layers, top_k]; none: synthetic routing"),
    ] = None,
    block: Annotated[str, typer.Option(help="bytes of one expert")] = "17.3MB",
    link: Annotated[str, typer.Option(help="bytes per second of the link to the fast memory")] = "25GB",
    layer_ms: Annotated[float, typer.Option(help="compute of one layer, in milliseconds")] = 0.1,
    residency: Annotated[float, typer.Option(help="share of all experts that the fast memory holds")] = 0.25,
    latency_us: Annotated[float, typer.Option(help="before the first byte of each block, in microseconds")] = 0.0,
    ask_us: Annotated[
        float, typer.Option(help="of a layer that misses, before its first block moves, in microseconds")
    ] = 0.0,
    decode_us: Annotated[
        float, typer.Option(help="per block once it is read, before it can be used, in microseconds")
    ] = 0.0,
    beside_us: Annotated[
        float, typer.Option(help="of a layer, after its router, that goes on beside its misses, in microseconds")
    ] = 0.0,
    end_us: Annotated[float, typer.Option(help="of a token after its last layer: logits, in microseconds")] = 0.0,
    between_us: Annotated[float, typer.Option(help="of a host between two tokens, in microseconds")] = 0.0,
    tap_us: Annotated[
        float, typer.Option(help="that a predictor adds to a layer while it looks ahead, in microseconds")
    ] = 0.0,
    delay_us: Annotated[
        float, typer.Option(help="from a router's decision to the forecast made of it, in microseconds")
    ] = 0.0,
    chunk: Annotated[str, typer.Option(help="bytes of a guess between two looks whether it is still wanted")] = "1MiB",
    guess_link: Annotated[str | None, typer.Option(help="bytes per second of guesses; default: the link's")] = None,
    guesses: Annotated[int | None, typer.Option(help="blocks that one forecast sends for; default: all")] = None,
    stops: Annotated[
        bool, typer.Option(help="guesses stop at a router and at a token's end, as where a device sends by itself")
    ] = False,
    cpu_us: Annotated[
        float | None, typer.Option(help="of a missing block that the CPU computes where it lies, in microseconds")
    ] = None,
    experts: Annotated[int | None, typer.Option(help="per layer; default: as many as the trace routes to")] = None,
    tokens: Annotated[int, typer.Option(help="tokens of the trace to use")] = 2000,
    recall: Annotated[str, typer.Option(help="of a predictor 1, 2, ... layers ahead, such as .8,.7,.65")] = "",
    perfect: Annotated[int, typer.Option(help="layers that a perfect predictor looks ahead; 0: none")] = 0,
    warmup: Annotated[
        int | None, typer.Option(help="first tokens that are not measured; default: 200, but at most half of them")
    ] = None,
    seed: Annotated[int, typer.Option(help="of the synthetic routing and of the predictor's mistakes")] = 0,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """What a machine of your choice would do with a recorded run: on demand, LRU, LFRU, predicted, Belady, resident."""

    def run() -> None:
        from rich.console import Console

        from steerpipe.transfer.comparison import ReplayOptions, compare
        from steerpipe.transfer.machine import Decoding, Looking, Machine, slots_of_share
        from steerpipe.transfer.recorded import draw_recording
        from steerpipe.transfer.replay_report import render
        from steerpipe.transfer.synthetic import SyntheticRouting

        if tokens < 1:
            raise ConfigError(f"--tokens is {tokens}", fix="give at least one")
        if experts is not None and trace is None:
            raise ConfigError(
                "--experts without a trace", fix="leave it out: it says how many experts a layer of a trace has"
            )
        recalls = _recalls(recall)
        _check(0, {
            "--layer-ms": layer_ms, "--latency-us": latency_us, "--ask-us": ask_us, "--decode-us": decode_us,
            "--beside-us": beside_us, "--end-us": end_us, "--between-us": between_us, "--cpu-us": cpu_us,
            "--tap-us": tap_us, "--delay-us": delay_us, "--perfect": perfect, "--warmup": warmup, "--seed": seed,
        })  # fmt: skip
        sizes = {"--block": block, "--link": link, "--chunk": chunk, "--guess-link": guess_link}
        amounts = {flag: parse_bytes(text) for flag, text in sizes.items() if text is not None}
        _check(1, amounts | {"--guesses": guesses})
        looks = {"--tap-us": tap_us, "--delay-us": delay_us, "--guess-link": guess_link, "--guesses": guesses}
        ignored = [flag for flag, value in {**looks, "--stops": stops}.items() if value]
        if ignored and not (recalls or perfect):
            raise ConfigError(f"{', '.join(ignored)} without a predictor", fix="add --recall .8 or --perfect 1")
        drawn = SyntheticRouting(tokens=tokens, seed=seed)
        recording = _recorded(trace, experts, tokens) if trace else draw_recording(drawn)
        machine = Machine(
            slots=slots_of_share(residency, recording.all_experts),
            block_bytes=amounts["--block"],
            link_bytes_per_second=amounts["--link"],
            layer_seconds=layer_ms / 1e3,
            ask_seconds=ask_us / 1e6,
            latency_seconds=latency_us / 1e6,
            decoding=Decoding(decode_us / 1e6) if decode_us else None,
            chunk_bytes=amounts["--chunk"],
            beside_seconds=beside_us / 1e6,
            end_seconds=end_us / 1e6,
            cpu_seconds=None if cpu_us is None else cpu_us / 1e6,
            between_seconds=between_us / 1e6,
            looking=Looking(
                tap_seconds=tap_us / 1e6,
                delay_seconds=delay_us / 1e6,
                most=guesses,
                bytes_per_second=amounts.get("--guess-link"),
                stops=stops,
            ),
        )
        first = _warmup(warmup, recording.tokens)
        options = ReplayOptions(machine, recalls=recalls, perfect_horizon=perfect, warmup_tokens=first, seed=seed)
        comparison = compare(recording, options)
        if as_json:
            print(json.dumps(comparison.as_json()))
        else:
            Console().print(render(comparison))

    guarded(run, debug)


def _check(least: int, given: Mapping[str, float | None]) -> None:
    for flag, value in given.items():
        if value is not None and not least <= value < math.inf:
            raise ConfigError(f"{flag} is {value}", fix=f"give {least} or more")


def _warmup(asked: int | None, tokens: int) -> int:
    if asked is None:
        return min(WARMUP_TOKENS, tokens // 2)
    if asked >= tokens:
        fix = "give --warmup fewer, or more --tokens of a longer recording"
        raise ConfigError(f"--warmup is {asked}, and of {tokens} tokens none is left to measure", fix=fix)
    return asked


def _recorded(trace: Path, experts: int | None, tokens: int) -> "Recording":
    if trace.is_dir():
        from steerpipe.trace.reader import TraceReader

        if experts is not None:
            raise ConfigError("--experts with a trace", fix="leave it out: the trace knows how many there are")
        return TraceReader(trace, states=False).recording(tokens=tokens)
    from steerpipe.transfer.trace_file import read_recording

    return read_recording(trace, experts, tokens)


def _recalls(text: str) -> tuple[float, ...]:
    try:
        recalls = tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        recalls = (-1.0,)
    if not all(0 <= each <= 1 for each in recalls):
        raise ConfigError(f"--recall is {text!r}", fix="give shares between 0 and 1, nearest layer first: .8,.7,.65")
    return recalls
