"""Your own data: one table (CSV, JSON lines or Parquet) with one row per image or text. Fields:
`data_cards/table.md`.
"""

import contextlib
import dataclasses
import itertools
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from medvl.common.untrusted import ANYWHERE
from medvl.data.corpora.common.formats import (
    ParquetLimits,
    check_text_lengths,
    is_text,
    read_parquet,
)
from medvl.data.corpora.common.record_file import Records
from medvl.data.corpora.common.rows import (
    IMAGES,
    RowChecks,
    RowCounts,
    cell_id,
    cell_label,
    cell_list,
    cell_text,
    equals,
    is_like_decimal,
    json_value,
    raw_text,
    report_text,
    text_sections,
)
from medvl.data.corpora.common.tables import (
    MAX_CELL_CHARACTERS,
    Plan,
    Record,
    malformed,
    number_json_lines,
    number_table_rows,
    report_sections,
)
from medvl.data.corpora.registry import Corpus, FileAccess, register_corpus
from medvl.data.privacy import CODES, Deidentifier, cap_age, find_identifiers, free_texts
from medvl.data.reports.sections import parse_report
from medvl.data.reports.sentences import join_texts
from medvl.data.splits import (
    DEFAULT_FRACTIONS,
    check_name,
    hash_split,
    named_values,
    parse_fractions,
)
from medvl.errors import ConfigError, CorpusError
from medvl.schema import Sample

