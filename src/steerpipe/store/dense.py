"""Everything but the experts: `dense.safetensors`.

In int8 a matrix `name` is stored as codes under `name` and float16 scales, one per row, under `name.scale`. Routers,
norms, biases and the one-row switch of a shared expert stay as they were: they are small, and routing hangs on them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from steerpipe.model.checkpoint import Checkpoint
from steerpipe.model.spec import ModelSpec
from steerpipe.model.tensors import Shape, TensorNames, dense_tensors
from steerpipe.store.formats import DenseFormat
from steerpipe.store.loss import SquareSums, square_sums
from steerpipe.store.progress import Progress
from steerpipe.store.quant import dequantise_int8, quantise_int8
from steerpipe.store.tensorfile import PlannedTensor, TensorFile, in_file_order

SCALE = ".scale"


@dataclass(frozen=True, slots=True)
class WrittenDense:
    checksums: dict[str, str]  # by name in the file
    sums: SquareSums  # over the matrices that int8 packs


def quantised_names(spec: ModelSpec, names: TensorNames) -> frozenset[str]:
    """The matrices that int8 packs: 2-D, more than one row, not a router."""
    routers = {f"{names.router.format(layer=layer)}.weight" for layer in spec.moe_layers}
    shapes = dense_tensors(spec, names)
    return frozenset(name for name, shape in shapes.items() if len(shape) == 2 and shape[0] > 1 and name not in routers)


def plan_dense(checkpoint: Checkpoint, form: DenseFormat) -> list[PlannedTensor]:
    """The tensors of dense.safetensors, in the order of the file."""
    shapes = dense_tensors(checkpoint.spec, checkpoint.family.names)
    packed = _packed_names(checkpoint.spec, checkpoint.family.names, form)
    planned = []
    for name, shape in shapes.items():
        if name in packed:
            planned += [PlannedTensor(name, torch.int8, shape), PlannedTensor(name + SCALE, torch.float16, (shape[0],))]
        else:
            planned.append(PlannedTensor(name, checkpoint.entries[name].dtype, shape))
    return in_file_order(planned)


def expected_dense(spec: ModelSpec, names: TensorNames, form: DenseFormat) -> dict[str, Shape]:
    """Names and shapes that dense.safetensors of a pack must have."""
    shapes = dense_tensors(spec, names)
    return shapes | {name + SCALE: (shapes[name][0],) for name in _packed_names(spec, names, form)}


def write_dense(checkpoint: Checkpoint, file: Path, form: DenseFormat, progress: Progress) -> WrittenDense:
    """Writes the file, one tensor in memory at a time. `progress` counts the bytes of this file."""
    planned = plan_dense(checkpoint, form)
    sizes = {tensor.name: tensor.size_bytes for tensor in planned}
    checksums: dict[str, str] = {}
    sums = SquareSums()
    matrices = quantised_names(checkpoint.spec, checkpoint.family.names)
    packed = _packed_names(checkpoint.spec, checkpoint.family.names, form)
    done_bytes, total_bytes = 0, sum(sizes.values())
    with TensorFile(file, planned) as out:
        for name in sorted(dense_tensors(checkpoint.spec, checkpoint.family.names)):
            weight = checkpoint.read(name)
            parts = {name: weight}
            if name in packed:
                codes, scales = quantise_int8(weight, name)  # [R, C], [R, 1]
                parts = {name: codes, name + SCALE: scales.squeeze(1)}
            for part, tensor in parts.items():
                checksums[part] = out.write(part, tensor)
                done_bytes += sizes[part]
            if name in matrices:
                sums += square_sums(weight, restore(parts, name))
            progress(done_bytes, total_bytes)
    return WrittenDense(checksums, sums)


def restore(stored: Mapping[str, Tensor], name: str) -> Tensor:
    """The weight as it is computed with: float32 where it was quantised, as stored elsewhere."""
    scales = stored.get(name + SCALE)
    return stored[name] if scales is None else dequantise_int8(stored[name], scales.unsqueeze(1), torch.float32)


def _packed_names(spec: ModelSpec, names: TensorNames, form: DenseFormat) -> frozenset[str]:
    return quantised_names(spec, names) if form is DenseFormat.INT8 else frozenset()
