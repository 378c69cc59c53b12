"""From a model's name to something that can be read: spec, dense weights and experts."""

from pathlib import Path

from steerpipe.core.errors import InputError
from steerpipe.model.hub import locate
from steerpipe.store.cache import packed
from steerpipe.store.progress import Progress
from steerpipe.store.reader import Pack, is_pack, open_pack

EMBEDDED = Path(__file__).parent.parent / "assets" / "nano"


def find_model(model: str | Path | None) -> Path:
    """The folder of a pack, a checkpoint or a hub name; the embedded model's for None. May fetch from the network."""
    if model is not None:
        return locate(str(model))
    if not is_pack(EMBEDDED):
        raise InputError(
            "no model was named, and this installation has no embedded one",
            fix="name a model: a checkpoint folder, a pack, or a hub name such as owner/model",
        )
    return EMBEDDED


def open_model(folder: Path, cache: Path, progress: Progress | None = None) -> Pack:
    """The pack in `folder`, or the pack of the checkpoint there: made once, without loss, and kept in `cache`."""
    return open_pack(packed(folder, cache, progress))
