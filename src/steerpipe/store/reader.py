"""Reading a pack. Opening looks at the manifest and the headers only; experts are read one by one, by one read each.

Legend: H hidden, I expert width.
"""

import os
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from steerpipe.core.errors import CheckpointError, PackError, TransferError
from steerpipe.core.protocols import ExpertWeights
from steerpipe.model.checkpoint import read_json, read_spec
from steerpipe.model.families import find_family
from steerpipe.model.families.base import Family
from steerpipe.model.safetensors import TensorEntry, read_header
from steerpipe.model.spec import ModelSpec
from steerpipe.model.tensors import dense_tensors
from steerpipe.store.blocks import decode, split
from steerpipe.store.dense import expected_dense, quantised_names
from steerpipe.store.dense_weights import DenseFile, DenseWeights
from steerpipe.store.files import byte_view, checksum, digest
from steerpipe.store.layout import PAGE_BYTES, BlockLayout
from steerpipe.store.manifest import DENSE, EXPERTS, MANIFEST, PACK_AGAIN, Manifest, read_manifest
from steerpipe.store.source import config_digest


@dataclass(frozen=True, slots=True)
class BlockPlace:
    """Where one expert lies in experts.safetensors, what its CRC-32 is, and how its block is laid out."""

    offset: int
    checksum: str
    layout: BlockLayout


class Pack:
    """An opened pack: same contract as a Checkpoint, plus raw blocks. Many threads may read at once.

    `verify` says whether checksums are compared at each read. The file stays open until the Pack is collected, so that
    a pack that is removed or renamed meanwhile can still be read.
    """

    def __init__(self, folder: Path, family: Family, spec: ModelSpec, manifest: Manifest, *, verify: bool) -> None:
        self.folder = folder
        self.family = family
        self.spec = spec
        self.manifest = manifest
        self.verify = verify
        self.expert_file = folder / EXPERTS
        self.dense_entries = _check_dense(folder, family, spec, manifest)
        self._dense = DenseFile(self.dense_entries, manifest.dense_checksums if verify else None)
        self._places = _check_experts(folder, manifest)
        self._descriptor = os.open(self.expert_file, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)

    def place(self, layer: int, expert: int) -> BlockPlace:
        """For readers that do their own input and output; a dict hit."""
        return self._places[layer, expert]

    def layout(self, layer: int) -> BlockLayout:
        return self._places[layer, 0].layout

    def dense(self, dtype: torch.dtype | None = None) -> Mapping[str, Tensor]:
        """Dense weights by the checkpoint's names; each is read when asked for, and matrices are cast on the way.

        Without a `dtype`, and what int8 would not pack (routers, norms, biases), as stored; float32 where quantised.
        """
        matrices = quantised_names(self.spec, self.family.names)
        dtypes = {}
        for name in dense_tensors(self.spec, self.family.names):
            stored = self.dense_entries[name].dtype
            exact = torch.float32 if stored is torch.int8 else stored
            dtypes[name] = dtype if dtype is not None and name in matrices else exact
        return DenseWeights(self._dense, dtypes)

    def read_dense(self) -> dict[str, Tensor]:
        """All of them at once, as stored. Reads the disk."""
        return dict(self.dense())

    def read_expert(self, layer: int, expert: int) -> tuple[Tensor, Tensor, Tensor]:
        """gate [I, H], up [I, H], down [H, I]; float32 if they were quantised, as stored otherwise. Reads the disk."""
        layout = self.layout(layer)
        dtype = torch.float32 if layout.format.quantised else getattr(torch, layout.format.value)
        return split(self.decode_block(layer, self.read_block(layer, expert), dtype))

    def read_block(self, layer: int, expert: int) -> Tensor:
        """The block as it lies on disk: uint8 [block_bytes], memory of its own. One read; TransferError if it fails."""
        place = self._places[layer, expert]
        block = torch.empty(place.layout.block_bytes, dtype=torch.uint8)
        view = byte_view(block)
        done = 0
        try:
            while done < len(view):
                got = os.preadv(self._descriptor, [view[done:]], place.offset + done)
                if not got:
                    raise PackError(f"{self.expert_file} became shorter while it was read", fix=PACK_AGAIN)
                done += got
        except OSError as problem:
            raise TransferError(
                f"reading {self.expert_file} failed: {problem}", fix="check the disk, then try again"
            ) from None
        if self.verify:
            self.check_block(layer, expert, view)
        return block

    def check_block(self, layer: int, expert: int, block: memoryview) -> None:
        """Raises PackError unless the block is the one that was packed. 4 us for 16 KiB."""
        found, said = checksum(block), self._places[layer, expert].checksum
        if found != said:
            raise PackError(
                f"expert {expert} of layer {layer} in {self.expert_file} has checksum {found} instead of {said}",
                fix=PACK_AGAIN,
            )

    def decode_block(
        self, layer: int, block: Tensor, dtype: torch.dtype, out: ExpertWeights | None = None
    ) -> ExpertWeights:
        """A block of that layer, compute-ready: see `blocks.decode`. Rounds once, from float32."""
        return decode(self.layout(layer), block, dtype, out)

    def read_stored(self, name: str) -> Tensor:
        """One tensor of dense.safetensors as it lies on disk: weights, codes or scales."""
        return self._dense.read(name)


