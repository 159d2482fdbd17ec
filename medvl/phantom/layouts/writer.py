"""Writing a corpus to disk: many processes, the same bytes whatever their number, safe to run twice.

A release is a folder with images, tables, `phantom.json` (the options it was made with) and `phantom_truth.jsonl.gz`
(one row a view: what is really there). Files are written under another name and renamed, so a run that was cut off
leaves whole files only; the same command takes it up again.
"""

import concurrent.futures
import contextlib
import csv
import dataclasses
import gzip
import io
import json
import math
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import cv2
from tqdm import tqdm

from medvl.errors import ConfigError, CorpusError
from medvl.phantom.population.world import MAX_PATIENTS, Patient, Study, View, World
from medvl.phantom.quiz import questions
from medvl.phantom.rendering.ground_truth import boxes
from medvl.phantom.seeds import generator

GENERATOR_VERSION = 1
"""Raised with every change that alters what a seed gives."""
OPTIONS_FILE, TRUTH_FILE = "phantom.json", "phantom_truth.jsonl.gz"
_GOLDEN = (math.sqrt(5) - 1) / 2
_STREAM = MAX_PATIENTS  # beyond every patient's key


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Everything that decides the content of a release."""

    corpus: str
    patients: int
    seed: int
    size: int
    """Pixels of the longer side of every image."""
    split: tuple[float, float, float]
    """Shares of the patients in training, validation and test."""
    reports: bool

    def __post_init__(self) -> None:
        if not 1 <= self.patients <= MAX_PATIENTS:
            raise ConfigError(f"patients must lie in [1, {MAX_PATIENTS}], not {self.patients}")
        if not 32 <= self.size <= 4096:
            raise ConfigError(f"size must lie in [32, 4096] pixels, not {self.size}")
        if len(self.split) != 3 or min(self.split) < 0 or abs(sum(self.split) - 1) > 1e-6:
            raise ConfigError(f"split must be three shares that add up to 1, not {self.split}")
        if self.seed < 0:
            raise ConfigError(f"seed must be 0 or more, not {self.seed}")

    def part(self, index: int) -> int:
        """0 for training, 1 for validation, 2 for test: the part that a patient belongs to."""
        return split_of(index, self.seed, self.split)

    def as_json(self) -> dict[str, object]:
        """As `phantom.json` keeps them."""
        return {**dataclasses.asdict(self), "split": list(self.split), "generator_version": GENERATOR_VERSION}


@dataclasses.dataclass(frozen=True, slots=True)
class Rows:
    """What one patient adds to the tables (file name -> rows) and to the truth."""

    order: int
    """Patients stand in the tables by this number."""
    tables: Mapping[str, Sequence[Sequence[object]]]
    truth: Sequence[Mapping[str, object]]


WritePatient = Callable[[Path, Patient, Options], Rows]


def split_of(index: int, seed: int, shares: tuple[float, float, float]) -> int:
    """Which part a patient belongs to: 0, 1 or 2.

    It depends on (seed, index) only, never on how many patients there are, and the shares hold closely in any first n
    patients: multiples of the golden ratio spread evenly over the unit interval.
    """
    place = (index * _GOLDEN + generator(seed, _STREAM).random()) % 1
    return 0 if place < shares[0] else 1 if place < shares[0] + shares[1] else 2


def write_release(
    root: Path,
    options: Options,
    write_patient: WritePatient,
    columns: Mapping[str, Sequence[str] | None],
    workers: int | None,
) -> Path:
    """Write all patients, then the tables; returns `root`. A finished release of the same options is left as it is.

    Args:
        root: empty or absent, or a finished or partial release of the same options.
        options: what to write.
        write_patient: writes the files of one patient below `root`; a function of a module, so that it can be sent to
            other processes.
        columns: file name of each table -> its header; None for a file of plain lines, whose rows are one text each.
        workers: processes; None takes one a core.

    Raises:
        ConfigError: `workers` is below 1.
        CorpusError: `root` holds something else.
    """
    if workers is not None and workers < 1:
        raise ConfigError(f"workers must be 1 or more, not {workers}")
    if _is_finished(root, options):
        return root
    _write_options(root, options, finished=False)
    done = sorted(_run(root, options, write_patient, workers or os.cpu_count() or 1), key=lambda rows: rows.order)
    for name, header in columns.items():
        body = [row for rows in done for row in rows.tables.get(name, ())]
        write_file(root / name, _table_bytes(name, header, body))
    truth = "".join(json.dumps(row) + "\n" for rows in done for row in rows.truth)
    write_file(root / TRUTH_FILE, gzip.compress(truth.encode(), mtime=0))
    _write_options(root, options, finished=True)
    return root


def write_file(path: Path, content: bytes) -> None:
    """Write a file so that it is there whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(content)
    partial.replace(path)


