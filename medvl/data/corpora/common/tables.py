"""What every corpus shares: records, reading a table of the release, and turning a record into a sample."""

import contextlib
import csv
import dataclasses
import gzip
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TextIO

from medvl.data.privacy.deidentify import find_identifiers, names_a_person
from medvl.data.reports.sections import read_report
from medvl.errors import CorpusError
from medvl.schema import Sample


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """A sample before its files are read: cheap to make by the hundred thousand, read in parallel later."""

    sample: Sample
    report: Path | None = None
    """A report file whose sections the sample still lacks."""


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """All records of a corpus, what was left out by rule, and the label names."""

    corpus: str
    records: Sequence[Record]
    """In any order; `medvl.data.corpora.common.record_file.Records` keeps them on disk."""
    label_names: tuple[str, ...]
    excluded: Counter[str]
    noticed: Counter[str] = dataclasses.field(default_factory=Counter)
    """What was mended, or left out within an image (a question in another language), by rule: no image is among it."""


def read_record(record: Record, warnings: Counter[str]) -> Sample:
    """The sample with its report's sections, counting what was noticed.

    Raises ReportError when the report file cannot be read as text.
    """
    sample = record.sample
    if record.report is not None:
        report = read_report(record.report)
        sections = {name: text for name, text in report.sections.items() if not names_a_person(name)}
        warnings["sections_naming_a_person"] += len(report.sections) - len(sections)
        if report.findings is None and report.impression is None and report.last_paragraph:
            sections["last_paragraph"] = report.last_paragraph
            warnings["no_findings_or_impression"] += 1
        warnings["empty_sections"] += len(report.empty_sections)
        warnings["not_utf8"] += report.encoding != "utf-8"
        sample = dataclasses.replace(sample, sections=sections)
    for text in sample.sections.values():
        for kind in find_identifiers(text):
            warnings[f"possible_{kind}"] += 1
    return sample


def read_table(path: Path, required: Iterable[str]) -> Iterator[dict[str, str]]:
    """Rows of a CSV file, gzipped or not, as dictionaries.

    Raises CorpusError when the file is missing, is no CSV in UTF-8, or lacks a required column.
    """
    required = tuple(required)
    try:
        with open_text(path) as file:
            reader = csv.DictReader(file)
            check_columns(path, reader.fieldnames or (), required)
            for row in reader:
                if None in row or None in row.values():
                    raise CorpusError(f"{path}, line {reader.line_num}: the number of fields is not that of the header")
                yield row
    except (UnicodeDecodeError, EOFError, gzip.BadGzipFile, csv.Error) as error:
        raise CorpusError(f"{path} cannot be read as a CSV table ({type(error).__name__}): copy it again") from error


@contextlib.contextmanager
def open_text(path: Path) -> Iterator[TextIO]:
    """A text file in UTF-8, gzipped or not. Raises CorpusError when it does not exist."""
    opener: Callable[..., TextIO] = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8-sig", newline="") as file:
            yield file
    except FileNotFoundError:
        raise CorpusError(f"{path} does not exist") from None


def check_columns(path: Path, found: Sequence[str], required: Sequence[str]) -> None:
    """Raises CorpusError naming the missing columns and those that are there."""
    missing = [name for name in required if name not in found]
    if missing:
        raise CorpusError(
            f"{path} lacks the column{'s' if len(missing) > 1 else ''} {', '.join(missing)}; it has {', '.join(found)}"
        )


def find_file(root: Path, *names: str) -> Path:
    """The first of `names` that exists below `root`. Raises CorpusError naming all that were looked for."""
    for name in names:
        if (root / name).is_file():
            return root / name
    raise CorpusError(f"{root} holds none of {', '.join(names)}: is it the root of the release? See the data card.")
