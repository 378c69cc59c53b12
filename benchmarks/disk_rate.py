"""How near the ladder's reads come to the disk's own rate, and whether a large pack keeps within a small budget.

    python benchmarks/disk_rate.py --size 4GiB --fast-memory 256MiB --ram 256MiB

Writes a synthetic pack (or uses --pack). An engine answers a prompt on it under the budgets, and the growth of the
process is compared with what is allowed. Then, in turns: a plain loop of direct reads with the same block size and
depth (the ceiling), the same loop with the decoding that a reader does between its reads, and the ladder. Rates are
bytes / time with a read outstanding; they count no decoding.
"""

import argparse
import gc
import json
import os
import statistics
import tempfile
import threading
import time
from dataclasses import asdict
from pathlib import Path

import torch

from steerpipe.core.cpu import apply_guard
from steerpipe.core.sampling import SamplingSettings
from steerpipe.core.units import format_bytes, parse_bytes
from steerpipe.engine.engine import Engine
from steerpipe.engine.request import Request
from steerpipe.engine.tokenizer import TextCodec
from steerpipe.model.decoder import Decoder
from steerpipe.model.kv_cache import KvPool
from steerpipe.model.weights import build_weights
from steerpipe.store.formats import ExpertFormat
from steerpipe.store.reader import Pack, open_pack
from steerpipe.store.slots import SlotArena
from steerpipe.store.synthetic import SyntheticShape, write_synthetic
from steerpipe.tiny import write_byte_tokenizer
from steerpipe.transfer.link import LinkMeter
from steerpipe.transfer.slabs import Slab
from steerpipe.transfer.source import LadderSource, block_addresses, slot_bytes

CPU = torch.device("cpu")
ALLOWED_BYTES = 100 * 10**6  # over budget, dense weights and KV


