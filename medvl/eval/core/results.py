"""Results of an evaluation: `results.json`, `predictions.jsonl` and a table in plain text.

`results.json` holds the protocol and its version, the metric rows with their intervals, the
settings, the hashes of all inputs, and package versions. Undefined values are null. It contains no
time, so that the same evaluation writes the same bytes.
"""

import dataclasses
import datetime
import errno
import functools
import importlib.metadata
import json
import logging
import math
import os
import platform
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import medvl
from medvl.common.files import refuse_links, sha256, write_atomic
from medvl.common.ranks import rank_and_world
from medvl.common.untrusted import parse_json
from medvl.data.shards.format import Manifest
from medvl.errors import EvaluationError
from medvl.eval.core.metric_rows import MetricGroup, MetricRow
from medvl.eval.core.metrics import Array
from medvl.models.checkpoint_folder import (
    BEST,
    DEMO,
    LAST,
    MARKER,
    find_checkpoint,
    kind_of,
    weight_files,
    weights_sha256,
)

_log = logging.getLogger(__name__)

RESULTS_VERSION = 1
SUMMARY_TARGETS = (
    "macro_competition",
    "macro",
    "micro",
    "overall",
    "macro of five",
    "micro of five",
    "one class",
)
"""Targets that are means over others; they come first in tables."""
_MODEL_INPUTS = ("checkpoint", "predictions", "generator", "encoder")
"""Inputs that name the evaluated model."""
_DATA_INPUTS = ("manifest", "questions")
"""Inputs that name the evaluated data."""
_PACKAGES = ("numpy", "open_clip_torch", "timm", "torch", "transformers")


