"""Execution of one run: training or its continuation, cost, and the evaluations that are missing.

The runs of a benchmark are executed one or several at a time, on this machine's cores or GPUs.
"""

import contextlib
import dataclasses
import functools
import json
import os
import re
import resource
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from medvl.benchmark.ranks import write_resamples
from medvl.benchmark.settings import (
    RUN,
    Entry,
    Plan,
    Run,
    find_references,
    recipe_module,
    with_settings,
)
from medvl.benchmark.store import (
    COST,
    FAILURE,
    REFUSAL,
    SECONDS,
    Store,
    Weights,
    is_evaluated,
    read_records,
    read_run,
)
from medvl.benchmark.tasks import (
    evaluate_trial,
    evaluation_tasks,
    free_memory,
    run_command,
    tested_folder,
)
from medvl.common.files import RunLock, open_own, subfolder, write_atomic
from medvl.common.process import (
    interrupts_blocked,
    peak_resident_bytes,
    reset_peak_memory,
    sigterm_deferred,
    sigterm_interrupts,
)
from medvl.data import ShardSource, UnpairedSource
from medvl.errors import ConfigError, MedvlError
from medvl.eval.core.results import Results, write_results
from medvl.models import save

THREADS = "MEDVL_BENCHMARK_THREADS"
"""Variable of the environment: CPU threads of a run that shares the machine with others."""
_START = "start-weights"


def execute_run(folder: Path) -> bool:
    """Train the run of a folder (DIR/runs/KEY), or continue it, and evaluate what is missing.

    What fails is written into the folder. Returns False where the training failed. Raises
    ConfigError where the folder has no run, and, with the code "in_use", where another process
    executes it or a run that it needs is to do.
    """
    run = read_run(folder)
    store = Store(folder.absolute().parent.parent)
    _check_needs(run, store)
    with RunLock(folder, error=ConfigError, field="run"):
        try:
            _train(run, store)
        except Exception as error:  # a system of another package may raise anything
            traceback.print_exc()
            _write(folder / FAILURE, {"error": _reason(error)})
            return False
        for weights, task, results in store.evaluations(run):
            if not is_evaluated(results):
                _evaluate(run, store, weights, task, results)
    return True


def _check_needs(run: Run, store: Store) -> None:
    for name, key in run.needs.items():
        folder = store.out / "runs" / key
        if not (folder / COST).is_file() and not (folder / FAILURE).is_file():
            message = (
                f"the run of {name}, which this one needs, is not trained yet: execute "
                f"{folder} first"
            )
            raise ConfigError(message, "in_use", field="needs")


def checkpoint_of(run: Run, store: Store) -> Path:
    """Return the checkpoint of a trained run that is evaluated."""
    return store.folder(run) / "run" / run.budget.weights


def settings_of(run: Run, store: Store, run_dir: Path | None = None) -> Any:
    """Return the settings of a run's recipe on this machine; by default it is trained in the
    run's own folder.
    """
    entry = Entry(
        name=run.name, system=run.system, family=run.family, recipe=Path(run.recipe),
        preset=run.preset
    )  # fmt: skip
    corpus = run.corpus
    tree = located(run, store, run.settings)
    data: dict[str, Any] = {
        "train": run.train_shards,
        "tokenizer": run.tokenizer,
        "workers": run.budget.workers,
    }
    data["extra_train"] = () if run.family == "report" else corpus.extra_train
    if tree["data"].get("valid") is not None:
        data["valid"] = str(Path(run.train_shards).parent / "validate")
    train: dict[str, Any] = {"run_dir": str(run_dir or store.folder(run) / "run")}
    train["checkpoint_every"] = run.budget.checkpoint_every
    if THREADS in os.environ:
        train["num_threads"] = int(os.environ[THREADS])
    tree = {**tree, "data": tree["data"] | data, "train": tree["train"] | train}
    return with_settings(entry.recipe_settings(), tree, run.name)


def prepare_run(run: Run, store: Store, run_dir: Path | None = None) -> Any:
    """Return the prepared training of a run, by default in the run's own folder.

    Where a share of the pairs is smaller than a batch, as 1 % of a small corpus may be, a batch has
    all of them.
    """
    settings = settings_of(run, store, run_dir)
    if settings.data.paired_fraction < 1:
        batch = min(settings.train.micro_batch, _samples(run, settings)) * settings.train.accumulate
        settings = dataclasses.replace(
            settings, train=dataclasses.replace(settings.train, global_batch=batch)
        )
    return recipe_module(Path(run.recipe)).prepare(settings)


def _samples(run: Run, settings: Any) -> int:
    """Return the number of training samples: pairs, or studies where a sample has several images
    of one.
    """
    data = settings.data
    source = UnpairedSource(ShardSource(data.train), data.paired_fraction, data.seed, data.others)
    if run.family == "report" or getattr(settings.model, "views", None) == "study":
        return len({source.sample(position).study for position in range(len(source))})
    return len(source) + sum(len(ShardSource(folder)) for folder in data.extra_train)


