"""How long work tells how far it is."""

from collections.abc import Callable

Progress = Callable[[int, int], None]  # (bytes done, bytes in all); called on the working thread, must not block


def silent(done_bytes: int, total_bytes: int) -> None:
    """The progress of someone who does not want to know."""
