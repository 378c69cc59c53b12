"""Material from what a person has: a trace folder, or a model and prompts. Held-out prompts never get in."""

import random
from pathlib import Path

from steerpipe.core.errors import InputError
from steerpipe.predict.records import pack_traces
from steerpipe.trace.live import TokenSequence
from steerpipe.trace.models import load_model
from steerpipe.trace.prompts import read_prompts
from steerpipe.trace.reader import TraceReader
from steerpipe.trace.split import split_prompts
from steerpipe.train.material import Material, collect, seen_in
from steerpipe.train.models import check_routers, routers_of_model
from steerpipe.train.progress import Progress, silent


def material_of_traces(folder: Path, *, held_out: float, seed: int, device: str) -> tuple[Material, str]:
    """(material, name of the model). States and weights where the trace has them; never the model's routers."""
    reader = TraceReader(folder)
    train, _ = split_prompts(reader.prompts, held_out, seed)
    selected = list(reader.select(train))
    packed = pack_traces(selected, reader.geometry, device)
    model = reader.header.model
    return Material(packed, len(train), reader.vocabulary, seen=seen_in(selected), digest=model.digest), model.name


def material_of_prompts(
    model: str | None, prompts: Path, *, held_out: float, seed: int, device: str, limit: int | None,
    progress: Progress = silent,
) -> tuple[Material, str]:  # fmt: skip
    """Traces the training prompts with hidden states, in memory. `model` None is the embedded one."""
    loaded = load_model(model, device)
    listed = {prompt.id: prompt.encode(loaded.codec, raw=False) for prompt in read_prompts(prompts, limit)}
    train, _ = split_prompts([prompt for prompt, tokens in listed.items() if len(tokens) > 1], held_out, seed)
    random.Random(seed).shuffle(train)
    sequences = [TokenSequence(prompt, listed[prompt], len(listed[prompt])) for prompt in train]
    if not sequences:
        raise InputError(f"{prompts} has no prompt of two tokens or more", fix="give longer prompts")
    packed = collect(loaded.model, sequences, max_tokens=loaded.context, progress=progress)
    routers = routers_of_model(loaded.model)
    check_routers(routers, packed)
    vocab = int(loaded.model.config.get_text_config().vocab_size)
    identity = loaded.identity
    made = Material(packed, len(train), vocab, routers, loaded.model, seen_in(sequences), identity.digest)
    return made, identity.name
