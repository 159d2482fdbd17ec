"""Parallel writing of corpora to disk, reproducible for any number of processes and safe to repeat.

A release is a folder with images, tables, `phantom.json` (its options) and `phantom_truth.jsonl.gz`
(one row of ground truth per view). Files are written to a temporary name and renamed, so an
interrupted run leaves complete files only, and the same command resumes it.
"""

import concurrent.futures
import contextlib
import csv
import dataclasses
import enum
import gzip
import io
import json
import math
import multiprocessing
import os
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import cv2
import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from medvl.common.files import write_atomic
from medvl.common.process import interrupts_blocked
from medvl.errors import ConfigError, CorpusError
from medvl.phantom.population.world import MAX_PATIENTS, Patient, Study, View, World, generator
from medvl.phantom.rendering.draw import draw
from medvl.phantom.rendering.findings import boxes

# Workbooks (.xlsx) of the phantom's releases.


def workbook_bytes(header: Sequence[str], rows: Iterable[Sequence[object]]) -> bytes:
    """Return an .xlsx workbook with one sheet of text cells."""
    lines = []
    for number, row in enumerate([header, *rows], start=1):
        cells = "".join(
            f'<c r="{chr(65 + column)}{number}" '
            f't="inlineStr"><is><t>{escape(str(value))}</t></is></c>'
            for column, value in enumerate(row)
        )
        lines.append(f'<row r="{number}">{cells}</row>')
    main, package = (
        f"http://schemas.openxmlformats.org/{name}"
        for name in ("spreadsheetml/2006/main", "package/2006")
    )
    office = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
    kind = "application/vnd.openxmlformats-officedocument.spreadsheetml"
    parts = {
        "[Content_Types].xml": f'<Types xmlns="{package}/content-types"><Default Extension="rels" '
        'ContentType="application/vnd.openxmlformats-package.relationships+xml"/>'
        '<Default Extension="xml" ContentType="application/xml"/>'
        f'<Override PartName="/xl/workbook.xml" ContentType="{kind}.sheet.main+xml"/>'
        f'<Override PartName="/xl/worksheets/sheet1.xml" '
        f'ContentType="{kind}.worksheet+xml"/></Types>',
        "_rels/.rels": f'<Relationships xmlns="{package}/relationships"><Relationship Id="rId1" '
        f'Type="{office}/'
        'officeDocument" Target="xl/workbook.xml"/></Relationships>',
        "xl/workbook.xml": f'<workbook xmlns="{main}" xmlns:r="{office}"><sheets><sheet '
        f'name="Sheet1" sheetId="1" '
        'r:id="rId1"/></sheets></workbook>',
        "xl/_rels/workbook.xml.rels": f"<Relationships "
        f'xmlns="{package}/relationships"><Relationship Id="rId1" '
        f'Type="'
        f'{office}/worksheet" Target="worksheets/sheet1.xml"/></Relationships>',
        "xl/worksheets/sheet1.xml": f"<worksheet "
        f'xmlns="{main}"><sheetData>{"".join(lines)}</sheetData></worksheet>',
    }
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as book:
        for name, text in parts.items():
            part = zipfile.ZipInfo(name)  # with a fixed date: the same seed gives the same bytes
            book.writestr(part, f'<?xml version="1.0" encoding="UTF-8" standalone="yes"?>\n{text}')
    return content.getvalue()


