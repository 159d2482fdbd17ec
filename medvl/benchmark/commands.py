"""Tasks that are commands of medvl: their arguments for a run, and their execution."""

import dataclasses
import itertools
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from medvl.benchmark.run import Run
from medvl.benchmark.systems import recipe_module
from medvl.common.interrupts import sigterm_interrupts
from medvl.errors import ERROR_CODES, EvaluationError
from medvl.models import VisualBERT, system
from medvl.train.recipe_files import find_recipe

if TYPE_CHECKING:
    from medvl.benchmark.tasks import Trained


def question_size(run: Run) -> int:
    """Return the side of the images on which a run is fine-tuned for questions, in pixels.

    It is that of the recipe for questions, or of the pretraining where a system reads images of one size.
    """
    cls, model = system(run.system), run.settings["model"]
    if getattr(cls, "numbers_cells", False) or (issubclass(cls, VisualBERT) and model["image_positions"]):
        return int(model["image_size"])
    presets = recipe_module(find_recipe("vqa_finetune")).PRESETS
    return int(presets[run.preset if run.preset in presets else "tiny"].data.image.size)


def command_arguments(run: Run, name: str, *, checkpoint: Path = Path(), out: Path = Path()) -> list[str]:
    """Return the arguments of a command. Raises EvaluationError where the corpus lacks what it reads."""
    [task] = [command for command in run.commands if command.name == name]
    fields = {field.name: getattr(run.corpus, field.name) for field in dataclasses.fields(run.corpus)}
    values = {name: value for name, value in fields.items() if isinstance(value, str)}
    values |= {"checkpoint": str(checkpoint), "out": str(out), "resamples": str(run.evaluation.resamples)}
    values["question_size"] = str(question_size(run))
    try:
        return [part.format(**values) for part in shlex.split(task.command)]
    except (KeyError, IndexError) as error:
        message = f"corpus {run.corpus.name} has no {error} for the task {name}"
        raise EvaluationError(message, "unsupported", field=name) from None


def run_command(trained: "Trained", name: str, out: Path) -> None:
    """Run the command of a `CommandTask`, which writes results.json into `out`; on a CPU where the training was set to.

    Raises EvaluationError with the last line of its errors where it fails or writes none.
    """
    arguments = command_arguments(trained.run, name, checkpoint=trained.checkpoint, out=out)
    environment = os.environ | {ERROR_CODES: "1"}
    if trained.run.settings["train"]["device"] == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    for is_end, part in itertools.groupby(arguments, lambda argument: argument == "&&"):
        if is_end:
            continue
        command = [sys.executable, "-m", "medvl", *part]
        with sigterm_interrupts():  # which stops the command
            ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        if ended.returncode:
            break
    if ended.returncode or not (out / "results.json").is_file():
        last = (ended.stderr.strip().splitlines() or [f"status {ended.returncode}"])[-1]
        text, _, code = last.removeprefix("medvl: ").removesuffix("]").rpartition(" [")
        raise EvaluationError(f"{name}: {text or last}", code if text else "missing", field=name)
