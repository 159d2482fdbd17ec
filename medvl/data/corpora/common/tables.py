"""Records of a corpus, and readers for the tables of its release."""

import codecs
import contextlib
import csv
import dataclasses
import gzip
import io
import itertools
import os
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TextIO, TypedDict, TypeVar

from medvl.common.untrusted import DuplicateKeyError, InputFolders, NonFiniteNumberError, parse_json
from medvl.data.corpora.common.rows import IMAGES, RowCounts
from medvl.data.privacy import Deidentifier, find_identifiers, free_texts, is_identifying_header
from medvl.data.reports.sections import Report, read_report
from medvl.data.reports.sentences import join_texts
from medvl.data.storage.location import is_address
from medvl.data.transforms.text import choose_sections
from medvl.data.volumes.options import VolumeFile
from medvl.errors import ConfigError, CorpusError
from medvl.schema import FINDINGS, FilePart, Sample

T = TypeVar("T")

MAX_CELL_CHARACTERS = 1 << 17
"""Longest accepted cell of a CSV table; the longest report of MIMIC-CXR has under 10,000
characters.
"""
MAX_LINE_CHARACTERS = 1 << 24
"""Longest accepted line of a table; in JSON lines, a line can be an article with its references."""

MAX_COLUMNS = 1 << 14
"""Largest accepted number of columns of a CSV table, that of spreadsheets."""
MAX_RATIO = 100
FREE_BYTES = 1 << 24
"""A gzip file or workbook may unpack to `MAX_RATIO` times its size and `FREE_BYTES`; tables
reach a ratio of 40.
"""
FREE_LINES = 1 << 17
"""Lines that any gzip file may have: six seconds of reading as rows. A larger one may have one for
every two of its bytes; numbered rows take more than two.
"""

_SEPARATORS = (",", ";", "\t", "|")
_SEPARATOR_LINE = re.compile(r"\"?sep=(.)\"?\s*", re.IGNORECASE)
"""First line that Excel writes in some countries."""
_SHOWN = 100
_BUFFER = 1 << 17
_HEADER_LINES = 50
"""Lines in which a header that is not the first line is looked for."""
_LABEL_VALUES = {"1.0": 1, "0.0": 0, "-1.0": -1, "1": 1, "0": 0, "-1": -1}


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """A sample whose files have not been read yet."""

    sample: Sample
    report: Path | None = None
    """Report file that the sample's sections are read from; None where the sample has them
    already.
    """
    masks: Mapping[str, Path] = dataclasses.field(default_factory=dict)
    """Label -> file of its mask, an image of the size of the sample's; read into `Sample.extra`
    by the conversion.
    """
    volume: VolumeFile | None = None
    """How the sample's `image`, a NIfTI file, a NumPy archive or the folder of a DICOM series, is
    read as a volume; None: it is an image.
    """

    @property
    def files(self) -> list[Path]:
        """The local files of its image, report and masks."""
        image = self.sample.image
        if isinstance(image, FilePart):
            image = None if is_address(image.file) else Path(image.file)
        return [path for path in (image, self.report, *self.masks.values()) if path is not None]


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """All records of a corpus, its label names, and counts of its rows and warnings.

    Raises CorpusError when rows were counted and do not add up.
    """

    corpus: str
    records: Sequence[Record]
    """In any order; `medvl.data.corpora.common.record_file.Records` keeps them on disk."""
    label_names: tuple[str, ...]
    rows: RowCounts
    """Rows read, kept and left out; an empty `RowCounts()` where nothing is left out."""
    warnings: Counter[str] = dataclasses.field(default_factory=Counter)
    """Repairs, and parts left out of an image (such as a question in another language), by rule."""
    folders: InputFolders | None = None
    """Folders that images and reports must be in, links resolved; default the one that holds all
    of them by name.
    """
    generators: tuple[Mapping[str, Any], ...] = ()
    """See `Manifest.generators`."""

    def __post_init__(self) -> None:
        rows = self.rows
        records = len(self.records) if rows.read and rows.unit == IMAGES else rows.kept
        if rows.read != rows.kept + rows.left_out.total() or records != rows.kept:
            message = f"the counts of {self.corpus} do not add up: {rows}; {records} records"
            raise CorpusError(
                f"{message}; count each row once in its `plan`", "mismatch", field="rows"
            )

    @property
    def excluded(self) -> Counter[str]:
        """Rows left out by an option or a rule, by reason."""
        return self.rows.excluded

    def allowed_folders(self) -> InputFolders:
        """Return the folders that images, masks and reports must be in."""
        if self.folders is not None:
            return self.folders
        return InputFolders.holding(path for each in self.records for path in each.files)

    def iter_samples(self) -> Iterator[Sample]:
        """Yield the samples one by one, with their reports read. Raises ReportError when a
        report cannot be read.
        """
        warnings = Counter[str]()
        folders = self.allowed_folders()
        for record in self.records:
            yield read_record(record, warnings, folders)


