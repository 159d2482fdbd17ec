"""Settings of the C library's heap."""

import ctypes
import functools
import sys

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
"""Numbers of `mallopt`'s parameters in glibc's malloc.h."""


@functools.cache
def keep_freed_memory() -> None:
    """Let this process keep the memory that it frees, for its next tensors, until it ends. Later calls do nothing.

    glibc gives blocks of 32 MB and more back to the system when they are freed, and the system fills them with zeros
    page by page when they are needed again: up to a third of the time of a training on a CPU. Nothing happens with
    another C library. Call it before other threads start: glibc's documentation calls `mallopt` unsafe beside them.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_MMAP_MAX, 0)
        mallopt(_TRIM_THRESHOLD, -1)
