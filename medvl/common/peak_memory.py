"""Peak memory of this process."""

import contextlib
import re
import resource
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")


def reset_peak_memory() -> None:
    """Let the peaks of this process, and of its GPU, begin anew; on a CPU only where the kernel allows it (Linux)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()


def peak_resident_bytes() -> int:
    """Return the most resident memory that this process has had, since `reset_peak_memory` if that was called.

    On Linux from the kernel's status file: `ru_maxrss` of a new process begins at the peak of the one that started it.
    """
    if _STATUS.is_file() and (found := re.search(r"^VmHWM:\s*(\d+) kB", _STATUS.read_text(), re.MULTILINE)):
        return int(found[1]) * 1024
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