GENERATOR_VERSION = 1
"""Incremented with every change of the output for a seed."""
OPTIONS_FILE = "phantom.json"
TRUTH_FILE = "phantom_truth.jsonl.gz"
_GOLDEN = (math.sqrt(5) - 1) / 2
_LEFT_OUT_AT_0 = ("site", "distractors")
"""Options that `phantom.json` has only where they change the content."""
_STREAM = MAX_PATIENTS  # beyond every patient's key


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Options that determine the content of a release."""

    corpus: str
    patients: int
    seed: int
    size: int
    """Pixels of the longer side of every image."""
    split: tuple[float, float, float]
    """Shares of patients in training, validation and test."""
    reports: bool
    frontal_only: bool = False
    """Leave out lateral views; the frontal ones are the same."""
    site: int = 0
    """Hospital whose devices took the images (`medvl.phantom.population.world.at_site`);
    patients are the same.
    """
    distractors: int = 0
    """Largest number of opacities in an image that look like those of the mask and are not in
    it.
    """

    def __post_init__(self) -> None:
        expected = ""
        if not 1 <= self.patients <= MAX_PATIENTS:
            field = "patients"
            expected = f"in [1, {MAX_PATIENTS}]"
        elif not 32 <= self.size <= 4096:
            field = "size"
            expected = "in [32, 4096] pixels"
        elif len(self.split) != 3 or min(self.split) < 0 or abs(sum(self.split) - 1) > 1e-6:
            field = "split"
            expected = "three shares that add up to 1"
        else:
            field = next(
                (name for name in ("seed", "site", "distractors") if getattr(self, name) < 0), ""
            )
            expected = "0 or more" if field else ""
        if expected:
            raise ConfigError(
                f"{field} must be {expected}, got {getattr(self, field)}",
                "out_of_range",
                field=field,
            )

    def split_index(self, index: int) -> int:
        """Return the split of a patient: 0 for training, 1 for validation, 2 for test."""
        return split_of(index, self.seed, self.split)

    def as_json(self) -> dict[str, object]:
        """Return the content of `phantom.json`."""
        content = {
            **dataclasses.asdict(self),
            "split": list(self.split),
            "generator_version": GENERATOR_VERSION,
        }
        return {
            name: value for name, value in content.items() if name not in _LEFT_OUT_AT_0 or value
        }


@dataclasses.dataclass(frozen=True, slots=True)
class PatientRows:
    """Rows of a patient in the tables (file name -> rows) and in the ground truth."""

    order: int
    """Sort key of patients in the tables."""
    tables: Mapping[str, Sequence[Sequence[object]]]
    truth: Sequence[Mapping[str, object]]


class Form(enum.Enum):
    """Form of a file that is not a table."""

    LINES = enum.auto()
    """One line for each row, whose only cell is the line."""
    JSON_OBJECT = enum.auto()
    """A JSON object; rows are a key and its value as JSON."""
    ZIP = enum.auto()
    """A zip archive; rows are the name of a member and its text."""


class Tabs(tuple[str, ...]):
    """Header of a table that is separated by tabs."""


WritePatient = Callable[[Path, Patient, Options], PatientRows]
Encode = Callable[[NDArray[np.uint16]], bytes]
"""Function from a 12-bit image to the content of a file."""


def split_of(index: int, seed: int, shares: tuple[float, float, float]) -> int:
    """Return the split of a patient: 0, 1 or 2.

    It depends on (seed, index) only, not on the number of patients, and the shares hold closely for
    the first n patients of any n: multiples of the golden ratio are spread evenly over the unit
    interval.
    """
    position = (index * _GOLDEN + generator(seed, _STREAM).random()) % 1
    return 0 if position < shares[0] else 1 if position < shares[0] + shares[1] else 2


def write_release(
    root: Path,
    options: Options,
    write_patient: WritePatient,
    columns: Mapping[str, Sequence[str] | Form | None],
    workers: int | None,
) -> Path:
    """Write all patients, then the tables, and return `root`. A finished release with the same
    options is not changed.

    Args:
        root: an empty or absent folder, or a finished or partial release with the same `options`.
        write_patient: function that writes the files of one patient below `root`; at module level,
            to be picklable.
        columns: file name of each table -> its header; None for a file of lines, or for a JSON list
            (`.json`), whose rows are one text each; or another form.
        workers: number of processes; None for one per core.

    Raises ConfigError ("out_of_range") for `workers`, and CorpusError ("exists") if `root` contains
    anything else.
    """
    if workers is not None and workers < 1:
        raise ConfigError(
            f"workers must be 1 or more, got {workers}", "out_of_range", field="workers"
        )
    if _is_finished(root, options):
        return root
    _write_options(root, options, finished=False)
    results = _run(root, options, write_patient, workers or os.cpu_count() or 1)
    patient_rows = sorted(results, key=lambda rows: rows.order)
    for name, header in columns.items():
        body = [row for rows in patient_rows for row in rows.tables.get(name, ())]
        write_file(root / name, _table_bytes(name, header, body))
    truth = "".join(json.dumps(row) + "\n" for rows in patient_rows for row in rows.truth)
    write_file(root / TRUTH_FILE, gzip.compress(truth.encode(), mtime=0))
    _write_options(root, options, finished=True)
    return root


def write_file(path: Path, content: bytes) -> None:
    """Write a file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, content, durable=False)


def write_view(path: Path, view: View, size: int, encode: Encode) -> None:
    """Draw a view into an image file, unless the file exists: drawing takes most of the time."""
    if not path.exists():
        write_file(path, encode(draw(view, size)))


