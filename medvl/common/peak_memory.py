"""Peak memory of this process."""

import re
import resource
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")


def peak_resident_bytes() -> int:
    """Return the most resident memory that this process has had.

    On Linux from the kernel's status file: `ru_maxrss` of a new process begins at the peak of the one that started it.
    """
    if _STATUS.is_file() and (found := re.search(r"^VmHWM:\s*(\d+) kB", _STATUS.read_text(), re.MULTILINE)):
        return int(found[1]) * 1024
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