_SEX = {"f": "F", "female": "F", "m": "M", "male": "M"}
_MAX_CATEGORIES = 200
_SUFFIX = re.compile(r"\.\w{1,10}")
_IMAGE_SUFFIX = re.compile(r"\.(?:jpe?g|png|dcm|dicom|tiff?|bmp|webp)$", re.IGNORECASE)
_PARQUET_LIMITS = ParquetLimits(
    rows=1 << 4,  # a text that many rows share is copied for each of them
    memory=1 << 28,  # one cell can fill a group
    group=1 << 28,
    cell=4 * MAX_CELL_CHARACTERS,
    advice="shorten the texts, or write the table with a smaller row_group_size",
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TableColumns:
    """Column names by meaning. Only the columns named here are read; nothing else reaches a
    shard.
    """

    image_column: str | None = None
    """Path of the image, relative to the image root. None: every row is a text without an image."""
    patient_column: str
    """Patient id, which splits are disjoint by; hashed."""
    text_column: tuple[str, ...] = ()
    """Columns with a report, a caption, or sections of a report, which are stored under the
    section's name (`findings` for `section_findings`), or under a given one as SECTION=COLUMN.
    Texts of the same section are joined.
    """
    study_column: str | None = None
    """Study id; images of one study share their report. Default: each row is a study. Hashed."""
    split_column: str | None = None
    """Split; default: by hash of the patient."""
    label_column: tuple[str, ...] = ()
    """Columns with 1 or true, 0 or false, -1 (uncertain), or nothing."""
    category_column: tuple[str, ...] = ()
    """Columns with one of a few words: each word becomes a label `column=word`."""
    tags_column: tuple[str, ...] = ()
    """Columns with a list (JSON, or separated by `|`): each entry becomes a label, 1 where
    listed, else 0.
    """
    view_column: str | None = None
    sex_column: str | None = None
    age_column: str | None = None
    extra_column: tuple[str, ...] = ()
    """Further columns, kept unchanged. Likely identifiers in them are counted, not removed: name
    only what may be shared.
    """

    def __post_init__(self) -> None:
        if self.image_column is None and not self.text_column:
            raise ConfigError(
                "give an image column, a text column, or both", "missing", field="image_column"
            )

    @property
    def sections(self) -> list[tuple[str, str]]:
        """Section and column of each text column."""
        return text_sections(self.text_column)

    def names(self) -> list[str]:
        """Return every column that is read, once."""
        texts = tuple(column for _, column in self.sections)
        values = [
            texts if field.name == "text_column" else getattr(self, field.name)
            for field in dataclasses.fields(self)
        ]
        names = (
            name
            for value in values
            if value
            for name in ((value,) if isinstance(value, str) else value)
        )
        return list(dict.fromkeys(names))


@register_corpus("table")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Table(Corpus):
    """Convert your own table with one row per image, or per text without an image.

    Without a text column, all images are kept, for their labels; without an image column, all
    texts.
    """

    table: Path
    """.csv, .jsonl (also .gz) or .parquet."""
    columns: TableColumns
    """names of its columns."""
    name: str = "table"
    """name of the corpus."""
    image_root: Path | None = None
    """folder that image paths are relative to; default: the folder of the table."""
    image_suffix: str = ""
    """suffix of the image files, such as .png, where the table has another one."""
    patient_pattern: str = ""
    """regular expression of the id within the patient column, such as 'PMC\\d+'; its first group,
    if it has one.
    """
    where: tuple[str, ...] = ()
    """keep only rows with these values, such as source=nih."""
    splits: tuple[str, ...] = ("train=0.8", "validate=0.1", "test=0.1")
    """fractions of the splits, for a table without a split column."""
    parse_reports: bool = False
    """split each text into report sections."""
    keep_imageless: bool = False
    """keep rows with an empty image cell, as texts without an image."""

    def keeps_textless(self) -> bool:
        return not self.columns.text_column

    def plan(self, deid: Deidentifier, access: FileAccess = FileAccess()) -> Plan:
        """Plan the samples of the table; no image is opened.

        Invalid rows are counted as skipped; `Plan.rows.messages` names file, row and problem of
        each.

        Raises CorpusError when the table cannot be read, lacks a column or lists an image file
        twice; SplitError when a patient is in two splits; ConfigError when an option is invalid.
        """
        check_name(self.name, "name")
        table = self.table
        columns = self.columns
        where = named_values(self.where, "where")
        if self.image_suffix and not _SUFFIX.fullmatch(self.image_suffix):
            message = f"expected a suffix such as .png, got {self.image_suffix}"
            raise ConfigError(message, "malformed", field="image_suffix")
        root = self.image_root if self.image_root is not None else table.parent
        folders = access.folders(root)
        _check_root(table, root, columns)
        fractions = DEFAULT_FRACTIONS if columns.split_column else parse_fractions(self.splits)
        required = [*columns.names(), *where]

        def is_selected(row: Mapping[str, Any]) -> bool:
            return all(equals(row[column], value) for column, value in where.items())

        # The table may not fit in memory: it is read for its labels, then for its rows.
        valid = (row for _, row in _read_rows(table, required) if not isinstance(row, CorpusError))
        labels = _collect_labels(filter(is_selected, valid), columns, table)
        real = Path(os.path.realpath(root))
        warnings = Counter[str]()
        reader = _RowReader(
            table,
            real,
            columns,
            deid,
            self.name,
            fractions,
            self.parse_reports,
            labels,
            warnings,
            self.keep_imageless,
            self.image_suffix,
            _compile(self.patient_pattern),
        )
        rows = RowCounts("rows" if columns.image_column is None else IMAGES)
        records = Records()
        checks = RowChecks(table)
        for number, row in rows.reading(_read_rows(table, required)):
            try:
                if isinstance(row, CorpusError):
                    raise row
                if not is_selected(row):
                    rows.exclude("where")
                    continue
                sample = reader.sample(number, row)
            except CorpusError as error:
                rows.skip(f"{'cell' if error.field else 'row'}_{error.code}", message=str(error))
            else:
                records.append(Record(sample))
                rows.kept += 1
                checks.add(number, sample)
        checks.finish()
        return Plan(self.name, records, labels.names, rows, +warnings, folders)


def _compile(pattern: str) -> re.Pattern[str] | None:
    if not pattern:
        return None
    try:
        return re.compile(pattern)
    except re.error as error:
        message = f"expected a regular expression, got {pattern} ({error})"
        raise ConfigError(message, "malformed", field="patient_pattern") from None


def _check_root(table: Path, root: Path, columns: TableColumns) -> None:
    if columns.image_column is not None and table.exists() and not root.is_dir():
        state = "is a file: unpack an archive first" if root.exists() else "does not exist"
        raise ConfigError(
            f"expected a folder of images; {root} {state}", "not_found", field="image_root"
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _Labels:
    """Label names of a table."""

    plain: tuple[str, ...]
    by_category: Mapping[str, tuple[str, ...]]
    tags: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """All label names, in the order of the shards' label columns."""
        categories = [
            f"{column}={word}" for column, words in self.by_category.items() for word in words
        ]
        return (*self.plain, *categories, *self.tags)


@dataclasses.dataclass(frozen=True, slots=True)
class _RowReader:
    """Converter of rows to samples, with the settings of `plan`."""

    table: Path
    root: Path
    columns: TableColumns
    deid: Deidentifier
    name: str
    fractions: Mapping[str, float]
    parse_reports: bool
    labels: _Labels
    warnings: Counter[str]
    keep_imageless: bool
    image_suffix: str
    patient_pattern: re.Pattern[str] | None

    def sample(self, number: int, row: Mapping[str, Any]) -> Sample:
        """Return the sample of a row. Raises CorpusError for an empty required cell or an
        invalid value.
        """
        columns = self.columns
        self._check_plain(number, row)
        image_text = cell_text(row[columns.image_column]) if columns.image_column else ""
        patient_text = self._patient(number, row)
        if not patient_text or not (
            image_text or self.keep_imageless or columns.image_column is None
        ):
            field = columns.image_column if patient_text else columns.patient_column
            raise CorpusError(
                f"{self.table}, row {number}: {field} is empty", "missing", field=field
            )
        name = image_text or f"{self.name} row {number}"
        study_text = (
            self._id(number, row, columns.study_column) if columns.study_column else ""
        ) or name
        patient = self.deid.patient(patient_text)
        return Sample(
            key=self.deid.image(name),
            corpus=self.name,
            split=self._split(number, row, patient),
            patient=patient,
            study=self.deid.study(patient_text, study_text),
            image=self._image(number, image_text) if image_text else None,
            sections=self._sections(number, row),
            labels=self._labels(number, row),
            view=(cell_text(row[columns.view_column]) or None) if columns.view_column else None,
            sex=self._sex(row),
            age=self._age(row),
            extra=self._extra(row),
        )

    def _extra(self, row: Mapping[str, Any]) -> dict[str, object]:
        extra = {
            column: json_value(row[column])
            for column in self.columns.extra_column
            if raw_text(row[column])
        }
        # own columns with these names hold no codes of a converter
        for column in CODES & extra.keys():
            for kind in itertools.chain.from_iterable(
                map(find_identifiers, free_texts(extra[column]))
            ):
                self.warnings[f"possible_{kind}"] += 1
        return extra

    def _malformed(self, number: int, column: str, message: str) -> CorpusError:
        return malformed(f"{self.table}, row {number}", f"{column} {message}", column)

    def _check_plain(self, number: int, row: Mapping[str, Any]) -> None:
        """Raise CorpusError for a list, an object or bytes where a text or a number is read."""
        lists = {*self.columns.tags_column, *self.columns.extra_column}
        for column, value in row.items():
            if (
                isinstance(value, list | dict | bytes)
                and column in self.columns.names()
                and column not in lists
            ):
                raise self._malformed(
                    number, column, "must be a text or a number, not a list or binary data"
                )

    def _id(self, number: int, row: Mapping[str, Any], column: str) -> str:
        try:
            text = cell_id(row[column])
        except ValueError:
            message = "has a number that was rounded, such as 1.2E+15; write the ids as text"
            raise self._malformed(number, column, message) from None
        self.warnings["ids_like_1.0"] += is_like_decimal(text)
        return text

    def _patient(self, number: int, row: Mapping[str, Any]) -> str:
        column = self.columns.patient_column
        text = self._id(number, row, column)
        if self.patient_pattern is None or not text:
            return text
        match = self.patient_pattern.search(text)
        if match is None or not match[min(match.re.groups, 1)]:
            raise self._malformed(number, column, "has no match of --patient-pattern")
        return match[min(match.re.groups, 1)]

    def _sex(self, row: Mapping[str, Any]) -> str | None:
        text = cell_text(row[self.columns.sex_column]).lower() if self.columns.sex_column else ""
        self.warnings["unknown_sex"] += bool(text) and text not in _SEX
        return _SEX.get(text)

    def _age(self, row: Mapping[str, Any]) -> int | None:
        if self.columns.age_column is None:
            return None
        age = cap_age(row[self.columns.age_column])
        self.warnings["unknown_age"] += (
            age is None and cell_text(row[self.columns.age_column]) != ""
        )
        return age

    def _image(self, number: int, text: str) -> Path:
        if self.image_suffix:
            text = f"{_IMAGE_SUFFIX.sub('', text)}{self.image_suffix}"
        path = Path(os.path.normpath(self.root / text))  # links are checked when the file is opened
        if not path.is_relative_to(self.root):
            raise self._malformed(
                number,
                str(self.columns.image_column),
                "is outside the image root: set --image-root",
            )
        return path

    def _split(self, number: int, row: Mapping[str, Any], patient: str) -> str:
        if self.columns.split_column is None:
            return hash_split(patient, self.fractions)
        split = cell_text(row[self.columns.split_column])
        if not split.replace("-", "").replace("_", "").isalnum():
            raise self._malformed(
                number, self.columns.split_column, "must be a plain word, as it names a folder"
            )
        return split

    def _sections(self, number: int, row: Mapping[str, Any]) -> dict[str, str]:
        sections: dict[str, str] = {}
        for section, column in self.columns.sections:
            text = report_text(row[column], self.warnings)
            if len(text) > MAX_CELL_CHARACTERS:
                message = (
                    f"{self.table}, row {number}: {column} has more than "
                    f"{MAX_CELL_CHARACTERS} characters"
                )
                raise CorpusError(
                    f"{message}; shorten the text, or leave the row out", "too_large", field=column
                )
            parts = {section: text} if text else {}
            if text and self.parse_reports:
                report = parse_report(text)
                if report.has_headers:
                    parts = report_sections(report, self.warnings)
            for name, part in parts.items():
                known = sections.get(name, part)
                sections[name] = part if known == part else join_texts([known, part])
        return sections

    def _labels(self, number: int, row: Mapping[str, Any]) -> dict[str, int]:
        labels: dict[str, int] = {}
        invalid = []
        for column in self.columns.label_column:
            try:
                label = cell_label(row[column])
            except ValueError:
                invalid.append(column)
            else:
                if label is not None:
                    labels[column] = label
        if invalid:
            raise self._malformed(
                number, ", ".join(invalid), "must be 1, 0, -1, true, false or empty"
            )
        for column, words in self.labels.by_category.items():
            value = cell_text(row[column])
            if value:
                labels.update({f"{column}={word}": int(word == value) for word in words})
        if self.columns.tags_column:
            listed = {
                tag
                for column in self.columns.tags_column
                for tag in self._tags(number, row, column)
            }
            labels.update({tag: int(tag in listed) for tag in self.labels.tags})
        return labels

    def _tags(self, number: int, row: Mapping[str, Any], column: str) -> list[str]:
        try:
            return cell_list(row[column])
        except ValueError:
            raise self._malformed(
                number, column, "must be a list in JSON, or entries separated by |"
            ) from None


def _collect_labels(
    rows: Iterable[Mapping[str, Any]], columns: TableColumns, table: Path
) -> _Labels:
    categories: dict[str, set[str]] = {column: set() for column in columns.category_column}
    listed: set[str] = set()
    for row in rows:
        for column, words in categories.items():
            words.add(cell_text(row[column]))
        for column in columns.tags_column:
            with contextlib.suppress(ValueError):  # the row is skipped
                listed.update(cell_list(row[column]))
    by_category = {column: tuple(sorted(words - {""})) for column, words in categories.items()}
    for column, values in by_category.items():
        if len(values) > _MAX_CATEGORIES:
            message = (
                f"{table}: {column} has {len(values)} different values, over the limit of "
                f"{_MAX_CATEGORIES}"
            )
            raise CorpusError(message, "too_large", field=column)
    tags = tuple(sorted(listed))
    labels = _Labels(columns.label_column, by_category, tags)
    if len(set(labels.names)) != len(labels.names):
        raise ConfigError(f"{table}: two columns produce the same label name", "conflict")
    return labels


def _read_rows(
    table: Path, required: list[str]
) -> Iterator[tuple[int, Mapping[str, Any] | CorpusError]]:
    """Yield (row number, counted from 1; row, or its error)."""
    kind = table.name.removesuffix(".gz").rpartition(".")[2]
    if kind in ("csv", "tsv"):
        yield from number_table_rows(table, required, ANYWHERE)
    elif kind == "jsonl":
        yield from number_json_lines(table, required, ANYWHERE)
    elif kind == "parquet":
        yield from _read_parquet(table, required)
    else:
        raise CorpusError(
            f"{table}: expected .csv, .tsv, .jsonl or .parquet (all but the last also .gz)",
            "unsupported",
        )


def _read_parquet(table: Path, required: list[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    def check_batch(batch: Any, number: int) -> None:
        check_text_lengths(table, batch, number, 4 * MAX_CELL_CHARACTERS)
        fields = filter(lambda field: not is_text(field.type), batch.schema)
        if sum(batch.column(field.name).nbytes for field in fields) > (
            _PARQUET_LIMITS.rows * MAX_CELL_CHARACTERS
        ):
            limit = f"at most {MAX_CELL_CHARACTERS} bytes in a cell"
            raise CorpusError(f"{table}, after row {number}: expected {limit}", "too_large")

    return read_parquet(table, required, ANYWHERE, _PARQUET_LIMITS, check_batch=check_batch)
