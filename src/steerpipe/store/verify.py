"""`steerpipe verify`: reads every byte of a pack and says whether it is what was written."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from steerpipe.core.errors import SteerpipeError
from steerpipe.store.files import digest
from steerpipe.store.progress import Progress, silent
from steerpipe.store.reader import Pack, open_pack


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What was checked, and what is wrong, JSON-able. No problems: every checksum agreed."""

    folder: str
    experts: int
    dense_tensors: int
    checked_bytes: int
    problems: tuple[str, ...]

    @property
    def good(self) -> bool:
        return not self.problems


def verify(folder: Path, progress: Progress | None = None) -> VerifyReport:
    """Reads the whole pack and names all that is damaged, not the first alone. PackError if it cannot be opened."""
    pack = open_pack(folder, compare_files=False)  # reported below, beside everything else
    total_bytes = sum(record.size_bytes for record in pack.manifest.files.values())
    report = progress or silent
    checked_bytes = 0
    problems: list[str] = []
    for size_bytes, problem in _findings(pack):
        checked_bytes += size_bytes
        report(checked_bytes, total_bytes)
        if problem:
            problems.append(problem)
    experts = sum(len(order) for order in pack.manifest.order.values())
    return VerifyReport(str(folder), experts, len(pack.manifest.dense_checksums), checked_bytes, tuple(problems))


def _findings(pack: Pack) -> Iterator[tuple[int, str]]:
    """(bytes looked at, what is wrong with them or nothing), in the order on disk."""
    for each in pack.manifest.classes:
        for layer, expert in pack.manifest.rows(each):
            yield each.layout.block_bytes, _attempt(pack.read_block, layer, expert)
    for name, entry in pack.dense_entries.items():
        yield entry.size_bytes, _attempt(pack.read_stored, name)
    for name, record in pack.manifest.files.items():
        if record.blake2b:
            changed = digest((pack.folder / name).read_bytes()) != record.blake2b
            yield record.size_bytes, f"{pack.folder / name} is not the file that was packed" if changed else ""


def _attempt(read: Callable[..., object], *where: object) -> str:
    try:
        read(*where)
    except SteerpipeError as problem:
        return problem.what
    return ""
