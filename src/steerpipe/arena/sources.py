"""Where an arena's texts come from: trace folders, or a model and prompts that are traced on the fly."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel

from steerpipe.arena.apart import without_repeats
from steerpipe.core.errors import ConfigError, InputError
from steerpipe.predict.records import Geometry, TracedSequence, pack_traces
from steerpipe.predict.routers import Routers
from steerpipe.trace.live import TokenSequence, read_geometry, trace_texts
from steerpipe.trace.models import load_model
from steerpipe.trace.prompts import read_prompts
from steerpipe.trace.reader import TraceReader
from steerpipe.trace.split import split_prompts
from steerpipe.train.material import Material
from steerpipe.train.models import routers_of_model


@dataclass(frozen=True, slots=True)
class Split:
    """What is held out: a share of the prompts, by a hash of their ids and the seed."""

    held_out: float = 0.15
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Texts:
    name: str  # whose routing it is
    geometry: Geometry
    vocab: int
    train: Sequence[TracedSequence]
    test: Sequence[TracedSequence]
    repeats: int  # held-out sequences that were left out because the training texts have them too
    model: PreTrainedModel | None = None
    routers: Routers | None = None  # of the model
    folder: Path | None = None  # of the model

    def material(self, device: str = "cpu") -> Material:
        """What entries may learn from."""
        prompts = len({each.prompt for each in self.train})
        return Material(pack_traces(self.train, self.geometry, device), prompts, self.vocab, self.routers, self.model)


def read_traces(folder: Path, split: Split) -> Texts:
    """One folder, split by prompt."""
    reader = TraceReader(folder)
    train, test = split_prompts(reader.prompts, split.held_out, split.seed)
    return _texts(reader, list(reader.select(train)), list(reader.select(test)))


def read_both(train: Path, test: Path) -> Texts:
    """Two folders of one model: the arena refuses them if they share a prompt."""
    readers = TraceReader(train), TraceReader(test)
    first, second = (reader.header.model for reader in readers)
    if first.digest != second.digest:
        raise InputError(
            f"{train} is of {first.name} and {test} of {second.name} ({first.digest} and {second.digest})",
            fix="give two traces of the same model in the same formats",
        )
    lists = [list(reader) for reader in readers]
    reader = readers[0]
    return Texts(reader.header.model.name, reader.geometry, reader.vocabulary, lists[0], lists[1], repeats=0)


def _texts(reader: TraceReader, train: list[TracedSequence], test: list[TracedSequence]) -> Texts:
    kept = without_repeats(train, test)
    name, repeats = reader.header.model.name, len(test) - len(kept)
    return Texts(name, reader.geometry, reader.vocabulary, train, kept, repeats)


def trace_prompts(name: str | None, prompts: Path, split: Split, *, limit: int | None, device: str) -> Texts:
    """Traces the prompts with hidden states, on the fly: nothing is stored. `name` None is the embedded model."""
    loaded = load_model(name, device)
    listed = {prompt.id: prompt.encode(loaded.codec, raw=False) for prompt in read_prompts(prompts, limit)}
    named = split_prompts([prompt for prompt, tokens in listed.items() if tokens], split.held_out, split.seed)
    train, test = (
        list(
            trace_texts(
                loaded.model,
                [TokenSequence(prompt, listed[prompt], len(listed[prompt])) for prompt in side],
                states=True,
                max_tokens=loaded.context,
            )
        )
        for side in named
    )
    kept = without_repeats(train, test)
    geometry, vocab = read_geometry(loaded.model), int(loaded.model.config.get_text_config().vocab_size)
    return Texts(
        loaded.identity.name, geometry, vocab, train, kept, len(test) - len(kept), loaded.model,
        _routers(loaded.model), loaded.folder,
    )  # fmt: skip


def _routers(model: PreTrainedModel) -> Routers | None:
    """None: a family whose routers are not understood; what needs them says so."""
    try:
        return routers_of_model(model)
    except ConfigError:
        return None
