"""Ctrl-C and SIGTERM in commands with worker processes."""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker
from types import FrameType


@contextlib.contextmanager
def blocked(*numbers: signal.Signals) -> Iterator[None]:
    """Block signals in this thread within the block; those that arrive are delivered at its end."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, numbers)  # Python may raise KeyboardInterrupt once they are blocked
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Block SIGINT in this thread within the block, and permanently in processes started within it.

    A terminal sends Ctrl-C to all processes of a command. The main process stops the others, which must not end on
    their own, not even during their start.
    """
    with blocked(signal.SIGINT):
        yield


@contextlib.contextmanager
def signals_blocked() -> Iterator[None]:
    """Block SIGINT and SIGTERM in this thread within the block, and in processes started within it until they unblock.

    Such a process gets them once it has set its handlers, however early they were sent. Children of a fork server
    inherit from the server instead, which is started before.
    """
    default = multiprocessing.get_all_start_methods()[0]
    method = multiprocessing.get_start_method(allow_none=True) or default
    if method != "fork":
        resource_tracker.ensure_running()  # its start would unblock both
    if method == "forkserver":
        forkserver.ensure_running()
    with blocked(signal.SIGINT, signal.SIGTERM):
        yield


@contextlib.contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Make SIGTERM raise KeyboardInterrupt as Ctrl-C does, so that processes started within the block are stopped.

    Only in the main thread of a process; in others this does nothing.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def sigterm_deferred() -> Iterator[None]:
    """Deliver a SIGTERM that arrives within the block at its end, so that a process that it starts is known by then.

    Unlike a blocked signal, this is not inherited. Only in the main thread of a process; in others this does nothing.
    """
    arrived: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: arrived.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        if arrived:
            os.kill(os.getpid(), signal.SIGTERM)
