"""Trained predictors that come with a model: in the package for the embedded one, beside the pack for any other.

head-0 … head-3   trained heads, by horizon (0: pre-attention)
lookahead         router lookahead with default vectors and the exact shared expert
trajectory        a network of routing history, for a GPU
"""

from dataclasses import dataclass
from pathlib import Path

ASSETS = Path(__file__).parent.parent / "assets"
FOLDER = "predictors"  # beside a pack's files


@dataclass(frozen=True, slots=True)
class ShippedPredictors:
    """The files of one model's predictors, by name without suffix."""

    files: dict[str, Path]

    def heads(self) -> dict[int, Path]:
        """Trained heads by horizon."""
        return {int(name[5:]): file for name, file in self.files.items() if name[:5] == "head-" and name[5:].isdigit()}


def for_model(pack: Path) -> ShippedPredictors | None:
    """One of the pack's own replaces the package's of the same name. None: nobody has trained any."""
    files: dict[str, Path] = {}
    for folder in reversed(folders_for(pack)):
        files |= {file.stem: file for file in sorted(folder.glob("*.safetensors"))}
    return ShippedPredictors(files) if files else None


def folders_for(pack: Path) -> list[Path]:
    """Where things lie that were learnt about the pack in folder `pack`: its own folder `predictors`, and the package's
    if the pack is one that the package ships."""
    folders = [pack / FOLDER]
    if pack.resolve().parent == ASSETS:
        folders.append(ASSETS / FOLDER / pack.resolve().name)
    return folders
