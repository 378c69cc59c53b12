"""Where a resident decode step goes: the graph alone, what the host adds, and every kernel's share.

    PYTHONPATH=src python benchmarks/step_profile.py [--shape qwen3-30b] [--format bf16,int4] [--json PATH]

The graph is replayed back to back (no host between two steps), then steps run as the engine runs them.
"""

import argparse
import json
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from steerpipe.bench.residents import ResidentBlocks
from steerpipe.bench.rig import Rig
from steerpipe.bench.shapes import make_shape
from steerpipe.core.ids import SequenceId
from steerpipe.model.step import decode_rows
from steerpipe.store.formats import parse_expert_format


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-30b")
    parser.add_argument("--format", default="bf16,int4")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found = {name: measure(given.shape, name) for name in given.format.split(",")}
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))


def measure(name: str, form: str) -> dict[str, Any]:
    expert_format = parse_expert_format(form)
    assert expert_format is not None, "a format of its own"
    device = torch.device("cuda")
    shape = make_shape(name, expert_format, 1024)
    rig = Rig(shape, device, torch.bfloat16, sequences=1, tokens=512, kernels=True)
    source = ResidentBlocks(shape, device, 0)
    kvs = [rig.sequence(128)]
    rig.decode(source, kvs, None, 0, 20)
    steps = rig.decode(source, kvs, None, 0, 100)
    graphs: Any = rig.decoder
    graph = next(iter(graphs._captured[1]._captured.values())).graph  # noqa: SLF001 (this looks inside)
    torch.cuda.synchronize()
    begin, count = time.perf_counter(), 100
    launches = []
    for _ in range(count):
        at = time.perf_counter()
        graph.replay()
        launches.append(time.perf_counter() - at)
    torch.cuda.synchronize()
    alone = (time.perf_counter() - begin) / count
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        rig.decode(source, kvs, None, 0, 4)
    spent: dict[str, list[float]] = defaultdict(list)
    for event in profiler.events() or []:
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spent[event.name[:60]].append(event.device_time_total)
    table = sorted(((sum(us) / 4, len(us) // 4, kernel) for kernel, us in spent.items()), reverse=True)
    step = statistics.median(steps)
    parts = breakdown(rig, source, kvs)
    print(
        f"{name} {form}: step {step * 1e3:.3f} ms, graph alone {alone * 1e3:.3f} ms, "
        f"launching it {statistics.median(launches) * 1e6:.0f} us, kernels {sum(row[0] for row in table) / 1e3:.3f} ms"
    )
    print("  host: " + ", ".join(f"{part} {us:.0f} us" for part, us in parts.items()))
    for us, calls, kernel in table[:14]:
        print(f"  {us:9.1f} us in {calls:4} {kernel}")
    source.close()
    del source, rig, graphs, graph
    torch.cuda.empty_cache()
    return {"step_ms": step * 1e3, "graph_ms": alone * 1e3, "kernels": table}


def breakdown(rig: Rig, source: Any, kvs: list[Any]) -> dict[str, float]:
    """Median microseconds of the parts of a step: rows made, pass queued, token awaited; and the device's own time."""
    times: dict[str, list[float]] = defaultdict(list)
    begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(60):
        torch.cuda.synchronize()
        marks = [time.perf_counter()]
        step = decode_rows([SequenceId(0)], kvs, [1], rig.decoder.rows_device, cell=1)
        marks.append(time.perf_counter())
        begun.record()
        logits = rig.decoder.forward(step, source, [0])
        ended.record()
        marks.append(time.perf_counter())
        logits.argmax(-1).tolist()
        marks.append(time.perf_counter())
        for part, before, after in zip(("rows", "queue", "wait"), marks, marks[1:], strict=False):
            times[part].append((after - before) * 1e6)
        times["device, from the first copy to the logits"].append(begun.elapsed_time(ended) * 1e3)
    return {part: statistics.median(values) for part, values in times.items()}


if __name__ == "__main__":
    main()
