"""Execution of one run: training or its continuation, cost, and the evaluations that are
missing.
"""

import dataclasses
import functools
import json
import os
import resource
import shutil
import statistics
import tempfile
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from medvl.benchmark.ranks import write_resamples
from medvl.benchmark.settings import RUN, Entry, Run, recipe_module, with_settings
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
from medvl.common.files import RunLock, write_atomic
from medvl.common.process import peak_resident_bytes, reset_peak_memory
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
    shutil.rmtree(
        folder / "run" / "checkpoints", ignore_errors=True
    )  # an interruption keeps them, to go on from them


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
