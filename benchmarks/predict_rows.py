"""The rows that predict_on_gpu.py measures, and what `replay` gives for them on the machine of the measured rates."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from steerpipe.arena.foresight import Foresight
from steerpipe.bench.forecasts import ForecastFile
from steerpipe.bench.prediction import held
from steerpipe.core.blocks import GUESSES
from steerpipe.model.gpu.fetching import guesses_within
from steerpipe.store.policies import HALF_LIFE_TOKENS
from steerpipe.transfer.cuda.landing import supply_of
from steerpipe.transfer.cuda.sending import guesses_of
from steerpipe.transfer.machine import Looking, Machine, slots_of_share
from steerpipe.transfer.recorded import Recording
from steerpipe.transfer.replay import replay
from steerpipe.transfer.replay_report import ReplayReport

LFRU, AGAIN = "LFRU", "LFRU again"
FORECASTS = "forecasts.safetensors"  # a run's own, in its folder
CHUNK_BYTES = 64 << 10  # of the simulated link: the 64 programs of a fetch keep no common beat


@dataclass(frozen=True)
class Row:
    """One line of the table. `said`: whose forecasts; "" for none."""

    name: str
    policy: str = "lfru"
    said: str = ""
    horizon: int = 0
    arithmetic: str = "heads"
    served: bool = False  # by the host, whatever the driver of the run; a predictor as the engine has it, by turns


@dataclass(frozen=True)
class Rates:
    """Seconds: a layer that hits, what of it goes on beside a miss, what a layer adds that misses any, a block.

    `tap`: what heads at every router add to a layer on the device that hits, `tap_more`: beyond that to one that misses
    one, two ...; `host`: to a step's host. Of a step, `end`: from
    its last layer to the end of its graph; `between`: of the host, until the next. `delay`: from a router until what
    its tap says is sent for. `experts`: from a router to the end of its layer where that hits. `tail`: from the end of
    a missing block's copy to the end of its layer. None: as `Machine` has it.
    """

    layer: float
    beside: float
    ask: float
    block: float
    tap: float = 0.0
    end: float = 0.0
    between: float = 0.0
    delay: float = 0.0
    experts: float | None = None
    guess_bytes_per_second: float | None = None
    host: float = 0.0
    tap_more: tuple[float, ...] = ()
    tail: float | None = None


ROWS = (
    Row("LRU", policy="lru"),
    Row("LFRU"),
    Row("LFRU, served", served=True),
    Row("LFRU + heads, 1 ahead", said="heads", horizon=1),
    Row("LFRU + heads, 1 and 2 ahead, served", said="heads", horizon=2, served=True),
    Row("LFRU + lookahead, 1 ahead", said="lookahead", horizon=1, arithmetic="lookahead"),
    Row("LFRU + previous token", said="previous", horizon=1, arithmetic="lookahead"),
    Row("LFRU + ExpertTransformer apart, 2 ahead, served", "lfru", "transformers", 2, "transformers", served=True),
    Row("LFRU + perfect, 1 ahead", said="perfect", horizon=1),
    Row("LFRU + recall 0.61, 1 ahead", said="recall 0.61", horizon=1),
    Row("LFRU + always wrong", said="wrong", horizon=1),
    Row("LFRU + chance", said="chance", horizon=1),
    Row("reuse eviction", policy="reuse"),
    Row("reuse eviction + heads, 1 ahead", policy="reuse", said="heads", horizon=1),
    Row("Belady", policy="belady"),
    Row("LFRU again"),
    Row("LFRU + lookahead, 1 and 2 ahead, served", said="lookahead", horizon=2, arithmetic="lookahead", served=True),
    Row("LFRU + perfect, 1 and 2 ahead, served", said="perfect", horizon=2, served=True),
    Row("reuse eviction, served", policy="reuse", served=True),
    Row("reuse eviction + heads, 1 and 2 ahead, served", policy="reuse", said="heads", horizon=2, served=True),
    Row("LFRU + ExpertTransformer, 2 ahead", said="transformers", horizon=2, arithmetic="history"),
    Row("LFRU + ExpertTransformer, 2 ahead, served", "lfru", "transformers", 2, "history", served=True),
)
HISTORY = ("transformers", "history")  # arithmetic of networks of routing history: beside the step, inside its graph
HISTORY_SAID = "transformers"  # whose forecasts those are, whatever file the network lay in
HISTORY_ROWS = frozenset(row.name for row in ROWS if row.arithmetic in HISTORY)


def read_found(file: Path) -> dict[str, Any]:
    """Of predict_on_gpu.py, or of a note, which names columns once and has the means of all rounds in one line."""
    found: dict[str, Any] = json.loads(file.read_text())
    if isinstance(lines := found["lines"], dict):
        rows = [dict(zip(lines["columns"], each, strict=True)) for each in lines["lines"]]
        found["lines"] = [
            row | {"round": number, "live_ms": ms} for row in rows for number, ms in enumerate(row["live_ms"], 1)
        ]
    return found


def digest(forecasts: Path) -> str:
    """By which a run knows its routing and forecasts again: recorded anew on another machine they may be others."""
    with forecasts.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def other_forecasts(found: dict[str, Any], forecasts: Path) -> str | None:
    """Why these are not what was measured; None: they are, or nobody has noted it."""
    if found.get("forecasts") in (None, digest(forecasts)):
        return None
    return (
        f"it was measured with other forecasts than {forecasts}: those of its run are {FORECASTS} in the run's folder"
    )


def beside(rates: Rates, found: dict[str, Any]) -> Rates:
    """Of a network of routing history: what its questions cost the step and the host is measured as a tap's cost is,
    and so is when what it says can be sent for: beside the step an answer is a question later than its router, inside
    the graph the next tap says it."""
    own = Rates(**found["beside"])
    return replace(rates, tap=own.tap, tap_more=own.tap_more, host=own.host, delay=found["beside_delay"])


def by_driver(row: Row, driver: str | None) -> bool:
    """Whether the row runs as it is called in a run with that driver."""
    another = "direct" if row.served else "served" if row.arithmetic == "history" else ""
    return driver != another


def asked_history(rows: Iterable[Row], driver: str) -> str | None:
    """Whose questions a run measures: one arithmetic of routing history, the engine's with that driver first."""
    own = {row.arithmetic for row in rows if by_driver(row, driver)}
    return next((each for each in HISTORY if each in own), None)


