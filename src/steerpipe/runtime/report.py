"""One run for a bug report: what was configured, counted, timed and routed. Never what was asked or answered."""

import io
import json
import traceback
import zipfile
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from steerpipe.core.config import EngineConfig, refuse_lossy
from steerpipe.core.errors import SteerpipeError
from steerpipe.core.events import RoutingRecord
from steerpipe.core.timeline import Timeline
from steerpipe.core.whole_file import write_named
from steerpipe.runtime.pipeline import Pipeline

NEUTRAL_PROMPT = "Please describe a quiet morning in a small town by the sea."
REPORT, TIMELINE, ROUTING = "report.json", "timeline.json", "routing.safetensors"


class DecodedRoutes:
    """A RoutingSink that keeps which experts the answer's tokens were routed to, and nothing of the prompt's."""

    def __init__(self) -> None:
        self._rows: defaultdict[int, list[NDArray[np.int64]]] = defaultdict(list)

    def observe(self, record: RoutingRecord) -> None:
        if len(record.positions) == 1:  # a step of one row; prompts have more, but for a last token
            self._rows[record.layer].append(record.experts)

    def routing(self) -> NDArray[np.int64] | None:
        """[tokens, MoE layers, top_k]; None: nothing was decoded, or layers differ in k."""
        layers = [np.concatenate(self._rows[layer]) for layer in sorted(self._rows)]
        if not layers or len({each.shape for each in layers}) > 1:
            return None
        return np.stack(layers, axis=1)


@dataclass(frozen=True, slots=True)
class RunReport:
    """What is known of a run, however it ended."""

    facts: Mapping[str, Any]
    timeline: Timeline
    routing: NDArray[np.int64] | None = field(default=None)


def report_run(model: str | None, config: EngineConfig, prompt: str, max_tokens: int) -> RunReport:
    """Loads the model and answers once. A failure is reported, not raised, without any message that may quote text.

    Raises ConfigError alone, before it loads, if the answer would not be exact.
    """
    refuse_lossy(config, "a report")
    timeline, routes = Timeline(), DecodedRoutes()
    facts: dict[str, Any] = {"asked": asdict(config)}
    try:
        with Pipeline(model, config=config, sink=routes, timeline=timeline) as pipe:
            facts |= _model_facts(pipe)
            completion = pipe.generate(prompt, max_tokens=max_tokens, ignore_eos=True)
            counters = pipe.counters()
            facts |= {
                "finish_reason": completion.finish_reason.value,
                "timings": asdict(completion.timings),
                "counters": counters and counters.as_json(),
                "prediction": pipe.prediction and pipe.prediction.as_json(),
            }
    except SteerpipeError as error:
        facts["error"] = {"kind": type(error).__name__, "what": error.what, "fix": error.fix}
    except Exception as problem:  # noqa: BLE001  whatever it is, it is what the report is for
        frames = traceback.extract_tb(problem.__traceback__)[-8:]
        places = [f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames]
        facts["error"] = {"kind": type(problem).__name__, "where": places}
    return RunReport(facts, timeline, routes.routing())


def write_report(file: Path, doctor: Mapping[str, Any], run: RunReport) -> list[str]:
    """Writes one zip, whole or not at all; the names of what is in it. Raises CapacityError."""
    parts: dict[str, bytes] = {}
    left_out = {}
    if run.timeline.spans():
        parts[TIMELINE] = json.dumps(run.timeline.as_trace()).encode()
    else:
        left_out[TIMELINE] = "every expert is resident, or nothing ran"
    if run.routing is not None:
        narrow = run.routing.astype(np.uint8 if run.routing.max() < 256 else np.int32)
        parts[ROUTING] = save({"routing": narrow, "sequence": np.zeros(len(narrow), dtype=np.int32)})
    else:
        left_out[ROUTING] = "no token was decoded"
    whole = _plain({"doctor": doctor, "run": run.facts, "left_out": left_out})
    parts = {REPORT: json.dumps(whole, indent=1, default=str).encode()} | parts
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
    write_named(file, packed.getvalue(), "the report")
    return list(parts)


def _model_facts(pipe: Pipeline) -> dict[str, Any]:
    return {
        "model": pipe.folder.name,
        "spec": asdict(pipe.spec),
        "config": asdict(pipe.config),
        "memory": [asdict(row) for row in pipe.memory],
    }


def _plain(values: Any) -> Any:
    """With the person's home folder left out of paths."""
    if isinstance(values, dict):
        return {str(name): _plain(value) for name, value in values.items()}
    if isinstance(values, list | tuple):
        return [_plain(value) for value in values]
    return str(values).replace(str(Path.home()), "~") if isinstance(values, str | Path) else values
