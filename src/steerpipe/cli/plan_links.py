"""Measures the links of this machine for `steerpipe plan`, with the doctor's instruments."""

import os
from pathlib import Path

import torch

from steerpipe.core.config import cache_folder, load_config
from steerpipe.core.errors import InputError
from steerpipe.doctor.disk import measure_read
from steerpipe.doctor.gpu import COPY_BYTES, copy_rate


def disk_rate(folder: Path) -> float:
    """Bytes per second of direct reads where the model lies, or else where packs are kept. Writes 64 MiB there."""
    cache = cache_folder(load_config())
    where = next(
        (place for place in (folder, cache, *cache.absolute().parents) if place.is_dir() and os.access(place, os.W_OK)),
        None,
    )
    if where is None:
        raise InputError("the disk cannot be measured: no folder can be written", fix="give its rate: --tier disk=7GB")
    try:
        return measure_read(where).gb_per_second * 1e9
    except OSError as error:
        raise InputError(
            f"the disk cannot be measured in {where}: {error.strerror}", fix="give its rate: --tier disk=7GB"
        ) from error


def copy_rates() -> dict[str, float]:
    """Bytes per second to the GPU, by where they lie in RAM."""
    pageable = torch.ones(COPY_BYTES, dtype=torch.uint8)
    pinned = torch.ones(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    return {"page-locked RAM": copy_rate(pinned) * 1e9, "RAM": copy_rate(pageable) * 1e9}
