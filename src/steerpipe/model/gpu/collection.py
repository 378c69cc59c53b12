"""Python's garbage collector, where the device waits for the host or a graph is captured."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collection() -> Iterator[None]:
    """A source that is collected waits for the device: never while the device waits for us, nor inside a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
