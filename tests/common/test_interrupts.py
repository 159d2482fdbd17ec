"""Processes that stop what they have started."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from medvl.common.process import sigterm_deferred, sigterm_interrupts

PROGRAM = """
import subprocess, sys
from medvl.common.process import sigterm_interrupts
child = "import os, pathlib, time; pathlib.Path('pid').write_text(str(os.getpid())); time.sleep(60)"
with sigterm_interrupts():
    subprocess.run([sys.executable, "-c", child])
"""


def test_sigterm_stops_the_process_that_is_waited_for(tmp_path: Path) -> None:
    started = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    end = time.monotonic() + 30
    while not (tmp_path / "pid").is_file() or not (tmp_path / "pid").read_text():
        assert time.monotonic() < end
        time.sleep(0.02)
    started.terminate()
    _, errors = started.communicate(timeout=30)
    assert "KeyboardInterrupt" in errors
    while not _has_ended((tmp_path / "pid").read_text()):
        assert time.monotonic() < end + 30
        time.sleep(0.02)


def _has_ended(process: str) -> bool:
    """Return whether a process is gone or a zombie: a kill takes a moment on a busy machine, and
    so does the reaping.
    """
    try:
        return Path("/proc", process, "stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_the_handler_is_that_of_before_and_other_threads_change_none() -> None:
    before, seen = signal.getsignal(signal.SIGTERM), []

    def elsewhere() -> None:
        with sigterm_interrupts():
            seen.append(signal.getsignal(signal.SIGTERM))

    with sigterm_interrupts():
        assert signal.getsignal(signal.SIGTERM) is not before
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)
        except KeyboardInterrupt:
            seen.append(KeyboardInterrupt)
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [KeyboardInterrupt, before]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_deferred_sigterm_comes_after_the_block() -> None:
    seen = []
    with sigterm_interrupts():
        try:
            with sigterm_deferred():
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.01)
                seen.append("block")
            time.sleep(1)
        except KeyboardInterrupt:
            seen.append("interrupt")
    assert seen == ["block", "interrupt"]


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_process_that_is_started_with_blocked_signals_gets_them_later(method: Any) -> None:
    """The start of Python's resource tracker, which others than a fork need, unblocks both
    signals.
    """
    program = PROGRAM_BLOCKED.format(method=method)
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


PROGRAM_BLOCKED = """
import multiprocessing, signal
multiprocessing.set_start_method("{method}")
from medvl.common.process import signals_blocked
with signals_blocked():
    multiprocessing.Queue()  # has locks, which start the resource tracker
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert blocked >= {{signal.SIGTERM, signal.SIGINT}}, blocked
assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())
"""
