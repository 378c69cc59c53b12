"""Checkpoint → expert pack. Killed at any byte and run again, it continues and ends with the same bytes.

Order of work: experts block by block (journalled), the dense weights, the copied files, the manifest, the rename.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from steerpipe import __version__
from steerpipe.core.errors import PackError
from steerpipe.model.checkpoint import Checkpoint
from steerpipe.store.blocks import decode, encode, split
from steerpipe.store.dense import WrittenDense, write_dense
from steerpipe.store.files import (
    byte_view,
    check_room,
    checksum,
    compact_json,
    digest,
    disk_errors,
    write_all,
    write_file,
)
from steerpipe.store.journal import BlockRecord, Journal
from steerpipe.store.loss import QuantReport, SquareSums, square_sums
from steerpipe.store.manifest import DENSE, EXPERTS, MANIFEST, FileRecord, Manifest, read_manifest
from steerpipe.store.plan import PackOptions, PackPlan, Row, plan_pack
from steerpipe.store.progress import Progress, silent
from steerpipe.store.source import stamp, weight_files
from steerpipe.store.tensorfile import header
from steerpipe.store.workspace import Workspace, clear_journal

__all__ = ["PackOptions", "PackReport", "write_pack"]


@dataclass(frozen=True, slots=True)
class PackReport:
    """What `write_pack` made, JSON-able."""

    folder: str
    source: str
    expert_format: str
    dense_format: str
    experts: int
    block_bytes: tuple[int, ...]  # one per size class
    gate_up_group: tuple[int, ...]
    down_group: tuple[int, ...]
    expert_file_bytes: int
    dense_file_bytes: int
    total_bytes: int
    resumed_experts: int  # found from an earlier run and checked
    already_there: bool
    loss: QuantReport


def write_pack(
    checkpoint: Checkpoint, out: Path, options: PackOptions | None = None, progress: Progress | None = None
) -> PackReport:
    """Writes `out`, which appears whole or not at all. Blocks; memory: one expert or one dense tensor at a time.

    An `out` that is already this pack is left as it is; anything else there is an error. Raises CapacityError when the
    disk is too small or runs full; what was done is kept in `OUT.partial` and continued by the next call.
    """
    plan = plan_pack(checkpoint, options or PackOptions())
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        return _existing(plan, out)
    report = progress or silent
    names = (EXPERTS, DENSE, MANIFEST, *(file.name for file in plan.copies))
    with disk_errors(out), Workspace(out, plan.job, names) as work:
        resumed = _resume(work.folder / EXPERTS, plan, work.journal)
        check_room(work.folder, _needed_bytes(plan, resumed))
        before = stamp(weight_files(checkpoint))
        _write_experts(checkpoint, work.folder / EXPERTS, plan, work.journal, report)
        dense = _write_dense(checkpoint, work.folder / DENSE, plan, report)
        if stamp(weight_files(checkpoint)) != before:
            raise PackError(f"{checkpoint.folder} changed while it was packed", fix="run the command again")
        manifest = _manifest(plan, work.journal.records, dense, _copy_files(plan, work.folder))
        write_file(work.folder / MANIFEST, manifest.to_bytes())
        work.finish()
    return _report(out, manifest, resumed=resumed, already_there=False)


def _existing(plan: PackPlan, out: Path) -> PackReport:
    fix = "choose another name, or remove it first"
    if not (out / MANIFEST).is_file():
        raise PackError(f"{out} exists and is not a pack", fix=fix)
    manifest = read_manifest(out)
    if not plan.describes(manifest):
        raise PackError(f"{out} is already a pack, of another model or in another format", fix=fix)
    short = [name for name, record in manifest.files.items() if _size(out / name) != record.size_bytes]
    if short:
        raise PackError(
            f"{out} is already this pack, but its {short[0]} is not whole", fix="remove it, then pack again"
        )
    clear_journal(out)
    return _report(out, manifest, resumed=0, already_there=True)


def _needed_bytes(plan: PackPlan, resumed: int) -> int:
    done = sum(row.layout.block_bytes for row, _ in zip(plan.rows(), range(resumed), strict=False))
    return plan.expert_file_bytes - done + plan.dense_file_bytes + sum(file.stat().st_size for file in plan.copies)


def _resume(file: Path, plan: PackPlan, journal: Journal) -> int:
    """How many blocks of an earlier run are there and right; the journal is cut back to them."""
    good = 0
    if journal.records and file.exists():
        with file.open("rb", buffering=0) as stream:
            for row, record in zip(plan.rows(), journal.records, strict=False):
                stream.seek(row.offset)
                found = stream.read(row.layout.block_bytes)
                if len(found) != row.layout.block_bytes or checksum(found) != record.checksum:
                    break
                good += 1
    journal.keep(plan.job, good)
    return good


def _write_experts(checkpoint: Checkpoint, file: Path, plan: PackPlan, journal: Journal, progress: Progress) -> None:
    total_bytes = plan.expert_file_bytes + plan.dense_file_bytes
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        done_bytes = write_all(descriptor, header(plan.expert_tensors), 0)
        for index, row in enumerate(plan.rows()):
            done_bytes += row.layout.block_bytes
            if index >= len(journal.records):
                block, record = _pack_expert(checkpoint, row)
                write_all(descriptor, block, row.offset)
                journal.append(record)
            progress(done_bytes, total_bytes)
        os.ftruncate(descriptor, plan.expert_file_bytes)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _pack_expert(checkpoint: Checkpoint, row: Row) -> tuple[memoryview, BlockRecord]:
    weights = checkpoint.read_expert(row.layer, row.expert)
    block = encode(row.layout, *weights, name=f"expert {row.expert} of layer {row.layer}")
    packed = split(decode(row.layout, block, torch.float32))
    sums = [square_sums(weight, stored) for weight, stored in zip(weights, packed, strict=True)]
    content = byte_view(block)
    return content, BlockRecord(checksum(content), *sums)


def _write_dense(checkpoint: Checkpoint, file: Path, plan: PackPlan, progress: Progress) -> WrittenDense:
    start, total_bytes = plan.expert_file_bytes, plan.expert_file_bytes + plan.dense_file_bytes
    top = len(header(plan.dense_tensors))
    return write_dense(checkpoint, file, plan.dense_format, lambda done, _: progress(start + top + done, total_bytes))


def _copy_files(plan: PackPlan, folder: Path) -> dict[str, FileRecord]:
    records = {}
    for file in plan.copies:
        content = file.read_bytes()
        if file.name == "tokenizer.json":  # indented it is twice as long, and all of it is parsed at each start
            content = compact_json(content)
        write_file(folder / file.name, content)
        records[file.name] = FileRecord(len(content), digest(content))
    return records


def _manifest(
    plan: PackPlan, records: list[BlockRecord], dense: WrittenDense, copies: dict[str, FileRecord]
) -> Manifest:
    checksums: dict[int, list[str]] = {layer: [] for layer in plan.order}
    for row, record in zip(plan.rows(), records, strict=True):
        checksums[row.layer].append(record.checksum)
    files = {EXPERTS: FileRecord(plan.expert_file_bytes), DENSE: FileRecord(plan.dense_file_bytes), **copies}
    return Manifest(
        steerpipe=__version__,
        source=plan.source,
        config=plan.config,
        model_type=plan.model_type,
        expert_format=plan.expert_format,
        lossless=plan.lossless,
        ordered_by=plan.ordered_by,
        classes=plan.classes,
        order=plan.order,
        checksums={layer: tuple(sums) for layer, sums in checksums.items()},
        dense_format=plan.dense_format,
        dense_checksums=dense.checksums,
        files=files,
        loss=_loss(plan, records, dense.sums),
    )


def _loss(plan: PackPlan, records: list[BlockRecord], dense: SquareSums) -> QuantReport:
    sums = {"gate": SquareSums(), "up": SquareSums(), "down": SquareSums(), "dense": dense}
    for record in records:
        for kind in ("gate", "up", "down"):
            sums[kind] += getattr(record, kind)
    rows = list(plan.rows())
    weights = sum(row.layout.weights for row in rows)
    stored = sum(part.size_bytes for row in rows for part in row.layout.parts)
    dense_weights = sum(t.size_bytes // t.dtype.itemsize for t in plan.dense_tensors if not t.name.endswith(".scale"))
    return QuantReport(
        relative_rms={kind: each.relative_rms for kind, each in sums.items()},
        expert_bits_per_weight=8 * stored / max(1, weights),
        expert_bits_per_weight_on_disk=8 * sum(row.layout.block_bytes for row in rows) / max(1, weights),
        dense_bits_per_weight=8 * sum(t.size_bytes for t in plan.dense_tensors) / dense_weights,
    )


def _report(out: Path, manifest: Manifest, *, resumed: int, already_there: bool) -> PackReport:
    layouts = [each.layout for each in manifest.classes]
    return PackReport(
        folder=str(out),
        source=manifest.source,
        expert_format=manifest.expert_format.value,
        dense_format=manifest.dense_format.value,
        experts=sum(len(experts) for experts in manifest.order.values()),
        block_bytes=tuple(layout.block_bytes for layout in layouts),
        gate_up_group=tuple(layout.gate_up_group for layout in layouts),
        down_group=tuple(layout.down_group for layout in layouts),
        expert_file_bytes=manifest.files[EXPERTS].size_bytes,
        dense_file_bytes=manifest.files[DENSE].size_bytes,
        total_bytes=sum(record.size_bytes for record in manifest.files.values()) + _size(out / MANIFEST),
        resumed_experts=resumed,
        already_there=already_there,
        loss=manifest.loss,
    )


def _size(file: Path) -> int:
    """-1 for a file that is not there: no record has that size."""
    return file.stat().st_size if file.is_file() else -1
