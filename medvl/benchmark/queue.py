"""Execution of a benchmark's runs on this machine: one or several at a time, on its cores or
GPUs.
"""

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from medvl.benchmark.execute import THREADS, execute_run
from medvl.benchmark.settings import Plan, Run, find_references
from medvl.benchmark.store import COST, FAILURE, Store
from medvl.common.files import open_own, subfolder, write_atomic
from medvl.common.process import interrupts_blocked, sigterm_deferred, sigterm_interrupts
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
                    with (
                        interrupts_blocked(),
                        sigterm_deferred(),
                    ):  # a process that has started will be stopped
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

    Where one failed that only proposes candidates, the run is trained without the evaluation that
    needs them.
    """
    starts = find_references(run.settings)
    for name, key in run.needs.items():
        folder = store.out / "runs" / key
        if (folder / COST).is_file():  # also where its evaluations failed
            continue
        if not (folder / FAILURE).is_file():
            return False
        if name in starts:
            write_atomic(
                store.folder(run) / FAILURE,
                json.dumps({"error": f"the run of {name} failed"}) + "\n",
            )
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
        environment[THREADS] = environment["OMP_NUM_THREADS"] = str(
            threads
        )  # the latter for commands
    # SIGINT is blocked: Ctrl-C in a terminal reaches the process above alone, which stops the
    # others. A second signal would end them at once.
    with open_own(store.folder(run) / "log.txt") as log:
        return subprocess.Popen(
            run_command_line(store.folder(run)),
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
        )


def _record_end(run: Run, store: Store, status: int) -> None:
    """Record the failure of a process that ended before it could do so.

    A process that a signal stopped has not failed.
    """
    if status not in (0, IN_USE, -signal.SIGTERM, -signal.SIGINT) and store.state(run) == "to do":
        log = (
            (store.folder(run) / "log.txt")
            .read_text(encoding="utf-8", errors="replace")
            .strip()
            .splitlines()
        )
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


# Execution of a benchmark's runs on several machines that share its folder: Ray, or arrays of
# SLURM.

_SLURM = """#!/bin/bash
# {number} of {total}: {count} runs of the benchmark {name}. Submit all with: bash {submit}
#SBATCH --job-name={name}-{number}
#SBATCH --array=0-{last}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={logs}/%x-%a.log
#SBATCH --signal=B:TERM@180
{options}set -euo pipefail
RUNS=(
{runs}
)
# Three minutes before the time limit the run saves a checkpoint and the job is queued again.
stop() {{
    kill -TERM "$RUN"
    wait "$RUN" || true
    scontrol requeue "${{SLURM_ARRAY_JOB_ID}}_${{SLURM_ARRAY_TASK_ID}}"
    exit 0
}}
trap stop TERM
{python} -m medvl benchmark "${{RUNS[$SLURM_ARRAY_TASK_ID]}}" &
RUN=$!
wait "$RUN"
"""


def waves(plan: Plan, store: Store) -> list[list[Run]]:
    """Return the runs that are to do, in groups that need runs of earlier groups only."""
    left = [run for run in plan.runs if store.state(run) == "to do"]
    done = {run.key for run in plan.runs} - {run.key for run in left}
    groups = []
    while left:
        ready = [run for run in left if set(run.needs.values()) <= done]
        groups.append(ready)
        done |= {run.key for run in ready}
        left = [run for run in left if run.key not in done]
    return groups


def write_slurm(plan: Plan, store: Store, options: str = "") -> list[Path]:
    """Write a job array for each wave of runs and a script that submits them; return their paths,
    the last one first.

    Args:
        plan: the runs.
        store: the folder of results, which all nodes mount.
        options: further options of sbatch, such as "--gpus=1 --time=08:00:00 --partition=gpu".
    """
    folder = store.out / "slurm"
    subfolder(folder, "logs")
    groups = waves(plan, store)
    submit = folder / "submit.sh"
    scripts = []
    for number, group in enumerate(groups, 1):
        text = _SLURM.format(
            number=number,
            total=len(groups),
            count=len(group),
            name=re.sub(r"[^\w.-]+", "-", plan.config.name),  # one word of sbatch's options
            submit=submit,
            last=len(group) - 1,
            logs=shlex.quote(str(folder / "logs").replace("%", "%%")),
            options=f"#SBATCH {options}\n" if options else "",
            runs="\n".join(
                f"    {shlex.quote(str(store.folder(run)))} # {run.title}" for run in group
            ),
            python=shlex.quote(sys.executable),
        )
        scripts.append(write_atomic(folder / f"wave-{number}.sbatch", text))
    lines = ["#!/bin/bash", "set -euo pipefail", "JOB="]
    lines += [
        f"JOB=$(sbatch --parsable ${{JOB:+--dependency=afterany:$JOB}} {shlex.quote(str(script))})"
        for script in scripts
    ]
    return [write_atomic(submit, "\n".join([*lines, ""])), *scripts]


def execute_with_ray(
    plan: Plan,
    store: Store,
    *,
    gpus_per_run: float = 0.0,
    cpus_per_run: float = 1.0,
    report: Callable[[str], Any] = print,
) -> None:
    """Execute the runs on the nodes of a Ray cluster (RAY_ADDRESS), or on this machine without one.

    Raises ConfigError where Ray is missing.
    """
    try:
        import ray
    except ImportError:
        message = "the engine ray needs the package ray: pip install 'medvl[ray]'"
        raise ConfigError(message, "missing", field="engine") from None
    with contextlib.ExitStack() as stack:
        if not ray.is_initialized():
            ray.init(log_to_driver=False)
            stack.callback(ray.shutdown)
        remote = ray.remote(num_cpus=cpus_per_run, num_gpus=gpus_per_run, max_retries=3)(_execute)
        for group in waves(plan, store):
            titles = {}
            for run in group:
                report(run.title)
                titles[
                    remote.remote(run_command_line(store.folder(run)), str(store.folder(run)))
                ] = run
            left = list(titles)
            while left:
                [ended], left = ray.wait(left)
                status = ray.get(ended)
                run = titles[ended]
                if status not in (0, IN_USE) and store.state(run) == "to do":
                    path = store.folder(run) / "failure.json"
                    write_atomic(path, json.dumps({"error": f"ended with status {status}"}) + "\n")
                if (failure := store.failure(run)) is not None:
                    report(f"  failed: {run.title}: {failure}")


def _execute(command: list[str], folder: str) -> int:
    """Execute a run on the node of a Ray cluster, and return its status."""
    with open_own(Path(folder) / "log.txt") as log:
        return subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
