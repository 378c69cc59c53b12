"""From a model's name to something that can be read: spec, dense weights and experts."""

from pathlib import Path

from steerpipe.core.errors import InputError
from steerpipe.model.hub import locate
from steerpipe.store.cache import packed
from steerpipe.store.progress import Progress
from steerpipe.store.reader import Pack, is_pack, open_pack

EMBEDDED = Path(__file__).parent.parent / "assets" / "nano"


def open_model(model: str | Path | None, cache: Path, progress: Progress | None = None) -> Pack:
    """A pack, a checkpoint folder, a hub name, or the embedded model for None.

    A checkpoint is packed once into `cache`, without loss, and found there the next time. May fetch from the
    network and write `cache`; of the weights it reads only headers.
    """
    if model is None:
        return _open_embedded()
    folder = locate(str(model))
    return open_pack(folder if is_pack(folder) else packed(folder, cache, progress))


def _open_embedded() -> Pack:
    if not is_pack(EMBEDDED):
        raise InputError(
            "this installation has no embedded model", fix="name a model: a checkpoint folder, a pack, or a hub name"
        )
    return open_pack(EMBEDDED)