def read_record(record: Record, warnings: Counter[str], folders: InputFolders) -> Sample:
    """Return a record's sample with its report read, and count text warnings. Raises as
    `read_report` does.

    Likely identifiers are counted in the sections and in the free texts of the extra fields, and
    not removed.
    """
    sample = record.sample
    if record.report is not None:
        report = read_report(record.report, folders=folders)
        sample = dataclasses.replace(sample, sections=report_sections(report, warnings))
    warnings["no_description"] += any(sample.sections.values()) and not choose_sections(
        sample.sections, ()
    )
    for text in (*sample.sections.values(), *free_texts(sample.extra)):
        for kind in find_identifiers(text):
            warnings[f"possible_{kind}"] += 1
    return sample


def report_sections(report: Report, warnings: Counter[str]) -> dict[str, str]:
    """Return the sections of a report that are stored, and count what is left out.

    Sections that identify a person are left out, like those about the handling of the report, text
    before the first header, which often names a person, and all but the last of several findings or
    impressions. `addendum` is added, and `last_paragraph` where findings and impression are
    missing.
    """
    sections = {
        name: text for name, text in report.sections.items() if not is_identifying_header(name)
    }
    warnings["sections_naming_a_person"] += len(report.sections) - len(sections)
    for name in sections.keys() & set(report.administrative_sections):
        del sections[name]
        warnings["administrative_sections"] += 1
    if report.findings is None and report.impression is None and report.last_paragraph:
        sections["last_paragraph"] = report.last_paragraph
        warnings["no_findings_or_impression"] += 1
    if report.addenda:
        sections["addendum"] = join_texts(report.addenda)
    warnings["text_before_first_header"] += report.preamble not in (
        None,
        sections.get("last_paragraph"),
    )
    warnings["repeated_sections"] += len(report.repeated_sections)
    warnings["empty_sections"] += len(report.empty_sections)
    warnings["not_utf8"] += report.encoding != "utf-8"
    return sections


def read_table(
    path: Path, required: Iterable[str], folders: InputFolders
) -> Iterator[dict[str, str]]:
    """Yield the rows of a CSV file or `.gz`, with any separator of `_SEPARATORS`.

    White space around column names and empty fields after the last column are ignored, as is a line
    `sep=;` before the header. Raises CorpusError as `read_lines`, or if it lacks a column or has it
    twice. No message quotes a cell; where the first line has none of the required columns, it may
    be a patient's row and is not quoted either.
    """
    return _raise_invalid(number_table_rows(path, required, folders))


def _raise_invalid(rows: Iterable[tuple[int, T | CorpusError]]) -> Iterator[T]:
    for _, row in rows:
        if isinstance(row, CorpusError):
            raise row
        yield row


