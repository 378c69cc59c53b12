"""The folder in which a pack grows: `OUT.partial`, locked by its journal, renamed to `OUT` when it is whole."""

import errno
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import Self

from steerpipe.core.errors import PackError
from steerpipe.store.files import publish
from steerpipe.store.journal import Journal
from steerpipe.store.manifest import DENSE, EXPERTS, MANIFEST

JOURNAL = "pack.journal"


class Workspace:
    """Made or taken over at start; given up, and left for the next run to continue, unless `finish` is reached."""

    def __init__(self, out: Path, job: str, copies: tuple[str, ...]) -> None:
        self.out = out
        self.folder = out.with_name(out.name + ".partial")
        ours = {JOURNAL, EXPERTS, DENSE, MANIFEST, *copies}
        self.folder.mkdir(parents=True, exist_ok=True)
        foreign = sorted(entry.name for entry in self.folder.iterdir() if entry.name not in ours)
        if foreign:
            raise PackError(
                f"{self.folder} is not an unfinished pack: it holds {foreign[0]}",
                fix="move it away, or choose another name",
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

    def discard(self) -> None:
        """Removes everything: what lies here can never become a good pack."""
        shutil.rmtree(self.folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.journal.close()


def clear_journal(pack: Path) -> None:
    """A kill between the rename and the end leaves a journal in a good pack."""
    if (pack / JOURNAL).exists():
        os.unlink(pack / JOURNAL)
