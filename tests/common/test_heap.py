"""Memory of freed tensors: given back to the system, or kept."""

import platform
import subprocess
import sys

import pytest

SCRIPT = """
import torch
from pathlib import Path
from medvl.common.heap import keep_freed_memory

def resident_mb():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20

if {keep}:
    keep_freed_memory()
before = resident_mb()
large = torch.ones(64 << 20)
del large
print(resident_mb() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
@pytest.mark.parametrize("keep", [False, True])
def test_freed_memory_is_kept(keep: bool) -> None:
    command = [sys.executable, "-c", SCRIPT.format(keep=keep)]
    kept_mb = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert kept_mb > 200 if keep else kept_mb < 100
