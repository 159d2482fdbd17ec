"""Memory of freed tensors: given back to the system, or kept."""

import platform
import sys
from types import SimpleNamespace

import pytest
from helpers import forked

from medvl.common import process
from medvl.common.process import keep_freed_memory

SCRIPT = """
import torch
from pathlib import Path
from medvl.common.process import keep_freed_memory

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
    kept_mb = int(forked.run(command).stdout)
    assert kept_mb > 200 if keep else kept_mb < 100


@pytest.mark.skipif(sys.platform != "linux", reason="for glibc")
def test_the_heap_is_set_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later training in the process, beside whose threads `mallopt` is not safe, has the same
    settings.
    """
    calls = []
    library = SimpleNamespace(mallopt=lambda parameter, value: calls.append(parameter))
    monkeypatch.setattr(process.ctypes, "CDLL", lambda name: library)
    keep_freed_memory.cache_clear()
    for _ in range(2):
        keep_freed_memory()
    keep_freed_memory.cache_clear()  # the true heap is as it was
    assert len(calls) == len(set(calls)) == 2
