"""Tasks of a benchmark: those of the evaluations, and commands of medvl; the systems and corpora
that they fit, and their columns.
"""

import dataclasses
import gc
import itertools
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from medvl.benchmark.config import BenchmarkConfig, CorpusConfig, Family
from medvl.benchmark.settings import Run, recipe_module, with_settings
from medvl.common.process import sigterm_interrupts
from medvl.errors import ERROR_CODES, EvaluationError
from medvl.eval.core.open import RunOptions, Setup
from medvl.eval.evaluation import Column, Evaluation, Task, Trial
from medvl.eval.registry import EVALUATIONS
from medvl.models import VisualBERT, system
from medvl.train.recipe_files import find_recipe

# Tasks that are commands of medvl: their arguments for a run, and their execution.


def question_size(run: Run) -> int:
    """Return the side of the images on which a run is fine-tuned for questions, in pixels.

    It is that of the recipe for questions, or of the pretraining where a system reads images of one
    size.
    """
    cls = system(run.system)
    model = run.settings["model"]
    if getattr(cls, "numbers_cells", False) or (
        issubclass(cls, VisualBERT) and model["image_positions"]
    ):
        return int(model["image_size"])
    presets = recipe_module(find_recipe("vqa_finetune")).PRESETS
    return int(presets[run.preset if run.preset in presets else "tiny"].data.image.size)


def command_arguments(
    run: Run, name: str, *, checkpoint: Path = Path(), out: Path = Path()
) -> list[str]:
    """Return the arguments of a command. Raises EvaluationError where the corpus lacks what it
    reads.
    """
    [task] = [command for command in run.commands if command.name == name]
    fields = {
        field.name: getattr(run.corpus, field.name) for field in dataclasses.fields(run.corpus)
    }
    values = {name: value for name, value in fields.items() if isinstance(value, str)}
    values |= {
        "checkpoint": str(checkpoint),
        "out": str(out),
        "resamples": str(run.evaluation.resamples),
    }
    values["question_size"] = str(question_size(run))
    try:
        return [part.format(**values) for part in shlex.split(task.command)]
    except (KeyError, IndexError) as error:
        message = f"corpus {run.corpus.name} has no {error} for the task {name}"
        raise EvaluationError(message, "unsupported", field=name) from None


def run_command(run: Run, checkpoint: Path, name: str, out: Path) -> None:
    """Run the command of a `CommandTask`, which writes results.json into `out`; on a CPU where the
    training was set to.

    Raises EvaluationError with the last line of its errors where it fails or writes none.
    """
    arguments = command_arguments(run, name, checkpoint=checkpoint, out=out)
    environment = os.environ | {ERROR_CODES: "1"}
    if run.settings["train"]["device"] == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    for is_end, part in itertools.groupby(arguments, lambda argument: argument == "&&"):
        if is_end:
            continue
        command = [sys.executable, "-m", "medvl", *part]
        with sigterm_interrupts():  # which stops the command
            ended = subprocess.run(
                command, capture_output=True, text=True, env=environment, check=False
            )
        if ended.returncode:
            break
    if ended.returncode or not (out / "results.json").is_file():
        last = (ended.stderr.strip().splitlines() or [f"status {ended.returncode}"])[-1]
        text, _, code = last.removeprefix("medvl: ").removesuffix("]").rpartition(" [")
        raise EvaluationError(f"{name}: {text or last}", code if text else "missing", field=name)


# Tasks that are evaluations of medvl or of another package.


def evaluation_tasks() -> dict[str, tuple[type[Evaluation], Task]]:
    """Return the tasks of all evaluations by name."""
    return {
        task.name or cls.name: (cls, task) for cls in EVALUATIONS.classes() for task in cls.tasks
    }


def evaluate_trial(
    run: Run,
    name: str,
    *,
    checkpoint: Path,
    origin: Path,
    folder: Path,
    other: Callable[[str], Path],
) -> Any:
    """Evaluate a checkpoint on a task, and return the result: `results` and `predictions()`.

    Args:
        run: the run in the benchmark.
        name: name of the task.
        checkpoint: the evaluated checkpoint.
        origin: checkpoint of the training, whose patients are not evaluated.
        folder: folder for what the evaluation trains itself.
        other: function that returns the checkpoint of another system, by name.

    Raises EvaluationError "unsupported" where the system does not support the task.
    """
    cls, task = evaluation_tasks()[name]
    settings = run.evaluation
    options = RunOptions(
        resamples=settings.resamples,
        batch=settings.batch,
        workers=settings.workers,
        device=run.settings["train"]["device"],
    )
    setup = Setup(options, trained=[origin])
    data = tested_folder(run, name)
    assert data is not None, f"the corpus has no {task.data}"
    trial = Trial(
        system=system(run.system),
        checkpoint=checkpoint,
        origin=origin,
        data=data,
        prompts=run.corpus.prompts,
        sections=tuple(run.settings["data"].get("text", {}).get("sections") or ()),
        settings=settings,
        model=lambda: setup.model(checkpoint),
        other=other,
        finetuned=lambda: _finetune_for_questions(run, checkpoint, folder / "run"),
    )
    return cls.for_trial(task, trial).run(setup).result


