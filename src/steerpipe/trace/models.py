"""A model that transformers runs, from anything that names one: a checkpoint, a pack, a hub name."""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from steerpipe.core.errors import CheckpointError, TensorError
from steerpipe.engine.tokenizer import TextCodec
from steerpipe.model.checkpoint import read_entries, read_json, refuse_quantised
from steerpipe.runtime.models import find_model
from steerpipe.store.reader import Pack, is_pack, open_pack
from steerpipe.store.source import identify_weights
from steerpipe.store.unpack import unpack
from steerpipe.trace.header import ModelIdentity


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Ready to be traced: in evaluation mode, on its device."""

    model: PreTrainedModel
    codec: TextCodec
    identity: ModelIdentity
    folder: Path
    context: int  # most tokens of a sequence


def load_model(name: str | Path | None, device: str = "cpu", dtype: torch.dtype = torch.float32) -> LoadedModel:
    """None is the embedded model. A pack is unpacked into a temporary folder for the time of loading: float32 holds
    each of its weights exactly. Blocks; may fetch from the network."""
    folder = find_model(name)
    codec = TextCodec.load(folder)
    if is_pack(folder):
        identity = pack_identity(open_pack(folder))
        with tempfile.TemporaryDirectory(prefix="steerpipe-") as workspace:
            unpack(folder, Path(workspace) / folder.name)
            model = _read(Path(workspace) / folder.name, dtype)
    else:
        identity = ModelIdentity(folder.name, identify_weights(folder, read_entries(folder)))
        model = _read(folder, dtype)
    context = int(model.config.get_text_config().max_position_embeddings)
    model.eval()
    torch.nn.Module.to(model, device)  # transformers' own `to` has no types
    return LoadedModel(model, codec, identity, folder, context)


def pack_identity(pack: Pack) -> ModelIdentity:
    """Of the checkpoint and the formats that it was packed in: int4 routes differently from bf16."""
    manifest = pack.manifest
    digest = f"{manifest.source}-{manifest.expert_format.value}-{manifest.dense_format.value}"
    return ModelIdentity(pack.folder.name, digest)


def _read(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    refuse_quantised(read_json(folder / "config.json"), str(folder / "config.json"))
    loader: Any = AutoModelForCausalLM
    try:
        model, report = loader.from_pretrained(
            folder, dtype=dtype, local_files_only=True, trust_remote_code=False, output_loading_info=True
        )
    except (ValueError, KeyError) as problem:
        raise CheckpointError(
            f"transformers does not know this model: {str(problem).splitlines()[0]}", fix="use a newer transformers"
        ) from None
    wrong = [*sorted(report["missing_keys"]), *(str(key) for key, *_ in sorted(report["mismatched_keys"]))]
    if wrong:  # transformers fills them with random numbers, and says so in a log
        raise TensorError(
            f"{folder} has no weights of the right shape for {', '.join(wrong[:4])} ({len(wrong)} in all)",
            fix="config.json and the weights do not belong together, or files are missing: fetch the model again",
        )
    loaded: PreTrainedModel = model
    return loaded
