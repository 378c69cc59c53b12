"""Any transformers MoE model with its experts in steerpipe's memory ladder instead of in its modules.

    with attach(model, fast_memory="25%"):
        model.generate(...)

The logits are those of transformers' own "eager" experts, bit for bit, at every budget. See docs/transformers.md.
"""

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import PreTrainedModel

from steerpipe.core.config import EngineConfig, cache_folder
from steerpipe.core.errors import ConfigError
from steerpipe.integrations.attachment import Attachment, Plan, attachment_of, bind
from steerpipe.integrations.blocks import BlockWriter, file_bytes
from steerpipe.integrations.exchange import expert_layers, experts_device, restore, strip, write_experts
from steerpipe.integrations.form import ExpertForm
from steerpipe.integrations.loading import load_hollow
from steerpipe.integrations.planning import prove, settle_budget
from steerpipe.store.files import check_room, disk_errors

__all__ = ["Attachment", "attach", "attachment_of", "load"]


@torch.inference_mode(False)  # slots that are made in inference mode could not be filled outside of it
@torch.no_grad()
def attach(
    model: PreTrainedModel, *, fast_memory: str = "25%", ram: str | None = None, pace: str | None = None,
    pack_dir: Path | str | None = None,
) -> Attachment:  # fmt: skip
    """Moves the experts of a model that is in memory to disk, and runs it from slots of `fast_memory` from now on.

    `fast_memory` is a share of all experts ("25%"), bytes ("4GiB") or "auto"; `ram` (bytes, slots included) holds more
    of them behind the slots, `pace` slows the disk down to so many bytes per second. The file of blocks lies in
    `pack_dir` (default: the cache folder), takes the experts' size there, and is gone with the model. Blocks until it
    is written. If anything fails, the model is as it was.
    """
    layers = expert_layers(model)
    if model.training:
        raise ConfigError("the model is in training mode, but its experts will come and go", fix="call model.eval()")
    device = experts_device(layers)
    config = EngineConfig(fast_memory=fast_memory, ram=ram, pace=pace)
    forms = [layer.form for layer in layers]
    budget = settle_budget(forms, config, held_bytes=file_bytes(forms))
    plan = Plan(layers, prove(layers, device), budget, device)
    with _block_file(forms, pack_dir) as file, disk_errors(file):
        with BlockWriter(file, forms) as writer:
            write_experts(layers, writer)
            blocks = writer.finish()
        strip(layers)
        try:
            return bind(model, plan, blocks)
        except BaseException:
            restore(layers, blocks, device)
            raise


@torch.inference_mode(False)
@torch.no_grad()
def load(
    folder: Path | str, *, fast_memory: str = "25%", ram: str | None = None, pace: str | None = None,
    pack_dir: Path | str | None = None, dtype: torch.dtype | None = None, attn_implementation: str | None = None,
) -> PreTrainedModel:  # fmt: skip
    """The model of a checkpoint folder, attached: its experts go from the files into blocks and never enter modules.

    Takes memory for the dense weights, the slots and one expert. `dtype` (default: that of the weights) and
    `attn_implementation` are as in transformers' from_pretrained, the rest as in `attach`. `attachment_of(model)` has
    the counters.
    """
    config = EngineConfig(fast_memory=fast_memory, ram=ram, pace=pace)
    hollow = load_hollow(Path(folder), dtype, attn_implementation)
    device = torch.device("cpu")
    forms = [layer.form for layer in hollow.layers]
    plan = Plan(hollow.layers, prove(hollow.layers, device), settle_budget(forms, config), device)
    with _block_file(forms, pack_dir) as file, disk_errors(file):
        with BlockWriter(file, forms) as writer:
            hollow.write_experts(writer)
            blocks = writer.finish()
        bind(hollow.model, plan, blocks)
    return hollow.model


@contextmanager
def _block_file(forms: Sequence[ExpertForm], pack_dir: Path | str | None) -> Iterator[Path]:
    """A name for a file that has none afterwards: what is open stays readable. A kill while it is written leaves it."""
    folder = cache_folder(EngineConfig()) / "attached" if pack_dir is None else Path(pack_dir)
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        check_room(folder / "experts.blocks", file_bytes(forms))
        descriptor, name = tempfile.mkstemp(prefix="experts-", suffix=".blocks", dir=folder)
    os.close(descriptor)
    try:
        yield Path(name)
    finally:
        os.unlink(name)