def read_truth(root: str | Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a release's ground truth, one per view. Raises CorpusError if there is
    none.
    """
    path = Path(root, TRUTH_FILE)
    if not path.is_file():
        raise CorpusError(
            f"{path} does not exist: give a folder that `medvl phantom` wrote",
            "not_found",
            field="root",
        )
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def truth_row(view: View, study: Study, size: int, **ids: object) -> dict[str, object]:
    """Return the row of `phantom_truth.jsonl.gz` for a view of `size` pixels, with `ids` first."""
    height, width = view.camera.shape(size)
    severity = {finding.label: finding.severity for finding in study.findings}
    return {
        **ids,
        "view": view.position,
        "sex": study.sex,
        "age": study.age,
        "height": height,
        "width": width,
        "labels": study.labels,
        "severity": severity,
        "edema_severity": severity.get("Edema", "none"),
        "side": {finding.label: finding.side for finding in study.findings},
        "boxes": [dataclasses.asdict(box) for box in boxes(view, size)],
    }


def label_cells(labels: Mapping[str, int], names: Iterable[str]) -> list[str]:
    """Return the cells of labels: 1.0, 0.0, -1.0, or blank for labels that are not mentioned."""
    return [f"{labels[name]:.1f}" if name in labels else "" for name in names]


def _run(
    root: Path, options: Options, write_patient: WritePatient, workers: int
) -> Iterator[PatientRows]:
    """Yield the rows of every patient, with a progress bar on a terminal."""
    indices = range(options.patients)
    task = _Task(root, options, write_patient)
    with contextlib.ExitStack() as stack:
        results: Iterable[PatientRows]
        if workers == 1:
            results = map(task, indices)
        else:
            pool = stack.enter_context(
                concurrent.futures.ProcessPoolExecutor(
                    min(workers, options.patients),
                    mp_context=multiprocessing.get_context("spawn"),  # a fork would copy held locks
                    initializer=cv2.setNumThreads,
                    initargs=(1,),
                )
            )
            stack.callback(pool.shutdown, cancel_futures=True)
            with interrupts_blocked():
                results = pool.map(
                    task, indices, chunksize=max(1, min(16, options.patients // (4 * workers)))
                )
        yield from tqdm(
            results, total=len(indices), unit="patient", desc=options.corpus, disable=None
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _Task:
    """Picklable function that writes one patient."""

    root: Path
    options: Options
    write_patient: WritePatient

    def __call__(self, index: int) -> PatientRows:
        return self.write_patient(
            self.root, World(self.options.seed, self.options.site).patient(index), self.options
        )


def _table_bytes(
    name: str, header: Sequence[str] | Form | None, rows: Iterable[Sequence[object]]
) -> bytes:
    if header is Form.ZIP:
        return _zip_bytes(rows)
    if isinstance(header, Form):
        return _json_bytes(header, rows)
    if name.endswith(".xlsx") and header is not None:
        return workbook_bytes(header, rows)
    text = io.StringIO()
    if name.endswith(".json"):
        text.write("[\n" + ",\n".join(str(line) for (line,) in rows) + "\n]\n")
    elif header is None:
        text.writelines(f"{line}\n" for (line,) in rows)
    else:
        separator = "\t" if isinstance(header, Tabs) else ","
        writer = csv.writer(text, delimiter=separator, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)
    content = text.getvalue().encode()
    return gzip.compress(content, mtime=0) if name.endswith(".gz") else content


def _json_bytes(form: Form, rows: Iterable[Sequence[object]]) -> bytes:
    if form is Form.LINES:
        return "".join(f"{line}\n" for (line,) in rows).encode()
    entries = ",\n".join(f"{json.dumps(key)}: {value}" for key, value in rows)
    return f"{{\n{entries}\n}}\n".encode()


def _zip_bytes(rows: Iterable[Sequence[object]]) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in rows:
            member = zipfile.ZipInfo(str(name))  # with a fixed date, as in workbooks
            member.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(member, str(text))
    return content.getvalue()


def _write_options(root: Path, options: Options, finished: bool) -> None:
    content = json.dumps({**options.as_json(), "finished": finished}, indent=2) + "\n"
    write_file(root / OPTIONS_FILE, content.encode())


def _is_finished(root: Path, options: Options) -> bool:
    """Return whether `root` contains this release in finished form. Raises CorpusError if it
    contains anything else.
    """
    # An immediate interruption leaves nothing but partial files.
    if not root.exists() or (root.is_dir() and not any(root.glob("[!.]*"))):
        return False
    advice = "choose an empty folder, or delete this one"
    try:
        existing = json.loads((root / OPTIONS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        message = f"{root} is not empty and has no {OPTIONS_FILE} of this command: {advice}"
        raise CorpusError(message, "exists", field="out") from None
    expected = options.as_json()
    optional = dict.fromkeys(_LEFT_OUT_AT_0)
    differing = [
        name for name in optional | expected
        if not isinstance(existing, dict) or existing.get(name) != expected.get(name)
    ]  # fmt: skip
    if differing:
        message = (
            f"{root} contains a phantom corpus with another "
            f"{', another '.join(differing)}: {advice}"
        )
        raise CorpusError(message, "exists", field="out")
    return existing.get("finished") is True
