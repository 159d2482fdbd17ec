"""Ctrl-C in commands with worker processes."""

import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Block SIGINT in this thread, and for good in processes that it starts meanwhile.

    A terminal sends Ctrl-C to all processes of a command. The first one stops the others, which must not end by
    themselves, not even while they start.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