def replayable(row: Row, found: dict[str, Any]) -> bool:
    """Whether the rates are of the row's driver, and tell what it costs."""
    if row.arithmetic in HISTORY:
        one = HISTORY[found.get("driver") == "direct"]  # what was measured where nobody has noted it
        if not {"beside", "beside_delay"} <= found.keys() or found.get("beside_of", one) != row.arithmetic:
            print(f"{row.name}: what its questions cost is not in the file")
            return False
    return by_driver(row, found.get("driver"))


def terms(
    share: float, recording: Recording, rates: Rates, found: dict[str, Any], *, predicts: bool = False
) -> Iterator[tuple[str, Machine]]:
    """The machine, with one more of what a live run pays each time. The first: slots and rates alone.

    `predicts`: somebody does in this run, so slots are lent for his guesses, of which replay has some in use, and
    the host takes longer between two steps.
    """
    slots, size = slots_of_share(share, recording.all_experts), found["block_bytes"]
    machine = Machine(
        slots, size, size / rates.block, rates.layer - rates.beside, ask_seconds=rates.ask,
        beside_seconds=rates.beside,
    )  # fmt: skip
    yield "rates", machine
    apart = (rates.end + rates.between) / recording.layers  # of what a layer took: it lies after the last one
    direct = found.get("driver") == "direct"
    looking = machine.looking
    if direct:
        # A second guess begins when the first has ended, in replay as on the device: it may always be sent for.
        looking = Looking(most=GUESSES, stops=True, bytes_per_second=rates.guess_bytes_per_second)
        lent = supply_of(slots, recording.top_k) + (max(0, guesses_of(slots) - guesses_within(size)) if predicts else 0)
        machine = replace(machine, slots=slots - lent, chunk_bytes=CHUNK_BYTES, looking=looking)
        yield "driver", machine
    elif "chunk_kib" in found:  # of the copy stream, which cannot be reordered: a demand waits for what is on it
        machine = replace(machine, chunk_bytes=found.get("window", 1) * found["chunk_kib"] << 10)
        yield "driver", machine
    if apart:
        machine = replace(
            machine, layer_seconds=machine.layer_seconds - apart, end_seconds=rates.end, between_seconds=rates.between
        )
        yield "ends", machine
    if rates.experts is not None:
        # What a layer that misses takes beyond its blocks is the computing of the last expert: the link is idle then.
        experts, top_k = rates.experts, recording.top_k
        if rates.tail is not None:  # what follows the last expert, wherever it came from, is the next layer's
            experts -= max(0.0, min(experts, (rates.tail - experts / top_k) * top_k / (top_k - 1)))
        late = max(0.0, experts + rates.ask - rates.beside)
        each = min(late, experts / top_k)
        machine = replace(
            machine, layer_seconds=machine.layer_seconds + rates.beside - experts,
            beside_seconds=experts - top_k * each, expert_seconds=each, ask_seconds=late - each,
        )  # fmt: skip
        yield "experts", machine
    looking = replace(looking, tap_seconds=max(0.0, rates.tap), tap_more=tuple(rates.tap_more))
    if predicts:
        machine = replace(machine, between_seconds=max(0.0, machine.between_seconds + rates.host))
    yield "tap", replace(machine, looking=looking)
    if rates.delay:
        yield "delay", replace(machine, looking=replace(looking, delay_seconds=rates.delay))


def said_of(row: Row, file: ForecastFile) -> Foresight | None:
    """Who looks at routing history speaks as far ahead as he can, and it holds until the layer comes; inside the graph
    the tap before that layer says it."""
    if not row.said:
        return None
    said = file.foresight(row.said, row.horizon)
    return held(said, 1 if row.arithmetic == "history" else row.horizon) if row.arithmetic in HISTORY else said


def one_row(
    row: Row, machine: Machine, recording: Recording, file: ForecastFile, found: dict[str, Any], said_least: float
) -> ReplayReport:
    """`said_least`: the probability below which a forecast names nobody, as live."""
    reuse = file.reuse if row.policy == "reuse" else None
    said = said_of(row, file)
    if said is not None:
        said = Foresight(said.ranked, np.where(said.probability >= said_least, said.probability, 0.0))
    return replay(
        recording, machine, row.policy, predictor=said, reuse=reuse, warmup_tokens=found["warmup"], name=row.name,
        throttled=said_least > 0, half_life_tokens=reuse.half_life_tokens if reuse else HALF_LIFE_TOKENS,
    )  # fmt: skip
