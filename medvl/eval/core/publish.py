"""Output files of an evaluation: results.json, predictions.jsonl and an HTML page in one folder.

Results of different checkpoints lie in different folders:

    RUN/eval/step-00001200/TASK    of a checkpoint of a run, also by its links `best` and `last`
    CHECKPOINT/eval/TASK           of any other checkpoint; of a model of the hub in the hub's cache
    eval/FILE/TASK                 of predictions of another system, beside their file
"""

import dataclasses
import datetime
import errno
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from medvl.common.files import MARKER
from medvl.common.folders import refuse_links
from medvl.common.untrusted import parse_json
from medvl.data.shards.format import Manifest
from medvl.errors import EvaluationError
from medvl.eval.core.results import Results, write_results
from medvl.models.locate import BEST, LAST, find_checkpoint

EVALUATIONS = "eval"
"""Folder of the evaluations of a checkpoint or a run."""
_CHECKPOINTS, _STEP = "checkpoints", re.compile(r"step-\d+")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PageHeader:
    """Names of model and data on a page."""

    model: str
    """Display name, shown with the hash of the checkpoint."""
    data: str
    """Display name, shown with the hash of the manifest."""
    date: str | None = None
    """Display date; None for none."""


WritePage = Callable[[Path, PageHeader], Path]
"""A writer of the HTML page that returns its path, with the result and its own options already bound."""


def default_folder(checkpoint: Path | str, task: str) -> Path:
    """Return the folder of a task's results for a checkpoint, a run (its best checkpoint) or a file of predictions.

    Raises ConfigError where the folder, or one between it and that of the checkpoint, is a link.
    """
    folder = evaluations_of(checkpoint) / task
    # A checkpoint that somebody else made may bring links along; results would be written where they lead.
    within = folder.parts[::-1].index(EVALUATIONS) + 1
    for path in [folder, *folder.parents][:within]:
        refuse_links(path.parent, path.name)
    return folder


def evaluations_of(checkpoint: Path | str) -> Path:
    """Return the folder with the evaluations of a checkpoint or of a file of predictions (see the module)."""
    folder = find_checkpoint(checkpoint)
    if folder.is_file():
        return folder.parent / EVALUATIONS / folder.name
    real = folder.resolve()
    if real.parent.name == _CHECKPOINTS and _STEP.fullmatch(real.name):
        run = real.parent.parent
        shown = next((parent for parent in folder.absolute().parents if parent.resolve() == run), run)
        return _as_given(shown, folder) / EVALUATIONS / real.name
    if folder.name in (BEST, LAST) and (folder.parent / _CHECKPOINTS).is_dir():  # a copy instead of a link
        return folder.parent / EVALUATIONS / _step_of_copy(folder)
    return folder / EVALUATIONS


def _as_given(run: Path, checkpoint: Path) -> Path:
    """Return the folder of a run as a relative path if the checkpoint's is relative and below the current folder."""
    here = Path.cwd()
    return run.relative_to(here) if not checkpoint.is_absolute() and run.is_relative_to(here) else run


def _step_of_copy(folder: Path) -> str:
    try:
        return f"step-{int(parse_json((folder / MARKER).read_bytes())['step']):08d}"
    except (OSError, ValueError, KeyError, TypeError):
        return folder.name


def check_output(folder: Path) -> None:
    """Raise EvaluationError "unreadable" if the folder cannot be written, before an evaluation takes its time."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        reason = "no folder" if not existing.is_dir() else "read-only"
        raise _unwritable(folder, f"{existing} is {reason}")


def _unwritable(folder: Path, reason: str) -> EvaluationError:
    message = f"cannot write results into {folder}: {reason}; give another folder with --out"
    return EvaluationError(message, "unreadable", field="out")


def publish(
    results: Results,
    folder: Path,
    *,
    predictions: Iterable[Mapping[str, Any]] | None = None,
    write_page: WritePage | None = None,
    model: str,
    data: Manifest | str,
    replace: bool = False,
) -> list[Path]:
    """Write the files of an evaluation and return their paths.

    Args:
        results: the metric rows with settings and hashes, for results.json.
        folder: folder of the files; created if missing.
        predictions: lines of predictions.jsonl; None for no such file.
        write_page: writer of index.html, called with today's date; None for no page.
        model: name of the model on the page.
        data: manifest of the evaluated shards, or a name, for the page.
        replace: also replace results of another checkpoint.

    Raises EvaluationError where the folder holds results of another checkpoint, or cannot be written.
    """
    try:
        return _write(results, folder, predictions, write_page, model, data, replace)
    except (PermissionError, NotADirectoryError, FileExistsError) as error:
        raise _unwritable(folder, error.strerror or type(error).__name__) from error
    except OSError as error:
        if error.errno != errno.EROFS:
            raise
        raise _unwritable(folder, "read-only file system") from error


def _write(
    results: Results,
    folder: Path,
    predictions: Iterable[Mapping[str, Any]] | None,
    write_page: WritePage | None,
    model: str,
    data: Manifest | str,
    replace: bool,
) -> list[Path]:
    paths = write_results(results, folder, predictions, replace=replace)
    if write_page is not None:
        named = data if isinstance(data, str) else f"{data.corpus}, split {data.split}"
        header = PageHeader(model=model, data=named, date=datetime.date.today().isoformat())
        paths.append(write_page(folder / "index.html", header))
    return paths