def is_pack(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def open_pack(folder: Path, *, verify: bool = True, compare_files: bool = True) -> Pack:
    """Checks that manifest, config and headers belong together; raises PackError at the first thing that does not.

    `compare_files`: tokenizer, template and the like have to be those that were packed, too. Weights are checked as
    they are read.
    """
    manifest = read_manifest(folder)
    for name, record in manifest.files.items():
        _check_size(folder / name, record.size_bytes)
        if compare_files and record.blake2b and name != "config.json":  # that one is compared by meaning, below
            _check_content(folder / name, record.blake2b)
    raw = read_json(folder / "config.json")
    if config_digest(raw) != manifest.config:
        raise PackError(
            f"{folder / 'config.json'} is not the one that this pack was made with",
            fix="put the original config.json back, or pack the other model's own checkpoint",
        )
    family = find_family(str(raw.get("model_type", "unnamed")), str(folder))
    spec = read_spec(family, raw, str(folder / "config.json"))
    _check_geometry(folder, spec, manifest)
    return Pack(folder, family, spec, manifest, verify=verify)


def _check_content(file: Path, said: str) -> None:
    if digest(file.read_bytes()) != said:
        raise PackError(
            f"{file} is not the file that was packed",
            fix=f"put the original {file.name} back, or change it in the checkpoint and pack that again",
        )


def _check_size(file: Path, said_bytes: int) -> None:
    if not file.is_file():
        raise PackError(f"{file} is missing", fix=PACK_AGAIN)
    found_bytes = file.stat().st_size
    if found_bytes != said_bytes:
        raise PackError(f"{file} has {found_bytes:,} bytes instead of {said_bytes:,}", fix=PACK_AGAIN)


def _check_geometry(folder: Path, spec: ModelSpec, manifest: Manifest) -> None:
    """The manifest's layers, experts and widths are those of config.json, each expert once."""
    layers = sorted(layer for each in manifest.classes for layer in each.layers)
    same = manifest.model_type == spec.family and layers == list(spec.moe_layers)
    for each in manifest.classes:
        for layer in each.layers if same else ():
            moe = spec.moe(layer)
            same &= (each.layout.hidden, each.layout.width) == (spec.hidden, moe.width)
            same &= sorted(manifest.order.get(layer, ())) == list(range(moe.experts))
            same &= len(manifest.checksums.get(layer, ())) == moe.experts
    if not same:
        raise PackError(f"{folder} has a manifest whose experts are not those of its config.json", fix=PACK_AGAIN)


def _check_dense(folder: Path, family: Family, spec: ModelSpec, manifest: Manifest) -> Mapping[str, TensorEntry]:
    entries = _header(folder / DENSE)
    expected = expected_dense(spec, family.names, manifest.dense_format)
    if {
        name: entry.shape for name, entry in entries.items()
    } != expected or manifest.dense_checksums.keys() != expected.keys():
        raise PackError(f"{folder / DENSE} does not hold the dense weights that config.json promises", fix=PACK_AGAIN)
    return entries


def _check_experts(folder: Path, manifest: Manifest) -> dict[tuple[int, int], BlockPlace]:
    entries = _header(folder / EXPERTS)
    places: dict[tuple[int, int], BlockPlace] = {}
    for each in manifest.classes:
        rows = list(manifest.rows(each))
        sums = [found for layer in each.layers for found in manifest.checksums[layer]]
        entry = entries.pop(each.tensor, None)
        shape = (len(rows), each.layout.block_bytes)
        if entry is None or entry.shape != shape or entry.dtype != torch.uint8 or entry.offset % PAGE_BYTES:
            raise PackError(
                f"{folder / EXPERTS} does not hold {each.tensor!r} of {list(shape)} bytes on a page", fix=PACK_AGAIN
            )
        for index, (row, found) in enumerate(zip(rows, sums, strict=True)):
            places[row] = BlockPlace(entry.offset + index * each.layout.block_bytes, found, each.layout)
    if entries:
        raise PackError(f"{folder / EXPERTS} holds tensors that the manifest does not name", fix=PACK_AGAIN)
    return places


def _header(file: Path) -> dict[str, TensorEntry]:
    try:
        return read_header(file)
    except CheckpointError as problem:
        raise PackError(problem.what, fix=PACK_AGAIN) from None