def package_versions() -> dict[str, str]:
    """Return the versions of medvl, Python and the packages that affect the output of a model.

    In a git checkout, medvl's ends with the commit: "0.1.0+94f9283", or "0.1.0+94f9283.changed"
    with other files.
    """
    installed = {}
    for package in _PACKAGES:
        try:
            installed[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    commit = _commit()
    version = f"{medvl.__version__}+{commit}" if commit else medvl.__version__
    return {"medvl": version, "python": platform.python_version(), **installed}


@functools.cache
def _commit() -> str | None:
    """Return the commit of the checkout that medvl is imported from; None elsewhere, and where
    git does not answer.
    """
    package = Path(medvl.__file__).parent
    # not that of a project whose environment medvl is installed in
    if not (package.parent / ".git").exists():
        return None
    git = ("git", "-C", str(package))
    try:
        head = subprocess.run(
            [*git, "rev-parse", "--short=7", "HEAD"], capture_output=True, text=True, check=True
        )
        changed = subprocess.run(
            [*git, "diff", "--quiet", "HEAD", "--", "."], capture_output=True
        ).returncode
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{head.stdout.strip()}.changed" if changed else head.stdout.strip()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Results:
    """Results of one evaluation. All fields except the rows are JSON values."""

    protocol: str
    protocol_version: int
    rows: tuple[MetricRow, ...]
    config: Mapping[str, Any]
    """Settings that affect the metrics."""
    inputs: Mapping[str, str | None]
    """Hashes of checkpoint, manifest, prompts, ...; None where an input has no hash."""
    details: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Counts of evaluated and left-out items, thresholds, ..."""
    packages: Mapping[str, str] = dataclasses.field(default_factory=package_versions)

    def row(self, metric: str, target: str, subgroup: str = "") -> MetricRow:
        """Return the row of this name. Raises `EvaluationError` if there is none."""
        for row in self.rows:
            if (row.metric, row.target, row.subgroup) == (metric, target, subgroup):
                return row
        name = MetricRow(metric=metric, target=target, subgroup=subgroup).name
        raise EvaluationError(
            f"no row {name!r} in the results of {self.protocol}", "not_found", field="metric"
        )


def write_results(
    results: Results,
    folder: str | Path,
    predictions: Iterable[Mapping[str, Any]] | None = None,
    *,
    replace: bool = False,
) -> list[Path]:
    """Write `results.json`, and `predictions.jsonl` if predictions are given, and return their
    paths.

    Each file is written atomically (a temporary file and a rename), the results last. Results of
    the same checkpoint are replaced; those of another one only with `replace`, else EvaluationError
    "exists" is raised.
    """
    folder = Path(folder)
    if not replace:
        check_replaceable(folder, results.inputs)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    if predictions is not None:
        lines = "".join(json.dumps(to_json(line), allow_nan=False) + "\n" for line in predictions)
        paths.append(write_atomic(folder / "predictions.jsonl", lines))
    rows = [{"name": row.name, **dataclasses.asdict(row)} for row in results.rows]
    data = {
        "results_version": RESULTS_VERSION,
        "protocol": {"name": results.protocol, "version": results.protocol_version},
        "metrics": rows,
        **{field: getattr(results, field) for field in ("config", "inputs", "details", "packages")},
    }
    text = json.dumps(to_json(data), indent=2, allow_nan=False) + "\n"
    paths.append(write_atomic(folder / "results.json", text))
    return paths


def check_replaceable(folder: Path, inputs: Mapping[str, str | None]) -> None:
    """Raise EvaluationError "exists" if the folder holds results of another model than that of
    `inputs`.
    """
    path = folder / "results.json"
    if not path.is_file():
        return
    earlier = read_results(path).inputs
    for name in _MODEL_INPUTS:
        known = earlier.get(name)
        new = inputs.get(name)
        if known is not None and known != new:
            message = (
                f"{path} holds results of another {name} ({_short(known)}) than this evaluation "
                f"({_short(new)}); give another folder (--out), or replace them (--replace)"
            )
            raise EvaluationError(message, "exists", field="out")


def folder_for_data(folder: Path, inputs: Mapping[str, str | None]) -> Path:
    """Return the folder for results: `folder`, or `folder-HASH` where it holds results on other
    data.

    HASH is the first eight digits of the hash of the data, so that a later evaluation on them has
    the same folder.
    """
    path = folder / "results.json"
    earlier = read_results(path).inputs if path.is_file() else {}
    for name in _DATA_INPUTS:
        known = earlier.get(name)
        new = inputs.get(name)
        if known is not None and new is not None and known != new:
            return folder.with_name(f"{folder.name}-{new[:8]}")
    return folder


def _short(digest: str | None) -> str:
    return "without a hash" if digest is None else f"sha256 {digest[:12]}"


def to_json(value: Any) -> Any:
    """Convert a value to JSON types recursively: NaN becomes None, sequences become lists."""
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def read_results(path: str | Path) -> Results:
    """Read results from `results.json` or from its folder. Raises `EvaluationError` naming the
    file.
    """
    path = Path(path)
    path = path / "results.json" if path.is_dir() else path
    if not path.is_file():
        raise EvaluationError(
            f"{path} does not exist; give a results.json or the folder of an evaluation",
            "not_found",
        )
    try:
        data = parse_json(path.read_text(encoding="utf-8"))
        version = data["results_version"]
        if version != RESULTS_VERSION:
            message = (
                f"expected version {RESULTS_VERSION} of the results format, got {version} in {path}"
            )
            raise EvaluationError(message, "version")
        return Results(
            protocol=data["protocol"]["name"],
            protocol_version=data["protocol"]["version"],
            rows=tuple(_read_row(row) for row in data["metrics"]),
            **{field: data[field] for field in ("config", "inputs", "details", "packages")},
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        message = f"{path} is not a results file of medvl ({type(error).__name__}: {error})"
        raise EvaluationError(message, "malformed") from error


def _read_row(row: dict[str, Any]) -> MetricRow:
    row = {key: value for key, value in row.items() if key != "name"}
    numbers = {
        key: math.nan if row[key] is None else float(row[key]) for key in ("value", "low", "high")
    }
    return MetricRow(**{**row, **numbers})


def checkpoint_sha256(checkpoint: str | Path) -> str:
    """Return the sha256 of the weights in a checkpoint directory, or of the given file.

    Of weights in several parts it is the hash of their hashes. Raises `EvaluationError` if there
    are no weights.
    """
    path = find_checkpoint(checkpoint)
    files = weight_files(path) if path.is_dir() else [path]
    if not files[0].is_file():
        message = f"{files[0]} does not exist; give a checkpoint directory with model.safetensors"
        raise EvaluationError(message, "not_found", field="checkpoint")
    return weights_sha256(path) if path.is_dir() else sha256(path)


def format_value(row: MetricRow | None) -> str:
    """Return text such as "0.873 [0.812, 0.921]", without brackets if there is no interval; "-"
    if no value.
    """
    if row is None or math.isnan(row.value):
        return "-"
    digits = 1 if abs(row.value) >= 10 else 3
    interval = "" if math.isnan(row.low) else f" [{row.low:.{digits}f}, {row.high:.{digits}f}]"
    return f"{row.value:.{digits}f}{interval}"


def format_table(rows: Sequence[MetricRow], width: int = 120) -> str:
    """Return rows as aligned plain text: one line per target (and subgroup), one column per metric.

    Means over targets come first. Metrics that do not fit into `width` characters go into further
    tables below, after an empty line; each table leaves out the lines without a value in it.
    """
    lines: dict[tuple[str, str], dict[str, MetricRow]] = {}
    for row in sorted(
        rows, key=lambda row: bool(row.subgroup) or row.target not in SUMMARY_TARGETS
    ):
        lines.setdefault((row.target, row.subgroup), {})[row.metric] = row
    names = [f"{target} ({subgroup})" if subgroup else target for target, subgroup in lines]
    first = [next(iter(by_metric.values())) for by_metric in lines.values()]
    leading = [
        _align(["", *names], left=True),
        _align(["n", *(str(row.n) for row in first)]),
        _align(
            ["positive", *("" if row.n_positive is None else str(row.n_positive) for row in first)]
        ),
    ]
    if all(row.n_positive is None for row in first):
        leading.pop()
    tables = [list(leading)]
    for metric in dict.fromkeys(row.metric for row in rows):
        cells = [format_value(by_metric.get(metric)) for by_metric in lines.values()]
        column = _align([metric.replace("_", " "), *cells])
        used = sum(len(other[0]) + 2 for other in tables[-1]) + len(column[0])
        if used > width and len(tables[-1]) > len(leading):
            tables.append(list(leading))
        tables[-1].append(column)
    return "\n\n".join(_join(table, len(leading)) for table in tables)


def _align(cells: Sequence[str], *, left: bool = False) -> list[str]:
    width = max(map(len, cells))
    return [cell.ljust(width) if left else cell.rjust(width) for cell in cells]


def _join(columns: Sequence[Sequence[str]], leading: int) -> str:
    header, *lines = zip(*columns, strict=True)
    known = [line for line in lines if any(cell.strip() != "-" for cell in line[leading:])]
    return "\n".join("  ".join(line).rstrip() for line in (header, *known))


# Output files of an evaluation: results.json, predictions.jsonl and an HTML page in one folder.
#
# Results of different checkpoints lie in different folders:
#
#     RUN/eval/step-00001200/TASK    of a checkpoint of a run, also by its links `best` and `last`
#     CHECKPOINT/eval/TASK           of any other checkpoint; of a model of the hub in the hub's
#     cache
#     eval/FILE/TASK                 of predictions of another system, beside their file

EVALUATIONS = "eval"
"""Folder of the evaluations of a checkpoint or a run."""
_CHECKPOINTS = "checkpoints"
_STEP = re.compile(r"step-\d+")


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
"""A writer of the HTML page that returns its path, with the result and its own options already
bound.
"""


def default_folder(checkpoint: Path | str, task: str) -> Path:
    """Return the folder of a task's results for a checkpoint, a run (its best checkpoint) or a file
    of predictions.

    Raises ConfigError where the folder, or one between it and that of the checkpoint, is a link.
    """
    folder = evaluations_of(checkpoint) / task
    # A checkpoint that somebody else made may bring links along; results would be written where
    # they lead.
    within = folder.parts[::-1].index(EVALUATIONS) + 1
    for path in [folder, *folder.parents][:within]:
        refuse_links(path.parent, path.name)
    return folder


def evaluations_of(checkpoint: Path | str) -> Path:
    """Return the folder with the evaluations of a checkpoint or of a file of predictions (see
    the module).
    """
    if kind_of(checkpoint) == "demo":
        return Path("runs", DEMO, EVALUATIONS)  # not into the package
    folder = find_checkpoint(checkpoint)
    if folder.is_file():
        return folder.parent / EVALUATIONS / folder.name
    real = folder.resolve()
    if real.parent.name == _CHECKPOINTS and _STEP.fullmatch(real.name):
        run = real.parent.parent
        shown = next(
            (parent for parent in folder.absolute().parents if parent.resolve() == run), run
        )
        return _as_given(shown, folder) / EVALUATIONS / real.name
    # a copied run has a folder in place of the link
    if folder.name in (BEST, LAST) and (folder.parent / _CHECKPOINTS).is_dir():
        return folder.parent / EVALUATIONS / _step_of_copy(folder)
    return folder / EVALUATIONS


def _as_given(run: Path, checkpoint: Path) -> Path:
    """Return the folder of a run as a relative path if the checkpoint's is relative and below
    the current folder.
    """
    here = Path.cwd()
    return (
        run.relative_to(here) if not checkpoint.is_absolute() and run.is_relative_to(here) else run
    )


def _step_of_copy(folder: Path) -> str:
    try:
        return f"step-{int(parse_json((folder / MARKER).read_bytes())['step']):08d}"
    except (OSError, ValueError, KeyError, TypeError):
        return folder.name


def check_output(folder: Path) -> None:
    """Raise EvaluationError "unreadable" if the folder cannot be written, before an evaluation
    takes its time.
    """
    existing = next(
        path for path in (folder.absolute(), *folder.absolute().parents) if path.exists()
    )
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        reason = "no folder" if not existing.is_dir() else "read-only"
        raise _unwritable(folder, f"{existing} is {reason}")


def _unwritable(folder: Path, reason: str) -> EvaluationError:
    message = f"cannot write results into {folder}: {reason}; give another folder with --out"
    return EvaluationError(message, "unreadable", field="out")


class OutputFolder:
    """Folder of the results of a model, before the data is known.

    Args:
        path: the folder.
        model: input that names the evaluated model -> function that returns its hash.
        replace: whether results of another model and of other data are replaced.

    Raises EvaluationError where the folder cannot be written, or holds results of another model
    without `replace`.
    """

    def __init__(
        self,
        path: Path,
        model: Mapping[str, Callable[[], str | None]] | None = None,
        *,
        replace: bool,
    ) -> None:
        self.path = path
        self._model = dict(model or {})
        self._replace = replace
        self._check(path)

    def settle(self, **data: str | None) -> Path:
        """Return the folder for results on this data, and print it. Called before an evaluation.

        Without `replace`, results on other data stay, and these get a folder beside them.

        Args:
            data: hash of the data by its name in `Results.inputs`; none where the results hold no
                such hash.

        Raises EvaluationError as the constructor, about the folder beside.
        """
        folder = self.path if self._replace else folder_for_data(self.path, data)
        if folder != self.path:
            self._check(folder)
        if rank_and_world()[0] == 0:
            note = (
                ""
                if folder == self.path
                else f": {self.path} holds results on other data (--replace replaces them)"
            )
            _log.info("results go to %s%s", folder, note)
        return folder

    def _check(self, folder: Path) -> None:
        check_output(folder)
        if self._model and not self._replace and (folder / "results.json").is_file():
            check_replaceable(folder, {name: digest() for name, digest in self._model.items()})


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

    Raises EvaluationError where the folder holds results of another checkpoint, or cannot be
    written.
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


# Lines of `predictions.jsonl`: their fields, and metrics that are computed from them.
#
# Shape letters: N items, L classes, M items of a part.

Line = Mapping[str, Any]
Lines = Sequence[Line]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LineFields:
    """Names of the fields of an evaluation's lines."""

    item: tuple[str, ...] = ("key",)
    """Fields that identify an item."""
    group: str = "patient"
    """Field of the bootstrap group."""
    earlier_group: str | None = None
    """Field of the bootstrap group in lines of earlier versions, which do not have `group`."""
    needs: tuple[str, ...] = ()
    """Fields that lines of earlier versions do not have."""
    reference: str = ""
    """Field of what the item is compared with, where the settings of a run choose it."""


class ScoredClasses(NamedTuple):
    """Scores and labels of classes."""

    names: list[str]
    scores_NL: Array
    labels_NL: Array
    """1, 0 or NaN."""
    suffix: str = ""
    """Suffix of the metrics in the results, such as "@100%"."""

    def columns(self) -> Iterator[tuple[str, Array, Array]]:
        """Yield (class, scores_N, labels_N) of each class."""
        yield from zip(self.names, self.scores_NL.T, self.labels_NL.T, strict=True)


def classes_of_lines(lines: Lines, results: Results) -> ScoredClasses:
    """Return the scores and labels of lines with the fields "scores" and "labels"."""
    names = list(lines[0]["scores"])
    return ScoredClasses(
        names, number_table(lines, "scores", names), number_table(lines, "labels", names)
    )


def number_table(lines: Lines, field: str, names: Sequence[str]) -> Array:
    """Return the numbers that a field of each line has under names: one row a line."""
    return np.array([[number(line[field][name]) for name in names] for line in lines])


def number(value: float | None) -> float:
    """Return a number as it was before it became JSON: NaN for null."""
    return math.nan if value is None else float(value)


def at_items(group: MetricGroup, index_M: Sequence[int] | np.ndarray) -> MetricGroup:
    """Return a group over some of the items for all items; NaN in resamples without any of them."""

    def statistic(counts_NR: Array) -> Array:
        drawn_MR = counts_NR[index_M]
        any_R = drawn_MR.sum(axis=0) > 0
        values_RK = group.statistic(np.where(any_R, drawn_MR, 1.0))
        return np.where(any_R[:, None], values_RK, np.nan)

    return MetricGroup(group.rows, statistic)
