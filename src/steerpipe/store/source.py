"""Which checkpoint a pack was made from, and whether its files are still the same."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from steerpipe.core.errors import TransferError
from steerpipe.model.checkpoint import Checkpoint
from steerpipe.model.safetensors import TensorEntry
from steerpipe.store.files import canonical_json, digest

SAMPLE_BYTES = 4096


def config_digest(raw: Any) -> str:
    """Of a config.json as parsed: spaces, order and line ends do not count."""
    return digest(canonical_json(raw))


def identify(checkpoint: Checkpoint) -> str:
    """See `identify_weights`."""
    return identify_weights(checkpoint.folder, checkpoint.entries)


def identify_weights(folder: Path, entries: Mapping[str, TensorEntry]) -> str:
    """Config, header and the first 4 KiB of every tensor: two fine-tunes of one model share headers, not weights.

    Reads one page per tensor (18,000 tensors: about a second), not the whole checkpoint.
    """
    found = hashlib.blake2b(digest_size=16)
    found.update(canonical_json(json.loads((folder / "config.json").read_text(encoding="utf-8"))))
    by_file: dict[Path, list[tuple[str, TensorEntry]]] = {}
    for name, entry in entries.items():
        by_file.setdefault(entry.file, []).append((name, entry))
    samples: dict[str, bytes] = {}
    for file, of_file in by_file.items():
        samples.update(_samples(file, of_file))
    for name in sorted(samples):  # not by file: the same tensors in other shards are the same model
        entry = entries[name]
        found.update(f"\n{name} {entry.dtype} {entry.shape}\n".encode())
        found.update(samples[name])
    return found.hexdigest()


def stamp(files: Iterable[Path]) -> list[list[Any]]:
    """Name, size and time of change of each file: changes when a file does, at the cost of a stat."""
    stats = [(file.name, file.stat()) for file in sorted(files)]
    return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]


def weight_files(checkpoint: Checkpoint) -> set[Path]:
    return {entry.file for entry in checkpoint.entries.values()}


def _samples(file: Path, entries: list[tuple[str, TensorEntry]]) -> Iterable[tuple[str, bytes]]:
    try:
        with file.open("rb", buffering=0) as stream:
            for name, entry in sorted(entries, key=lambda item: item[1].offset):
                stream.seek(entry.offset)
                yield name, stream.read(min(SAMPLE_BYTES, entry.size_bytes))
    except OSError as problem:
        raise TransferError(f"reading {file} failed: {problem}", fix="check the disk, then try again") from None