def located(run: Run, store: Store, value: Any) -> Any:
    """Return settings with the checkpoints of other runs and the corpus's root in place of their
    names.
    """
    if isinstance(value, Mapping):
        return {name: located(run, store, item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [located(run, store, item) for item in value]
    if isinstance(value, str) and value.startswith(RUN):
        return str(_other(run, store, value.removeprefix(RUN)))
    return value.replace("{root}", str(run.corpus.root)) if isinstance(value, str) else value


def _other(run: Run, store: Store, name: str) -> Path:
    """Return the checkpoint of a run that this one needs. Raises ConfigError where its training
    failed.
    """
    folder = store.out / "runs" / run.needs[name]
    if not (folder / COST).is_file():
        raise ConfigError(
            f"the run of {name}, which this one needs, failed", "not_found", field="needs"
        )
    return folder / "run" / run.budget.weights


def _train(run: Run, store: Store) -> None:
    folder = store.folder(run)
    if run.evaluation.random_start and not (folder / _START).is_dir():
        _save_start(run, store)
    if (folder / COST).is_file():
        return
    resumed = (folder / "run" / "metrics.jsonl").is_file()
    training = prepare_run(run, store)
    parameters = sum(parameter.numel() for parameter in training.model.parameters())
    reset_peak_memory()
    began = time.monotonic()
    used = _cpu_seconds()
    training.train()
    del training
    free_memory()  # the loader's workers end, whose time is counted then
    spent = {"wall_seconds": time.monotonic() - began, "cpu_seconds": _cpu_seconds() - used}
    cost = {"parameters": parameters, "resumed": resumed, **spent, **_measured(folder / "run")}
    _write(folder / COST, cost)
    shutil.rmtree(folder / "run" / "tensorboard", ignore_errors=True)


def _save_start(run: Run, store: Store) -> None:
    """Save the weights before the training, also of a run that is trained. Its checkpoints are
    not read.
    """
    folder = store.folder(run)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        training = prepare_run(run, store, Path(scratch) / "run")
        start = Path(scratch) / _START
        start.mkdir()
        save(training.model, start)
        start.rename(folder / _START)


def _cpu_seconds() -> float:
    """Return the processor time of this process and of its finished children."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def _measured(run_dir: Path) -> dict[str, Any]:
    """Return speed, memory and device of a finished training, from its records."""
    records = read_records(run_dir)
    timings = [record["timing"] for record in records if record["kind"] == "train"]
    rates = [timing["pairs_per_second"] for timing in timings]
    seconds = [timing["seconds_per_step"] for timing in timings if "seconds_per_step" in timing]
    on_gpu = [timing["peak_memory_gb"] for timing in timings if "peak_memory_gb" in timing]
    steps = max((record["step"] for record in records if record["kind"] == "train"), default=0)
    return {
        "steps": steps,
        "pairs_per_second": statistics.median(rates) if rates else None,
        "train_seconds": statistics.median(seconds) * steps if seconds else None,
        "peak_memory_gb": max(on_gpu, default=peak_resident_bytes() / 2**30),
        "device": torch.cuda.get_device_name() if on_gpu else "CPU",
        "terms": sorted(
            {name[5:] for record in records for name in record if name.startswith("loss/")}
        ),
    }


def _evaluate(run: Run, store: Store, weights: Weights, task: str, folder: Path) -> None:
    """Write the results of an evaluation, or the reason why there are none."""
    folder.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    origin = checkpoint_of(run, store)
    free_memory()  # of the evaluation before it
    try:
        checkpoint = origin if weights == "trained" else store.folder(run) / _START
        if task in evaluation_tasks():
            result = evaluate_trial(
                run,
                task,
                checkpoint=checkpoint,
                origin=origin,
                folder=folder,
                other=functools.partial(_other, run, store),
            )
            results = _with_manifest(result.results, run, task)
            write_results(results, folder, result.predictions(), replace=True)
        else:
            run_command(run, checkpoint, task, folder)
        write_resamples(folder, run.evaluation.resamples)
    except MedvlError as error:
        _write(folder / REFUSAL, {"reason": _reason(error), "failed": error.code != "unsupported"})
    except Exception as error:  # evaluations of a system of another package may raise anything
        traceback.print_exc()
        _write(folder / REFUSAL, {"reason": _reason(error), "failed": True})
    else:
        _write(folder / SECONDS, time.monotonic() - started)
    # an interruption keeps them, to go on from them
    shutil.rmtree(folder / "run" / "checkpoints", ignore_errors=True)


def _with_manifest(results: Results, run: Run, task: str) -> Results:
    """Return results with the hash of the shards, also those that name the questions alone."""
    data = tested_folder(run, task)
    if data is None or "questions" not in results.inputs:
        return results
    inputs = {**results.inputs, "manifest": ShardSource(data).fingerprint}
    return dataclasses.replace(results, inputs=inputs)


def _reason(error: Exception) -> str:
    """Return the first line of an error, with its type unless it is one of medvl's."""
    text = (str(error).strip().splitlines() or [""])[0]
    return text if isinstance(error, MedvlError) else f"{type(error).__name__}: {text}"


def _write(path: Path, value: Any) -> None:
    write_atomic(path, json.dumps(value) + "\n")


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
                    # a process that has started will be stopped
                    with interrupts_blocked(), sigterm_deferred():
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
        # OMP_NUM_THREADS is for the commands that the run starts
        environment[THREADS] = environment["OMP_NUM_THREADS"] = str(threads)
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
