"""Exclusion of existing objects from Python's garbage collection, which would stall steps."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def freeze_existing_objects() -> Iterator[None]:
    """Freeze existing objects so that full collections skip them.

    A full collection visits every object of the process, libraries and model included, at another step on each rank,
    and all other ranks wait for it. The run itself creates few objects, so collection can stay enabled. Forked worker
    processes also write to fewer shared pages.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
