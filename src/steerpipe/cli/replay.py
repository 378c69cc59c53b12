"""`steerpipe replay`: a recorded run on a simulated machine, on a virtual clock."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from steerpipe.cli.shared import Debug, Json, app, guarded
from steerpipe.core.errors import ConfigError
from steerpipe.core.units import parse_bytes

if TYPE_CHECKING:
    from steerpipe.transfer.recorded import Recording


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
    experts: Annotated[int | None, typer.Option(help="per layer; default: as many as the trace routes to")] = None,
    tokens: Annotated[int, typer.Option(help="tokens of the trace to use")] = 2000,
    recall: Annotated[str, typer.Option(help="of a predictor 1, 2, ... layers ahead, such as .8,.7,.65")] = "",
    perfect: Annotated[int, typer.Option(help="layers that a perfect predictor looks ahead; 0: none")] = 0,
    warmup: Annotated[int, typer.Option(help="first tokens that are not measured")] = 200,
    seed: Annotated[int, typer.Option(help="of the synthetic routing and of the predictor's mistakes")] = 0,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """What a machine of your choice would do with a recorded run: on demand, LRU, LFRU, predicted, Belady, resident."""

    def run() -> None:
        from rich.console import Console

        from steerpipe.transfer.comparison import ReplayOptions, compare
        from steerpipe.transfer.machine import Decoding, Machine, slots_of_share
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
        drawn = SyntheticRouting(tokens=tokens, seed=seed)
        recording = _recorded(trace, experts, tokens) if trace else draw_recording(drawn)
        machine = Machine(
            slots=slots_of_share(residency, recording.all_experts),
            block_bytes=parse_bytes(block),
            link_bytes_per_second=parse_bytes(link),
            layer_seconds=layer_ms / 1e3,
            ask_seconds=ask_us / 1e6,
            latency_seconds=latency_us / 1e6,
            decoding=Decoding(decode_us / 1e6) if decode_us else None,
        )
        options = ReplayOptions(machine, recalls=recalls, perfect_horizon=perfect, warmup_tokens=warmup, seed=seed)
        comparison = compare(recording, options)
        if as_json:
            print(json.dumps(comparison.as_json()))
        else:
            Console().print(render(comparison))

    guarded(run, debug)


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
