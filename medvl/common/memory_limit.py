"""Memory limit for processes that decode untrusted files."""

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path

WORKER_BYTES = 4 << 30
"""Limit of a conversion worker: ten times what the largest radiograph needs."""


def limit_memory(size: int) -> None:
    """Let this process allocate at most `size` more bytes than now; larger allocations raise MemoryError.

    A safeguard behind the decoders' own limits, so that one worker cannot exhaust the machine's memory. Linux only:
    other systems do not limit a process' own data.
    """
    status = Path("/proc/self/status")
    if not status.is_file():
        return
    (now,) = [int(line.split()[1]) << 10 for line in status.read_text().splitlines() if line.startswith("VmData:")]
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
