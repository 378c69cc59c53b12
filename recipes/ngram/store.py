"""Fitted levels → the file that `steerpipe.intake.ngram` loads."""

from io import BytesIO
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

import numpy as np
import numpy.typing as npt

from recipes.ngram.fit import Fitted
from steerpipe.intake.alphabet import Alphabet
from steerpipe.intake.ngram import STEPS, WEIGHT_ONE


def packed_model(alphabet: Alphabet, levels: list[Fitted]) -> bytes:
    """The file's bytes: compressed arrays. The same levels give the same bytes."""
    arrays: dict[str, npt.NDArray[np.generic]] = {
        "beyond": np.array([ord(character) for character in alphabet.beyond], np.uint32),
        "levels": np.array(len(levels), np.uint32),
    }
    for k, level in enumerate(levels):
        longer = levels[k + 1].parent if k + 1 < len(levels) else np.zeros(0, np.int32)
        children = np.bincount(longer, minlength=len(level.parent)).astype(np.uint8)
        arrays[f"characters_{k}"] = level.character
        arrays[f"probabilities_{k}"] = _as_bytes(level.probability, 0)
        arrays[f"children_{k}"] = children
        arrays[f"weights_{k}"] = _as_bytes(level.backoff[children > 0], WEIGHT_ONE)
    out = BytesIO()
    with ZipFile(out, "w") as file:
        for name, array in arrays.items():
            own = BytesIO()
            np.save(own, array, allow_pickle=False)
            file.writestr(ZipInfo(f"{name}.npy"), own.getvalue(), ZIP_DEFLATED, 9)  # numpy's level is 6
    return out.getvalue()


def _as_bytes(values: npt.NDArray[np.float64], one: int) -> npt.NDArray[np.uint8]:
    return np.clip(np.round(-np.log2(values) * STEPS) + one, 0, 255).astype(np.uint8)
