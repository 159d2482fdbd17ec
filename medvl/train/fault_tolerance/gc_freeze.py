"""Python's collector of cyclic garbage, kept from stalling steps."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def garbage_is_new() -> Iterator[None]:
    """Within this context the collector passes over all objects that there were at its start.

    A full collection looks at every object of the process, libraries and model included, whenever it likes: on each
    rank at another step, for which all the others wait. Of what a run makes itself there is little, so that the
    collector may go on; and worker processes, forked meanwhile, write to fewer of the pages that they share.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
