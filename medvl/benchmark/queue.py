"""Execution of a benchmark's runs on this machine: one or several at a time, on its cores or GPUs."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from medvl.benchmark.execute import THREADS, execute_run
from medvl.benchmark.plan import Plan
from medvl.benchmark.run import Run
from medvl.benchmark.settings import find_references
from medvl.benchmark.store import COST, FAILURE, Store
from medvl.common.files import open_own, write_atomic
from medvl.common.interrupts import interrupts_blocked, sigterm_deferred, sigterm_interrupts
from medvl.errors import ConfigError

Report = Callable[[str], Any]
"""Function that prints a line of progress."""
IN_USE = 75
"""Exit status of a run that another process executes (EX_TEMPFAIL)."""
_POLL = 0.2


def run_command_line(folder: Path) -> list[str]:
    """Return the command that executes the run of a folder."""
    return [sys.executable, "-m", "medvl", "benchmark", str(folder)]


def execute_locally(
    plan: Plan, store: Store, *, jobs: int = 1, gpus: Sequence[str] = (), report: Report = print
) -> None:
    """Execute the runs that are not finished and have not failed.

    Args:
        plan: the runs.
        store: the folder of results.
        jobs: processes at a time; 0 executes the runs in this process.
        gpus: GPUs of this machine; each process gets one, and `jobs` is their number.
        report: called with a line about each run.

    Ctrl-C and SIGTERM stop the processes after their step; the same call continues.
    """
    waiting = [run for run in plan.runs if store.state(run) == "to do"]
    total = len(waiting)
    if jobs == 0:
        for number, run in enumerate(waiting, 1):
            report(f"{number}/{total} {run.title}")
            if _is_ready(run, store):
                _execute_here(run, store, report)
            _report_end(run, store, report)
        return
    free = list(gpus) or [""] * jobs
    threads = max(1, (os.cpu_count() or 1) // len(free)) if len(free) > 1 else None
    running: dict[subprocess.Popen[bytes], tuple[Run, str]] = {}
    with _stopping(running):
        while waiting or running:
            for run in [run for run in waiting if free and _is_ready(run, store)][: len(free)]:
                waiting.remove(run)
                if store.state(run) == "to do":
                    report(f"{total - len(waiting)}/{total} {run.title}")
                    place = free.pop()
                    with interrupts_blocked(), sigterm_deferred():  # a process that has started will be stopped
                        running[_start(run, store, place, threads)] = run, place
            waiting = _without_failed(waiting, store, report)
            if not running and not any(_is_ready(run, store) for run in waiting):
                break  # they need runs that another process executes, or that were stopped
            ended = [process for process in running if process.poll() is not None]
            for process in ended:
                run, place = running.pop(process)
                free.append(place)
                if process.returncode == IN_USE:
                    report(f"  another process executes {run.title}")
                _record_end(run, store, process.returncode)
                _report_end(run, store, report)
            if not ended:
                time.sleep(_POLL)


def _execute_here(run: Run, store: Store, report: Report) -> None:
    try:
        execute_run(store.folder(run))
    except ConfigError as error:
        if error.code != "in_use":
            raise
        report(f"  {error}")


def _is_ready(run: Run, store: Store) -> bool:
    """Return whether the runs that a run needs are trained; it fails with one that it starts from.

    Where one failed that only proposes candidates, the run is trained without the evaluation that needs them.
    """
    starts = find_references(run.settings)
    for name, key in run.needs.items():
        folder = store.out / "runs" / key
        if (folder / COST).is_file():  # also where its evaluations failed
            continue
        if not (folder / FAILURE).is_file():
            return False
        if name in starts:
            write_atomic(store.folder(run) / FAILURE, json.dumps({"error": f"the run of {name} failed"}) + "\n")
            return False
    return True


def _without_failed(waiting: Sequence[Run], store: Store, report: Report) -> list[Run]:
    left = []
    for run in waiting:
        if store.state(run) == "to do":
            left.append(run)
        else:
            _report_end(run, store, report)
    return left


def _start(run: Run, store: Store, gpu: str, threads: int | None) -> "subprocess.Popen[bytes]":
    environment = dict(os.environ)
    if gpu:
        environment["CUDA_VISIBLE_DEVICES"] = gpu
    if threads is not None:
        environment[THREADS] = environment["OMP_NUM_THREADS"] = str(threads)  # the latter for commands
    # SIGINT is blocked: Ctrl-C in a terminal reaches the process above alone, which stops the others. A second signal
    # would end them at once.
    with open_own(store.folder(run) / "log.txt") as log:
        return subprocess.Popen(
            run_command_line(store.folder(run)), stdout=log, stderr=subprocess.STDOUT, env=environment
        )


def _record_end(run: Run, store: Store, status: int) -> None:
    """Record the failure of a process that could not record it itself; one that was told to stop has not failed."""
    if status not in (0, IN_USE, -signal.SIGTERM, -signal.SIGINT) and store.state(run) == "to do":
        log = (store.folder(run) / "log.txt").read_text(encoding="utf-8", errors="replace").strip().splitlines()
        last = (log or [""])[-1].removeprefix("medvl: ")
        killed = f"killed by {signal.Signals(-status).name}" if status < 0 else ""
        hint = " (SIGKILL may be for lack of memory)" if -status == signal.SIGKILL else ""
        reason = f"{killed}{hint}" or last or f"status {status}"
        write_atomic(store.folder(run) / FAILURE, json.dumps({"error": reason}) + "\n")


def _report_end(run: Run, store: Store, report: Report) -> None:
    failure = store.failure(run)
    if failure is not None:
        log = store.folder(run) / "log.txt"
        report(f"  failed: {run.title}: {failure}{f' (see {log})' if log.is_file() else ''}")


@contextlib.contextmanager
def _stopping(running: "dict[subprocess.Popen[bytes], tuple[Run, str]]") -> Iterator[None]:
    """Stop the processes at Ctrl-C or SIGTERM, or at an error, and wait for their checkpoints."""
    with sigterm_interrupts():
        try:
            yield
        finally:
            for process in running:
                process.terminate()
            for process in running:
                process.wait()
