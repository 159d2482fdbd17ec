"""Memory, signals and log lines of this process."""

import contextlib
import ctypes
import functools
import logging
import multiprocessing
import os
import re
import resource
import signal
import sys
import threading
from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from types import FrameType

# Ctrl-C and SIGTERM in commands with worker processes.


@contextlib.contextmanager
def blocked(*numbers: signal.Signals) -> Iterator[None]:
    """Block signals in this thread within the block; those that arrive are delivered at its end."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        # Python may raise KeyboardInterrupt once they are blocked
        signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Block SIGINT in this thread within the block, and permanently in processes started within it.

    A terminal sends Ctrl-C to all processes of a command. The main process stops the others, which
    must not end on their own, not even during their start.
    """
    with blocked(signal.SIGINT):
        yield


@contextlib.contextmanager
def signals_blocked() -> Iterator[None]:
    """Block SIGINT and SIGTERM in this thread within the block, and in processes started within it
    until they unblock.

    Such a process gets them once it has set its handlers, however early they were sent. Children of
    a fork server inherit from the server instead, which is started before.
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
    """Make SIGTERM raise KeyboardInterrupt as Ctrl-C does, so that processes started within the
    block are stopped.

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
    """Deliver a SIGTERM that arrives within the block at its end, so that a process that it starts
    is known by then.

    Unlike a blocked signal, this is not inherited. Only in the main thread of a process; in others
    this does nothing.
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


# Settings of the C library's heap.

_TRIM_THRESHOLD = -1
_MMAP_MAX = -4
"""Numbers of `mallopt`'s parameters in glibc's malloc.h."""


@functools.cache
def keep_freed_memory() -> None:
    """Let this process keep the memory that it frees, for its next tensors, until it ends. Later
    calls do nothing.

    glibc gives blocks of 32 MB and more back to the system when they are freed, and the system
    fills them with zeros page by page when they are needed again: up to a third of the time of a
    training on a CPU. Nothing happens with another C library. Call it before other threads start:
    glibc's documentation calls `mallopt` unsafe beside them.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_MMAP_MAX, 0)
        mallopt(_TRIM_THRESHOLD, -1)


# Peak memory of this process.

_STATUS = Path("/proc/self/status")


def reset_peak_memory() -> None:
    """Let the peaks of this process, and of its GPU, begin anew; on a CPU only where the kernel
    allows it (Linux).
    """
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()


def peak_resident_bytes() -> int:
    """Return the most resident memory that this process has had, since `reset_peak_memory` if that
    was called.

    On Linux from the kernel's status file: `ru_maxrss` of a new process begins at the peak of the
    one that started it.
    """
    if _STATUS.is_file() and (
        match := re.search(r"^VmHWM:\s*(\d+) kB", _STATUS.read_text(), re.MULTILINE)
    ):
        return int(match[1]) * 1024
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


# Memory limit for processes that decode untrusted files.

WORKER_BYTES = 4 << 30
"""Limit of a conversion worker: ten times what the largest radiograph needs."""


def limit_memory(size: int) -> None:
    """Let this process allocate at most `size` more bytes than now; larger allocations raise
    MemoryError.

    A safeguard behind the decoders' own limits, so that one worker cannot exhaust the machine's
    memory. Linux only: other systems do not limit a process' own data.
    """
    status = Path("/proc/self/status")
    if not status.is_file():
        return
    (now,) = [
        int(line.split()[1]) << 10
        for line in status.read_text().splitlines()
        if line.startswith("VmData:")
    ]
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limits = [limit for limit in (soft, hard, now + size) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min(limits), hard))


@contextlib.contextmanager
def memory_limited(size: int) -> Iterator[None]:
    """Apply `limit_memory` within a block, for a process that continues afterwards."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    limit_memory(size)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


# Log lines of medvl on stderr, above a progress bar where there is one.

LEVEL = "MEDVL_LOG_LEVEL"
"""Variable of the environment with the log level of recipes, such as WARNING."""


@contextlib.contextmanager
def console(active: bool, level: int | None = None) -> Iterator[None]:
    """Show medvl's log lines on stderr within the block, unless the caller has configured logging.

    Args:
        active: show them; False changes nothing, for the other ranks of a run.
        level: lowest level that is shown; None takes `MEDVL_LOG_LEVEL`, or INFO.
    """
    logger = logging.getLogger("medvl")
    if not active or logger.hasHandlers():
        yield
        return
    handler = _ConsoleHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
    before = logger.level
    logger.addHandler(handler)
    default = logging.getLevelNamesMapping().get(os.environ.get(LEVEL, ""), logging.INFO)
    logger.setLevel(default if level is None else level)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


class _ConsoleHandler(logging.Handler):
    """Handler that writes log lines above the progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        line = self.format(record)
        if "tqdm" in sys.modules:  # without it there is no bar, and its import takes a while
            from tqdm import tqdm

            tqdm.write(line, file=sys.stderr)
        else:
            sys.stderr.write(f"{line}\n")
