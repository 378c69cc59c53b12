"""Which experts the beginning of an answer uses: as answers began before, and as the prompt's tokens were routed.

L layers with experts, E experts, T tokens that were met often enough. No torch: a forecast is made per key.
"""

import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from steerpipe.core.errors import InputError
from steerpipe.predict.shipped import folders_for

NAME = "openings.npz"  # among a model's predictors
FIRST_TOKENS = 16  # of an answer: its beginning
PROMPT_SHARE = 0.3  # of the prompt's routing beside that of answers before; chosen on 32 prompts, 0.2 is as good


@dataclass(frozen=True)
class OpeningTable:
    """`answer` [L, E]: uses per token among the first 16 of an answer. `experts`, `rates` [T, L, K]: where each of
    `tokens` [T] is routed most often, and in which share of its occurrences (255: always).
    """

    answer: NDArray[np.float32]
    tokens: NDArray[np.int32]
    experts: NDArray[np.uint8] | NDArray[np.uint16]
    rates: NDArray[np.uint8]

    @cached_property
    def _rows(self) -> dict[int, int]:
        return {int(token): row for row, token in enumerate(self.tokens)}

    def routing_of(self, shares: Mapping[int, float]) -> NDArray[np.float32]:
        """[L, E]: uses to be expected of tokens that come so many times each; unknown tokens add nothing."""
        expected = np.zeros_like(self.answer)
        layers = np.arange(len(expected))[:, None]
        for token, share in shares.items():
            if (row := self._rows.get(token)) is not None:
                expected[layers, self.experts[row]] += share * self.rates[row] / np.float32(255)
        return expected

    def forecast(self, routed: NDArray[np.floating], tokens: float) -> NDArray[np.float32]:
        """[L, E]: uses per token of an answer's beginning, after a prompt of which `tokens` were `routed` so."""
        prompt = routed / tokens if tokens else routed
        return np.asarray((self.answer + PROMPT_SHARE * prompt) / (1 + PROMPT_SHARE), dtype=np.float32)

    @classmethod
    def unknown(cls, layers: int, experts: int) -> "OpeningTable":
        """Of a model that nobody has looked at: the prompt's own routing is all there is."""
        none = np.zeros((0, layers, 1), dtype=np.uint8)
        return cls(np.zeros((layers, experts), np.float32), np.zeros(0, np.int32), none, none)


def save_openings(file: Path, table: OpeningTable) -> None:
    answer = table.answer.astype(np.float16)
    np.savez_compressed(file, answer=answer, tokens=table.tokens, experts=table.experts, rates=table.rates)


def load_openings(file: Path) -> OpeningTable:
    """Raises InputError."""
    try:
        with np.load(BytesIO(file.read_bytes()), allow_pickle=False) as found:
            table = OpeningTable(found["answer"].astype(np.float32), found["tokens"], found["experts"], found["rates"])
        layers, experts = table.answer.shape
        if table.experts.shape != table.rates.shape or table.experts.shape[:2] != (len(table.tokens), layers):
            raise ValueError("its arrays do not fit together")
        if table.experts.size and table.experts.max() >= experts:
            raise ValueError("it names experts that there are not")
    except (OSError, ValueError, KeyError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise InputError(f"{file} is no table of openings: {error}", fix="make it again, or delete it") from error
    return table


def find_openings(pack: Path) -> OpeningTable | None:
    """Of the pack in that folder; None: nobody has made one."""
    files = (folder / NAME for folder in folders_for(pack))
    return next((load_openings(file) for file in files if file.is_file()), None)