def shape_for(size_bytes: int, layers: int, form: ExpertFormat) -> SyntheticShape:
    block_bytes = SyntheticShape(1, 1, 1024, 768, form=form).layout.block_bytes
    return SyntheticShape(layers, -(-size_bytes // (layers * block_bytes)), 1024, 768, form=form)


def plain_rate(pack: Pack, blocks: int, depth: int, arena: SlotArena | None = None) -> float:
    """Bytes per second of a loop of preadv on O_DIRECT: `depth` threads, one block each at a time, in disk order.

    With an arena each block is checked and decoded before the next is read, as a reader of the ladder does.
    """
    places = sorted(block_addresses(pack).values(), key=lambda address: address.offset)[:blocks]
    descriptor = os.open(pack.expert_file, os.O_RDONLY | os.O_DIRECT)
    meter = LinkMeter()
    waiting = iter(places)
    lock = threading.Lock()

    def work() -> None:
        slab = Slab.allocate(places[0].size_bytes)
        while True:
            with lock:
                place = next(waiting, None)
            if place is None:
                return
            with meter.reading(place.size_bytes):
                got = os.preadv(descriptor, [slab.view], place.offset)
            assert got == place.size_bytes, f"{got} of {place.size_bytes} bytes came"
            if arena is not None:
                layer, expert = place.expert
                out = arena.weights(expert % arena.slots, pack.layout(layer))
                pack.check_block(layer, expert, slab.view)
                pack.decode_block(layer, slab.tensor, out.down.dtype, out=out)

    threads = [threading.Thread(target=work) for _ in range(depth)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.close(descriptor)
    found = meter.snapshot()
    return found.read_bytes / found.busy_seconds


def ladder_rate(source: LadderSource, blocks: int) -> float:
    """Bytes per second of the ladder's reads while it serves as many experts, layer by layer."""
    before = source.counters()
    served = 0
    for layer in source.pack.spec.moe_layers:
        count = source.pack.spec.moe(layer).experts
        with source.lease(layer, list(range(count)), keep=[]) as lease:
            for _ in lease.waves():
                pass
        served += count
        if served >= blocks:
            break
    source.check_integrity()
    spent = source.counters() - before
    return spent.read_bytes / spent.link_seconds


def resident_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def answer(pack: Pack, folder: Path, options: argparse.Namespace) -> dict[str, object]:
    """Generates under the budgets; what the process grew by, and what it was allowed."""
    codec = TextCodec.load(folder)
    gc.collect()
    before = resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak starts anew
    dtype = getattr(torch, options.dtype)
    weights = build_weights(pack.spec, pack.family.names, pack.read_dense(), dtype, CPU)
    dense = sum(entry.size_bytes for entry in pack.dense_entries.values()) // 2 * dtype.itemsize
    pool = KvPool(pack.spec, dtype, CPU, capacity_blocks=4)
    slots = parse_bytes(options.fast_memory) // slot_bytes(pack, dtype)
    with LadderSource.open(
        pack, slots=slots, dtype=dtype, ram_bytes=parse_bytes(options.ram), readers=options.readers
    ) as source:
        engine = Engine(
            Decoder(pack.spec, weights, CPU), source, pool, codec, end_tokens=frozenset(), max_context=256,
            max_batch=1, prefill_chunk=64,
        )  # fmt: skip
        begin = time.perf_counter()
        prompt = tuple(codec.encode("The disk is larger than the memory. " * 2, add_special=False))
        engine.submit(Request(prompt, SamplingSettings(temperature=0.0, max_tokens=options.tokens)))
        while not engine.idle:
            engine.step()
        seconds = time.perf_counter() - begin
        source.check_integrity()
        budget = source.fast_bytes + source.slab_bytes + parse_bytes(options.ram)
        return {
            "grown_bytes": resident_bytes("VmHWM") - before,
            "budget_bytes": budget, "dense_bytes": dense, "kv_bytes": 4 * pool.block_bytes,
            "allowed_bytes": budget + dense + 4 * pool.block_bytes + ALLOWED_BYTES,
            "slots": slots, "link": source.link.name, "seconds": seconds, "counters": asdict(source.counters()),
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="4GiB", help="of the synthetic pack")
    parser.add_argument("--pack", type=Path, help="keep the pack here, and use it if it is there")
    parser.add_argument("--experts", default="bfloat16", choices=[form.value for form in ExpertFormat])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--fast-memory", default="256MiB")
    parser.add_argument("--ram", default="256MiB")
    parser.add_argument("--readers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--blocks", type=int, default=59, help="read in each round")
    parser.add_argument("--tokens", type=int, default=4)
    options = parser.parse_args()
    apply_guard()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.pack or Path(scratch) / "pack"
        if not folder.exists():
            shape = shape_for(parse_bytes(options.size), 16, ExpertFormat(options.experts))
            write_synthetic(folder, shape)
            write_byte_tokenizer(folder)
        pack = open_pack(folder)
        answered = answer(pack, folder, options)
        report(pack, options, answered)


def report(pack: Pack, options: argparse.Namespace, answered: dict[str, object]) -> None:
    dtype = getattr(torch, options.dtype)
    slots = parse_bytes(options.fast_memory) // slot_bytes(pack, dtype)
    arena = SlotArena([pack.layout(pack.spec.moe_layers[0])], slots, dtype, CPU)
    rates: dict[str, list[float]] = {"plain direct reads": [], "the same, decoding between": [], "the ladder": []}
    with LadderSource.open(pack, slots=slots, dtype=dtype, readers=options.readers) as source:
        for _ in range(options.rounds):
            for name, measure in (
                ("plain direct reads", lambda: plain_rate(pack, options.blocks, options.readers)),
                ("the same, decoding between", lambda: plain_rate(pack, options.blocks, options.readers, arena)),
                ("the ladder", lambda: ladder_rate(source, options.blocks)),
            ):
                rates[name].append(measure())
    ceiling, decoding, reached = (statistics.median(found) for found in rates.values())
    size_bytes = pack.expert_file.stat().st_size
    block_bytes = pack.layout(pack.spec.moe_layers[0]).block_bytes
    print(f"pack {format_bytes(size_bytes)}, blocks of {format_bytes(block_bytes)}, depth {options.readers}")
    for name, found in rates.items():
        spread = f"{min(found) / 1e9:.2f} to {max(found) / 1e9:.2f}"
        print(f"{name:27} {statistics.median(found) / 1e9:.2f} GB/s ({spread} in {options.rounds} rounds)")
    print(f"ratio {reached / ceiling:.1%} of plain reads, {reached / decoding:.1%} of those with decoding between")
    print(f"process grew by {answered['grown_bytes']:,} bytes at most; allowed {answered['allowed_bytes']:,}")
    summary = {
        "pack_bytes": size_bytes, "block_bytes": block_bytes, "plain_bytes_per_second": ceiling,
        "decoding_bytes_per_second": decoding, "ladder_bytes_per_second": reached, "ratio": reached / ceiling,
        "ratio_with_decoding": reached / decoding, **answered,
    }  # fmt: skip
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
