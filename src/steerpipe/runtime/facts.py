"""What `core.resolve` wants to know about this machine and this model."""

import math
from pathlib import Path

import torch

from steerpipe.core.cpu import cpu_flags
from steerpipe.core.machine import read_cores, read_memory
from steerpipe.core.resolve import Facts
from steerpipe.model.families import FAMILIES
from steerpipe.model.spec import ModelSpec
from steerpipe.model.tensors import dense_tensors, expert_tensors
from steerpipe.store.manifest import EXPERTS
from steerpipe.store.reader import is_pack


def gather_facts(spec: ModelSpec, folder: Path) -> Facts:
    """`folder` of the model: if it is a pack, the size of its experts is known before it is opened."""
    names = FAMILIES[spec.family].names
    dense = dense_tensors(spec, names)
    experts = expert_tensors(spec, names)
    outside = (f"{names.embed}.weight", f"{names.head}.weight")
    inside = [math.prod(shape) for name, shape in (dense | experts).items() if name not in outside]
    cuda = torch.cuda.is_available()
    return Facts(
        has_cuda=cuda,
        has_native_bf16=not cpu_flags().isdisjoint({"avx512_bf16", "amx_bf16"}),
        core_count=read_cores().usable,
        free_ram_bytes=read_memory().available_bytes,
        free_cuda_bytes=torch.cuda.mem_get_info()[0] if cuda else 0,
        stored_dtype=spec.stored_dtype,
        resident_parameters=sum(math.prod(shape) for shape in dense.values()),
        expert_parameters=sum(math.prod(shape) for shape in experts.values()),
        model_context=spec.max_context,
        expert_block_bytes=_packed_bytes(folder) if cuda else None,
        kv_elements_per_token=sum(2 * layer.attention.kv_heads * layer.attention.head_dim for layer in spec.layers),
        layer_matrix_elements=max(inside),
    )


def _packed_bytes(folder: Path) -> int | None:
    """Of all experts, if the folder is a pack."""
    file = folder / EXPERTS
    return file.stat().st_size if is_pack(folder) and file.is_file() else None
