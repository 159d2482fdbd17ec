"""A cap on the memory of a process that decodes what strangers have written."""

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path

WORKER_BYTES = 4 << 30
"""Of a process that converts images: ten times what the largest radiograph takes."""


def cap_memory(size: int) -> None:
    """Let this process allocate `size` bytes more than it has now; what asks for more gets a MemoryError.

    A second line of defence behind the decoders' own limits: a worker that grows without end would take the machine,
    and with it every other one. Only where the system can count a process' own data (Linux).
    """
    status = Path("/proc/self/status")
    if not status.is_file():
        return
    (now,) = [int(line.split()[1]) << 10 for line in status.read_text().splitlines() if line.startswith("VmData:")]
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limits = [limit for limit in (soft, hard, now + size) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min(limits), hard))


@contextlib.contextmanager
def capped_memory(size: int) -> Iterator[None]:
    """`cap_memory` for as long as a block runs: for a process that does the work of a worker and then goes on."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    cap_memory(size)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
