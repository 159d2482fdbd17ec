"""Execution of a benchmark's runs on several machines that share its folder: Ray, or arrays of SLURM."""

import contextlib
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from medvl.benchmark.plan import Plan
from medvl.benchmark.queue import IN_USE, run_command_line
from medvl.benchmark.run import Run
from medvl.benchmark.store import Store
from medvl.common.files import open_own, write_atomic
from medvl.common.folders import subfolder
from medvl.errors import ConfigError

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
# Three minutes before the time limit the run saves a checkpoint, and the job is put back into the queue.
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
    """Write a job array for each wave of runs and a script that submits them; return their paths, the last one first.

    Args:
        plan: the runs.
        store: the folder of results, which all nodes mount.
        options: further options of sbatch, such as "--gpus=1 --time=08:00:00 --partition=gpu".
    """
    folder = store.out / "slurm"
    subfolder(folder, "logs")
    groups, submit, scripts = waves(plan, store), folder / "submit.sh", []
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
            runs="\n".join(f"    {shlex.quote(str(store.folder(run)))} # {run.title}" for run in group),
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
                titles[remote.remote(run_command_line(store.folder(run)), str(store.folder(run)))] = run
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
