"""What packing a checkpoint will write, settled before the first byte: pure but for reading headers and routing."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from steerpipe.model.checkpoint import Checkpoint, read_json
from steerpipe.model.tensors import expert_tensors
from steerpipe.store.dense import plan_dense
from steerpipe.store.files import canonical_json, digest
from steerpipe.store.formats import DenseFormat, ExpertFormat
from steerpipe.store.layout import BlockLayout, plan_block
from steerpipe.store.manifest import SCHEMA, Manifest, SizeClass
from steerpipe.store.routing import index_order, recorded_order
from steerpipe.store.source import config_digest, identify, stamp, weight_files
from steerpipe.store.tensorfile import PlannedTensor, file_bytes, header

_COPIED = (
    "config.json", "generation_config.json", "tokenizer*.json", "tokenizer.model", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "chat_template.*", "*.tiktoken", "README*", "LICENSE*", "LICENCE*",
    "NOTICE*",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class PackOptions:
    """`experts=None` and NATIVE copy the checkpoint's own dtypes. `routing`: a recorded trace that gives the order."""

    experts: ExpertFormat | None = None
    dense: DenseFormat = DenseFormat.NATIVE
    group: int | None = None  # int4: inputs per scale; None: the finest that costs no further page
    routing: Path | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One block to be written."""

    layer: int
    expert: int
    offset: int  # in experts.safetensors
    layout: BlockLayout


@dataclass(frozen=True, slots=True)
class PackPlan:
    """Everything that is known beforehand. Two runs with equal plans write equal bytes."""

    source: str
    config: str
    model_type: str
    expert_format: ExpertFormat
    dense_format: DenseFormat
    lossless: bool
    ordered_by: str
    classes: tuple[SizeClass, ...]
    order: dict[int, tuple[int, ...]]
    expert_tensors: tuple[PlannedTensor, ...]
    dense_tensors: tuple[PlannedTensor, ...]
    copies: tuple[Path, ...]
    job: str  # digest of all this and of the state of the source's files

    @property
    def expert_file_bytes(self) -> int:
        return file_bytes(self.expert_tensors)

    @property
    def dense_file_bytes(self) -> int:
        return file_bytes(self.dense_tensors)

    def rows(self) -> Iterator[Row]:
        """Every block in the order on disk."""
        offset = len(header(self.expert_tensors))
        for each in self.classes:
            for layer in each.layers:
                for expert in self.order[layer]:
                    yield Row(layer, expert, offset, each.layout)
                    offset += each.layout.block_bytes

    def describes(self, manifest: Manifest) -> bool:
        """Whether this plan would write that pack."""
        mine = (self.source, self.config, self.expert_format, self.dense_format, self.classes, self.order)
        theirs = (manifest.source, manifest.config, manifest.expert_format, manifest.dense_format, manifest.classes)
        return mine == (*theirs, manifest.order)


def plan_pack(checkpoint: Checkpoint, options: PackOptions) -> PackPlan:
    """Reads headers, one page per tensor, and the routing trace if there is one."""
    spec = checkpoint.spec
    native = _native_format(checkpoint)
    form = options.experts or native
    order = recorded_order(spec, options.routing) if options.routing else index_order(spec)
    classes = _size_classes(checkpoint, form, options.group)
    rows = {each.tensor: sum(len(order[layer]) for layer in each.layers) for each in classes}
    dense = tuple(plan_dense(checkpoint, options.dense))
    copies = copied_files(checkpoint.folder)
    source = identify(checkpoint)
    state = [source, form.value, options.dense.value, options.group, list(order.values())]
    job = digest(canonical_json([SCHEMA, state, stamp(weight_files(checkpoint)), stamp(copies)]))
    return PackPlan(
        source=source,
        config=config_digest(read_json(checkpoint.folder / "config.json")),
        model_type=checkpoint.family.model_type,
        expert_format=form,
        dense_format=options.dense,
        lossless=form is native and options.dense is DenseFormat.NATIVE,
        ordered_by="coactivation" if options.routing else "index",
        classes=classes,
        order=order,
        expert_tensors=tuple(
            PlannedTensor(each.tensor, torch.uint8, (rows[each.tensor], each.layout.block_bytes)) for each in classes
        ),
        dense_tensors=dense,
        copies=copies,
        job=job,
    )  # fmt: skip


def copied_files(folder: Path) -> tuple[Path, ...]:
    """Config, tokenizer, template, card and licence of a checkpoint: what a pack takes along as it is."""
    return tuple(sorted({file for pattern in _COPIED for file in folder.glob(pattern) if file.is_file()}))


def _native_format(checkpoint: Checkpoint) -> ExpertFormat:
    """The experts' own dtype; float32, which holds the others exactly, where they are mixed or there are none."""
    names = expert_tensors(checkpoint.spec, checkpoint.family.names)
    dtypes = {checkpoint.entries[name].dtype for name in names}
    return ExpertFormat(str(dtypes.pop()).removeprefix("torch.")) if len(dtypes) == 1 else ExpertFormat.FLOAT32


def _size_classes(checkpoint: Checkpoint, form: ExpertFormat, group: int | None) -> tuple[SizeClass, ...]:
    spec = checkpoint.spec
    by_width: dict[int, list[int]] = {}
    for layer in spec.moe_layers:
        by_width.setdefault(spec.moe(layer).width, []).append(layer)
    return tuple(
        SizeClass(
            "experts" if not index else f"experts.{index}", tuple(layers), plan_block(form, spec.hidden, width, group)
        )
        for index, (width, layers) in enumerate(by_width.items())
    )
