"""`steerpipe.json`: what a pack holds, and how to know that it is whole. Written last, read first, strict both ways."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from steerpipe.core.errors import PackError
from steerpipe.store.formats import DenseFormat, ExpertFormat
from steerpipe.store.layout import BlockLayout, Part, place_block
from steerpipe.store.loss import QuantReport

T = TypeVar("T")

SCHEMA = 1
MANIFEST, EXPERTS, DENSE = "steerpipe.json", "experts.safetensors", "dense.safetensors"
PACK_AGAIN = "the pack is damaged: copy it again, or write it anew with `steerpipe pack`"


@dataclass(frozen=True, slots=True)
class SizeClass:
    """Layers whose experts have one size: one uint8 tensor [experts, block_bytes], layer after layer."""

    tensor: str
    layers: tuple[int, ...]
    layout: BlockLayout


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file of the pack. `blake2b` is empty for the two weight files, which have checksums of their own."""

    size_bytes: int
    blake2b: str = ""


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything about a pack but its weights."""

    steerpipe: str  # the version that wrote it
    source: str  # identity of the checkpoint, see source.identify
    config: str  # digest of config.json
    model_type: str
    expert_format: ExpertFormat
    lossless: bool  # every weight has the bits that it had in the checkpoint
    ordered_by: str  # "index" or "coactivation"
    classes: tuple[SizeClass, ...]
    order: Mapping[int, tuple[int, ...]]  # layer → experts as they lie on disk
    checksums: Mapping[int, tuple[str, ...]]  # layer → CRC-32 of each block as they lie on disk
    dense_format: DenseFormat
    dense_checksums: Mapping[str, str]  # tensor of dense.safetensors → CRC-32
    files: Mapping[str, FileRecord]
    loss: QuantReport

    def rows(self, size_class: SizeClass) -> Iterator[tuple[int, int]]:
        """(layer, expert) of each row of a class's tensor, in the order on disk."""
        for layer in size_class.layers:
            for expert in self.order[layer]:
                yield layer, expert

    def to_bytes(self) -> bytes:
        """JSON with one line per entry: no time, no path, so equal packs have equal manifests."""
        raw: dict[str, Any] = {"schema": SCHEMA}
        for field in fields(self):
            raw[field.name] = getattr(self, field.name)
        raw["classes"] = [_class_to_json(each) for each in self.classes]
        raw["files"] = {name: asdict(record) for name, record in self.files.items()}
        raw["loss"] = asdict(self.loss)
        lines = (f"{json.dumps(key)}:{json.dumps(value, separators=(',', ':'))}" for key, value in raw.items())
        return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def read_manifest(folder: Path) -> Manifest:
    """Raises PackError for a folder that is not a pack, a newer schema, or a manifest that is not complete."""
    file = folder / MANIFEST
    try:
        raw = json.loads(file.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise PackError(
            f"{folder} has no {MANIFEST}: it is not a pack", fix="write one with `steerpipe pack MODEL OUT`"
        ) from None
    except OSError as problem:
        raise PackError(f"{file} cannot be read: {problem.strerror}", fix="check its permissions") from None
    except ValueError:
        raise PackError(f"{file} is not JSON", fix=PACK_AGAIN) from None
    schema = raw.pop("schema", None) if isinstance(raw, dict) else None
    if schema != SCHEMA:
        raise PackError(
            f"{file} has schema {schema!r}; this version reads {SCHEMA}",
            fix="use the version of steerpipe that wrote the pack, or write it anew from the checkpoint",
        )
    try:
        return _from_json(raw)
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        raise PackError(
            f"{file} is not a complete manifest: {type(problem).__name__}: {problem}", fix=PACK_AGAIN
        ) from None


def _from_json(raw: dict[str, Any]) -> Manifest:
    _exact_keys(raw, Manifest)
    _all(str, [raw[name] for name in ("steerpipe", "source", "config", "model_type", "ordered_by")])
    _all(bool, [raw["lossless"]])
    form = ExpertFormat(raw.pop("expert_format"))
    loss, files = raw.pop("loss"), raw.pop("files")
    _exact_keys(loss, QuantReport)
    order, checksums, dense_sums = raw.pop("order"), raw.pop("checksums"), raw.pop("dense_checksums")
    return Manifest(
        expert_format=form,
        classes=tuple(_class_from_json(each, form) for each in raw.pop("classes")),
        order={int(layer): _all(int, experts) for layer, experts in order.items()},
        checksums={int(layer): _all(str, sums) for layer, sums in checksums.items()},
        dense_format=DenseFormat(raw.pop("dense_format")),
        dense_checksums=dict(zip(dense_sums, _all(str, dense_sums.values()), strict=True)),
        files=_files_from_json(files),
        loss=QuantReport(**loss),
        **raw,
    )


def _files_from_json(raw: dict[str, Any]) -> dict[str, FileRecord]:
    missing = {EXPERTS, DENSE, "config.json"} - raw.keys()
    outside = [name for name in raw if name != Path(name).name]
    if missing or outside:
        raise ValueError(f"files missing: {sorted(missing)}, not in the folder: {outside}")
    _all(int, [record["size_bytes"] for record in raw.values()])
    _all(str, [record["blake2b"] for record in raw.values()])
    return {name: FileRecord(**record) for name, record in raw.items()}


def _class_to_json(size_class: SizeClass) -> dict[str, Any]:
    layout = asdict(size_class.layout)
    del layout["format"]  # one for the whole pack
    return {"tensor": size_class.tensor, "layers": size_class.layers, **layout}


def _class_from_json(raw: dict[str, Any], form: ExpertFormat) -> SizeClass:
    """The parts are written out for other readers; ours come from the rule, and must be the same."""
    shape = _all(int, [raw[name] for name in ("hidden", "width", "gate_up_group", "down_group")])
    layout = place_block(form, *shape)
    said = tuple(Part(**part) for part in raw["parts"])
    if said != layout.parts or raw["block_bytes"] != layout.block_bytes:
        raise ValueError(f"the parts of a block are {said}, which is not how {form.value} lies")
    (tensor,) = _all(str, [raw["tensor"]])
    return SizeClass(tensor, _all(int, raw["layers"]), layout)


def _all(kind: type[T], values: Iterable[Any]) -> tuple[T, ...]:
    found = tuple(values)
    if not all(type(value) is kind for value in found):
        raise TypeError(f"a {kind.__name__} was expected")
    return found


def _exact_keys(raw: dict[str, Any], kind: type) -> None:
    names = {field.name for field in fields(kind)}
    if raw.keys() != names:
        raise ValueError(f"keys missing: {sorted(names - raw.keys())}, unknown: {sorted(raw.keys() - names)}")