def _finetune_for_questions(run: Run, checkpoint: Path, run_dir: Path) -> Path:
    """Fine-tune a checkpoint with the recipe for questions, and return the new one."""
    corpus = run.corpus
    budget = run.budget
    assert corpus.questions is not None
    home = Path(corpus.questions)
    recipe = recipe_module(find_recipe("vqa_finetune"))
    preset = recipe.PRESETS[run.preset if run.preset in recipe.PRESETS else "tiny"]
    data: dict[str, Any] = {
        "train": home / "train",
        "valid": corpus.questions_valid,
        "valid_split": Path(corpus.questions_valid or "").name,
        "workers": budget.workers,
    }
    data["image"] = {"size": question_size(run)}
    train: dict[str, Any] = {
        "run_dir": run_dir,
        "keep_last": 1,
        "tensorboard": False,
        "seed": run.seed,
    }
    train |= {name: run.settings["train"][name] for name in ("packed_text", "device")}
    if budget.weights == "last":
        train |= {"best_metric": "loss", "best_mode": "min"}
    optim: dict[str, Any] = {}
    steps = budget.finetune_steps or (None if budget.steps is None else max(1, budget.steps // 4))
    if steps is not None:
        schedule = preset.optim.schedule
        optim["schedule"] = dataclasses.replace(
            schedule, warmup_steps=min(schedule.warmup_steps, 100, steps // 4)
        )
        train |= {"epochs": None, "steps": steps, "scale_below": None}
        if budget.weights == "last":
            train["validate_every"] = steps
    if budget.batch is not None:
        train["global_batch"] = budget.batch
    tree = {"init_from": checkpoint, "data": data, "train": train, "optim": optim}
    recipe.prepare(with_settings(preset, tree, "questions")).train()
    free_memory()
    return run_dir / budget.weights


def free_memory() -> None:
    """Give back the memory of what is not used any more, that of a GPU to its other processes."""
    gc.collect()
    torch.cuda.empty_cache()


def fitting_tasks(
    config: BenchmarkConfig, name: str, family: Family, corpus: CorpusConfig
) -> tuple[str, ...]:
    """Return the tasks of a benchmark that fit a system and a corpus; a system may still not
    support one.
    """
    cls = system(name)
    fitting = [
        name
        for name, (_, task) in evaluation_tasks().items()
        if issubclass(cls, task.fits)
        and all(getattr(corpus, need) is not None for need in task.needs)
    ]
    fitting += [
        command.name
        for command in config.commands
        if family in command.families and corpus.name in (command.corpora or (corpus.name,))
    ]
    return tuple(name for name in fitting if "all" in config.tasks or name in config.tasks)


def columns_of(config: BenchmarkConfig) -> dict[str, tuple[Column, ...]]:
    """Return task -> columns, of the tasks of a benchmark."""
    columns = {
        name: cls.columns(task, config.evaluation)
        for name, (cls, task) in evaluation_tasks().items()
    }
    columns |= {command.name: command.columns for command in config.commands}
    columns |= {name: (*columns[name], *further) for name, further in config.columns.items()}
    return {
        name: of_task
        for name, of_task in columns.items()
        if "all" in config.tasks or name in config.tasks
    }


def tested_folder(run: Run, name: str) -> Path | None:
    """Return the shards that an evaluation is made on; None where a command names none, or the
    corpus has none.
    """
    tasks = evaluation_tasks()
    if name not in tasks:
        try:
            arguments = command_arguments(run, name)
        except EvaluationError:
            return None
        folders = [
            value
            for option, value in itertools.pairwise(arguments)
            if option in ("--data", "--test")
        ]
        return Path(folders[-1]) if folders else None
    corpus = run.corpus
    part = tasks[name][1].data
    if part in ("phrases", "changes"):
        return Path(getattr(corpus, part) or "")
    if part == "reports":
        return Path(run.train_shards).parent / "test"
    return Path(getattr(corpus, part) or "") / "test"