def number_table_rows(
    path: Path, required: Iterable[str], folders: InputFolders
) -> Iterator[tuple[int, dict[str, str] | CorpusError]]:
    """Yield (row number, counted from 1 without the header; row) as `read_table`.

    In place of a row with another number of fields than the header, yields the error that
    `read_table` raises.
    """
    required = tuple(required)
    line = 1
    number = 0
    lines = _RowLines(path, folders)
    try:
        first = next((text for text in lines if text.strip()), "")
        if "\0" in first:
            raise _other_encoding(path, "UTF-16LE")
        if stated := _SEPARATOR_LINE.fullmatch(first):
            first = next(lines, "")
        separator = stated[1] if stated else _separator(first, required)
        # strict: a quote that is not closed would join all rows up to the next one
        reader = csv.reader(itertools.chain([first], lines), delimiter=separator, strict=True)
        columns = [name.strip() for name in next(reader, [])]
        if len(columns) > MAX_COLUMNS:
            raise CorpusError(
                f"{path}: expected at most {MAX_COLUMNS} columns, got {len(columns)}", "too_large"
            )
        if columns and not set(columns) & set(required):
            raise _without_header(path, len(columns), lines, required)
        check_columns(path, columns, required)
        for fields in reader:
            lines.size = 0
            if not fields:
                continue
            number += 1
            if len(fields) != len(columns) and (
                len(fields) < len(columns) or any(fields[len(columns) :])
            ):
                where = f"{path}, line {lines.number}"
                expected = f"expected {len(columns)} fields as in the header, got {len(fields)}"
                yield (
                    number,
                    malformed(where, f"{expected}; quote texts with a separator or a line break"),
                )
            else:
                yield number, dict(zip(columns, fields, strict=False))
            line = lines.number
    except csv.Error as error:
        if "field limit" in str(error):
            raise _too_large(str(path), f"a cell of {MAX_CELL_CHARACTERS}") from None
        message = (
            f"not readable as a CSV table ({error}); close each quote, and double those "
            f"within quoted texts"
        )
        raise malformed(f"{path}, after line {line}", message) from error


class _RowLines:
    """Lines of a CSV table; raises CorpusError where a row of several lines becomes too long."""

    def __init__(self, path: Path, folders: InputFolders) -> None:
        self._path = path
        self._lines = read_lines(path, folders)
        self.number = 0
        self.size = 0
        """Lines read, and characters since the reader set it to 0 at the end of a row."""

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = next(self._lines)
        self.number += 1
        self.size += len(line)
        if self.size > MAX_LINE_CHARACTERS:
            raise _too_large(f"{self._path}, line {self.number}", f"a row of {MAX_LINE_CHARACTERS}")
        return line


def _without_header(
    path: Path, fields: int, lines: Iterator[str], required: Sequence[str]
) -> CorpusError:
    """Return the error of a table whose first line has no required column; it names the line
    that has all of them.
    """
    for number, line in enumerate(itertools.islice(lines, _HEADER_LINES), start=2):
        names = next(csv.reader([line], delimiter=_separator(line, required)), [])
        if set(required) <= {name.strip() for name in names}:
            message = f"{path}: the column names are in line {number}; remove the lines above it"
            return CorpusError(message, "malformed", field=required[0])
    state = (
        f"{path}: the first line has none of the columns {', '.join(required)} in its "
        f"{fields} fields"
    )
    advice = "expected a line of column names (not shown here, as it may be a patient's row)"
    return CorpusError(f"{state}; {advice}", "missing", field=required[0])


def _separator(header: str, required: Sequence[str]) -> str:
    """Return the separator that finds most of the required columns in the header; the comma
    where none does.
    """

    def found(separator: str) -> int:
        return len(
            {name.strip() for name in next(csv.reader([header], delimiter=separator), ())}
            & set(required)
        )

    return max(_SEPARATORS, key=found)


