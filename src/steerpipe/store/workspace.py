"""The folder in which something grows: `OUT.partial`, locked by its journal, renamed to `OUT` when it is whole."""

import errno
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import Self

from steerpipe.core.errors import PackError
from steerpipe.store.files import publish
from steerpipe.store.journal import Journal

JOURNAL = "pack.journal"


class Workspace:
    """Made, or taken over from a run that was stopped; only files called `names` are expected in it.

    Left for the next run if it is stopped again; removed after a PackError: what lies there can never be good.
    """

    def __init__(self, out: Path, job: str, names: tuple[str, ...]) -> None:
        self.out = out
        self.folder = out.with_name(out.name + ".partial")
        self.folder.mkdir(parents=True, exist_ok=True)
        foreign = sorted(entry.name for entry in self.folder.iterdir() if entry.name not in (JOURNAL, *names))
        if foreign:
            raise PackError(
                f"{self.folder} is in the way: it holds {foreign[0]}, which is not of this job",
                fix="move that folder away, or choose another name",
            )
        self.journal = Journal(self.folder / JOURNAL, job)

    def finish(self) -> None:
        """The folder takes its name. The journal goes last: it is the lock."""
        try:
            publish(self.folder, self.out)
        except OSError as problem:
            if problem.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise
            raise PackError(
                f"{self.out} appeared while the pack was written", fix="remove it, then pack again"
            ) from None
        (self.out / JOURNAL).unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(problem, PackError):
            shutil.rmtree(self.folder, ignore_errors=True)
        self.journal.close()


def clear_journal(pack: Path) -> None:
    """A kill between the rename and the end leaves a journal in a good pack."""
    if (pack / JOURNAL).exists():
        os.unlink(pack / JOURNAL)