def truth_row(view: View, study: Study, size: int, **ids: object) -> dict[str, object]:
    """The row of `phantom_truth.jsonl.gz` for one view of `size` pixels; `ids` come first."""
    height, width = view.camera.shape(size)
    return {
        **ids,
        "view": view.position,
        "sex": study.sex,
        "age": study.age,
        "height": height,
        "width": width,
        "labels": study.labels,
        "severity": {finding.label: finding.severity for finding in study.findings},
        "side": {finding.label: finding.side for finding in study.findings},
        "boxes": [dataclasses.asdict(box) for box in boxes(view, size)],
        "questions": [dataclasses.asdict(question) for question in questions(view)],
    }


def label_cells(labels: Mapping[str, int], names: Iterable[str]) -> list[str]:
    """Labels as the tables write them: 1.0, 0.0, -1.0, or nothing where a label is not mentioned."""
    return [f"{labels[name]:.1f}" if name in labels else "" for name in names]


def _run(root: Path, options: Options, write_patient: WritePatient, workers: int) -> Iterator[Rows]:
    """The rows of every patient, with a progress bar where a person watches."""
    indices = range(options.patients)
    task = _Task(root, options, write_patient)
    with contextlib.ExitStack() as stack:
        results: Iterable[Rows]
        if workers == 1:
            results = map(task, indices)
        else:
            pool = stack.enter_context(
                concurrent.futures.ProcessPoolExecutor(
                    min(workers, options.patients),
                    mp_context=multiprocessing.get_context("spawn"),  # a fork would copy locks that other threads hold
                    initializer=cv2.setNumThreads,
                    initargs=(1,),
                )
            )
            stack.callback(pool.shutdown, cancel_futures=True)
            results = pool.map(task, indices, chunksize=max(1, min(16, options.patients // (4 * workers))))
        yield from tqdm(results, total=len(indices), unit="patient", desc=options.corpus, disable=None)


@dataclasses.dataclass(frozen=True, slots=True)
class _Task:
    """Writes one patient; travels to the other processes."""

    root: Path
    options: Options
    write_patient: WritePatient

    def __call__(self, index: int) -> Rows:
        return self.write_patient(self.root, World(self.options.seed).patient(index), self.options)


def _table_bytes(name: str, header: Sequence[str] | None, rows: Iterable[Sequence[object]]) -> bytes:
    text = io.StringIO()
    if header is None:
        text.writelines(f"{line}\n" for (line,) in rows)
    else:
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)
    content = text.getvalue().encode()
    return gzip.compress(content, mtime=0) if name.endswith(".gz") else content


def _write_options(root: Path, options: Options, finished: bool) -> None:
    content = json.dumps({**options.as_json(), "finished": finished}, indent=2) + "\n"
    write_file(root / OPTIONS_FILE, content.encode())


def _is_finished(root: Path, options: Options) -> bool:
    """Whether `root` already holds this release; raises CorpusError when it holds another one or anything else."""
    started = f"{OPTIONS_FILE}.partial"  # all that a run leaves which was cut off at once
    if not root.exists() or (root.is_dir() and all(path.name == started for path in root.iterdir())):
        return False
    advice = "name an empty folder, or delete this one"
    try:
        found = json.loads((root / OPTIONS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise CorpusError(
            f"{root} is not empty and was not made by this command (no {OPTIONS_FILE}): {advice}"
        ) from None
    wanted = options.as_json()
    differing = [name for name in wanted if not isinstance(found, dict) or found.get(name) != wanted[name]]
    if differing:
        raise CorpusError(f"{root} holds a phantom corpus with another {', another '.join(differing)}: {advice}")
    return found.get("finished") is True