def read_json_lines(
    path: Path, required: Sequence[str], folders: InputFolders
) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield (line number, counted from 1; object) of a JSON lines file, gzipped or not; blank lines
    are skipped.

    Raises CorpusError as `read_lines`, or when a line is not a JSON object or lacks a required
    field.
    """
    for number, row in number_json_lines(path, required, folders):
        if isinstance(row, CorpusError):
            raise row
        yield number, row


def number_json_lines(
    path: Path, required: Sequence[str], folders: InputFolders
) -> Iterator[tuple[int, Mapping[str, Any] | CorpusError]]:
    """Yield the lines as `read_json_lines`; in place of an invalid one, the error that
    `read_json_lines` raises.
    """
    for number, line in enumerate(read_lines(path, folders), start=1):
        if line.strip():
            try:
                yield number, _json_row(f"{path}, row {number}", line, required)
            except CorpusError as error:
                yield number, error


def _json_row(where: str, line: str, required: Sequence[str]) -> Mapping[str, Any]:
    try:
        row = parse_json(line)
    except ValueError as error:
        # their messages quote no text
        ours = isinstance(error, DuplicateKeyError | NonFiniteNumberError)
        message = f"{where}: cannot be read as JSON ({error if ours else type(error).__name__})"
        raise CorpusError(message, "malformed") from error
    if not isinstance(row, dict):
        raise CorpusError(f"{where}: expected a JSON object", "malformed")
    check_columns(where, list(row), required)
    return row


def read_lines(path: Path, folders: InputFolders) -> Iterator[str]:
    """Yield the lines of a text file, gzipped or not, with their ends.

    Raises CorpusError when it does not exist, is not a regular file in `folders`, is damaged or not
    UTF-8, or has a line of more than `MAX_LINE_CHARACTERS`.
    """
    with open_text(path, folders) as file:
        number = 0
        while line := file.readline(MAX_LINE_CHARACTERS + 1):
            number += 1
            if len(line) > MAX_LINE_CHARACTERS:
                raise _too_large(f"{path}, line {number}", f"a line of {MAX_LINE_CHARACTERS}")
            yield line


@contextlib.contextmanager
def open_text(path: Path, folders: InputFolders) -> Iterator[TextIO]:
    """Open a text file, gzipped or not, in UTF-8, or in UTF-16 with a byte-order mark.

    Raises CorpusError, also within the block, when it is unreadable or unpacks to too many bytes.
    """
    try:
        with folders.open(path, CorpusError) as file:
            zipped = path.suffix == ".gz"
            if zipped and not os.fstat(file.fileno()).st_size:
                raise EOFError("an empty file is not a gzip file")  # which GzipFile accepts
            if zipped:
                unpacked = io.BufferedReader(_Unpacked(path, file), _BUFFER)
                yield io.TextIOWrapper(unpacked, encoding=_encoding(unpacked.peek(4)), newline="")
            else:
                start = file.read(4)
                file.seek(0)
                yield io.TextIOWrapper(file, encoding=_encoding(start), newline="")
    except FileNotFoundError:
        raise CorpusError(f"{path} does not exist", "not_found") from None
    except UnicodeDecodeError as error:
        is_utf16 = "utf-16" in error.encoding or b"\0" in error.object[:64]
        raise _other_encoding(path, "UTF-16" if is_utf16 else "WINDOWS-1252") from None
    except (OSError, EOFError, zlib.error) as error:
        raise CorpusError(
            f"{path} is damaged ({type(error).__name__}): copy it again", "malformed"
        ) from error


def _other_encoding(path: Path, guess: str) -> CorpusError:
    advice = f"save it as UTF-8, for example with iconv -f {guess} -t UTF-8"
    return CorpusError(f"{path} is not UTF-8 text; {advice}", "malformed", field="encoding")


class _Unpacked(io.RawIOBase):
    """Content of a gzip file, up to multiples of its size in bytes and lines."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path = path
        self._content = gzip.GzipFile(fileobj=file)
        size = os.fstat(file.fileno()).st_size
        self._left = FREE_BYTES + MAX_RATIO * size
        self._most_lines = self._lines_left = max(FREE_LINES, size // 2)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._content.read(len(buffer))
        self._left -= len(data)
        if self._left < 0:
            advice = "unpack it with gunzip if you trust it"
            raise CorpusError(
                f"{self._path} unpacks to more than {MAX_RATIO} times its size; {advice}",
                "too_large",
            )
        self._lines_left -= max(data.count(b"\n"), data.count(b"\r"))
        if self._lines_left < 0:
            advice = "unpack it with gunzip if you trust it"
            message = (
                f"{self._path} has more than {self._most_lines} lines, too many for its "
                f"size; {advice}"
            )
            raise CorpusError(message, "too_large")
        buffer[: len(data)] = data
        return len(data)


def _encoding(start: bytes) -> str:
    # with two more zeros, the mark is that of UTF-32
    is_utf16 = start[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) and start[2:4] != b"\0\0"
    return "utf-16" if is_utf16 else "utf-8-sig"


def _too_large(where: str, what: str) -> CorpusError:
    advice = "shorten the text, or leave the row out"
    return CorpusError(f"{where}: expected at most {what} characters; {advice}", "too_large")


def check_columns(where: object, columns: Sequence[str], required: Sequence[str]) -> None:
    """Raise CorpusError that names the missing and the present columns when a required one is
    missing or repeated.
    """
    repeated = [name for name in required if columns.count(name) > 1]
    if repeated:
        message = (
            f"{where} has the column {repeated[0]} {columns.count(repeated[0])} times; "
            f"rename or remove all but one"
        )
        raise CorpusError(message, "conflict", field=repeated[0])
    missing = [name for name in required if name not in columns]
    if missing:
        plural = "s" if len(missing) > 1 else ""
        present = ", ".join(columns[:_SHOWN]) + (
            f" and {len(columns) - _SHOWN} more" if len(columns) > _SHOWN else ""
        )
        message = f"{where} lacks the column{plural} {', '.join(missing)}; it has {present}"
        raise CorpusError(message, "missing", field=missing[0])


def order_studies(times: Mapping[str, Mapping[str, tuple[Any, ...]]]) -> dict[str, int]:
    """Return study -> its place among its patient's studies, from patient -> study -> a key to
    sort by.
    """
    return {
        study: order
        for studies in times.values()
        for order, study in enumerate(sorted(studies, key=studies.__getitem__))
    }


def read_header(path: Path, folders: InputFolders) -> list[str]:
    """Return the column names of a CSV table with commas, for releases whose names differ.

    Raises CorpusError as `read_lines`.
    """
    line = next(read_lines(path, folders), "")
    return [name.strip() for name in next(csv.reader([line]), [])]


def find_file(root: Path, *names: str) -> Path:
    """Return the first of `names` that is a file below `root`. Raises CorpusError naming all of
    them when none is.
    """
    for name in names:
        if (root / name).is_file():
            return root / name
    advice = "give the root of the release (see the data card)"
    raise CorpusError(f"{root} contains none of {', '.join(names)}: {advice}", "not_found")


def find_suffix(image: Path, suffixes: Sequence[str]) -> str | None:
    """Return the first suffix with which `image` exists, or None; all images of a release have
    the same one.
    """
    return next((suffix for suffix in suffixes if image.with_suffix(suffix).is_file()), None)


def malformed(where: object, message: str, field: str | None = None) -> CorpusError:
    """Return an error about a file (or a line of it) that does not match the data card."""
    return CorpusError(f"{where}: {message}", "malformed", field=field)


def split_training(validate_share: float) -> dict[str, float]:
    """Return the shares of train and validate. Raises ConfigError when the latter is not between
    0 and 1.
    """
    if not 0 < validate_share < 1:
        message = f"validate_share must be between 0 and 1, got {validate_share:g}"
        raise ConfigError(message, "out_of_range", field="validate_share")
    return {"train": 1 - validate_share, "validate": validate_share}


class OwnStudy(TypedDict):
    """Pseudonyms of an image that is a patient and a study of its own."""

    key: str
    patient: str
    study: str


def own_study(image: str, deid: Deidentifier) -> OwnStudy:
    """Return the pseudonyms of an image whose release names neither patients nor studies."""
    return OwnStudy(
        key=deid.image(image), patient=deid.patient(image), study=deid.study(image, image)
    )


def no_patients_note(unit: str, warning: str) -> str:
    """Return the note of a release without patient ids, where each image or study is a patient."""
    return (
        f"The release names no patient: each {unit} counts as one, and a patient may be in two "
        f"splits (warnings.{warning} of the manifest)."
    )


def parse_findings(row: Mapping[str, str], path: Path) -> dict[str, int]:
    """Return label -> 1, 0 or -1 of a row's CheXpert findings, without blanks. Raises
    CorpusError on other values.
    """
    labels = {}
    for name in FINDINGS:
        value = row[name].strip()
        if not value:
            continue
        if value not in _LABEL_VALUES:
            raise malformed(path, f"expected 1, 0, -1 or blank for {name}, got another value", name)
        labels[name] = _LABEL_VALUES[value]
    return labels
