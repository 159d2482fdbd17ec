"""A lab's own data: one table (CSV, JSON lines or Parquet) with a row an image. Fields: `data_cards/table.md`."""

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from medvl.data.corpora.common.record_file import Records
from medvl.data.corpora.common.tables import Plan, Record, check_columns, open_text, read_table
from medvl.data.privacy.deidentify import Deidentifier, cap_age
from medvl.data.reports.sections import parse_report
from medvl.data.splits import DEFAULT_FRACTIONS, check_fractions, hash_split
from medvl.errors import ConfigError, CorpusError
from medvl.schema import Sample

_SEX = {"f": "F", "female": "F", "m": "M", "male": "M"}
_MAX_CATEGORIES = 200


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TableColumns:
    """What the columns of a table mean. Only the columns named here are read; nothing else reaches a shard."""

    image_column: str
    """Path of the image, relative to the image root."""
    patient_column: str
    """What splits are disjoint by; hashed."""
    text_column: tuple[str, ...] = ()
    """Report, caption, or its sections, a column each."""
    study_column: str | None = None
    """Images of one study share their report; default: every image is its own study. Hashed."""
    split_column: str | None = None
    """The table's own split; default: by hash of the patient."""
    label_column: tuple[str, ...] = ()
    """Columns that hold 1, 0, -1 (uncertain) or nothing."""
    category_column: tuple[str, ...] = ()
    """Columns that hold one of a few words: each word becomes a label `column=word`."""
    tags_column: tuple[str, ...] = ()
    """Columns that hold a list (JSON, or separated by `|`): each entry becomes a label, 1 where listed, else 0."""
    view_column: str | None = None
    sex_column: str | None = None
    age_column: str | None = None
    extra_column: tuple[str, ...] = ()
    """Further columns to keep as they are. They are not de-identified: name only what may be shared."""

    def names(self) -> list[str]:
        """Every column that is read."""
        values = [getattr(self, field.name) for field in dataclasses.fields(self)]
        return [name for value in values if value for name in ((value,) if isinstance(value, str) else value)]


def plan(
    table: Path,
    columns: TableColumns,
    deid: Deidentifier,
    *,
    name: str = "table",
    image_root: Path | None = None,
    where: Mapping[str, str] | None = None,
    fractions: Mapping[str, float] = DEFAULT_FRACTIONS,
    parse_reports: bool = False,
) -> Plan:
    """What the table says; no image is opened.

    Args:
        table: `.csv`, `.csv.gz`, `.jsonl`, `.jsonl.gz` or `.parquet`.
        columns: what its columns mean.
        deid: hashes patient, study and image.
        name: of the corpus, in keys and manifests.
        image_root: folder that image paths are relative to, and must lie in; default the table's own.
        where: keep only rows whose column has this value.
        fractions: of the splits, when the table has no split column.
        parse_reports: take each text apart into its sections (FINDINGS, IMPRESSION, ...).

    Raises:
        CorpusError: the table cannot be read, lacks a column, or holds a value that does not fit (the row is named).
        ConfigError: the split fractions do not sum to one.
    """
    table, where = Path(table), dict(where or {})
    root = Path(image_root) if image_root is not None else table.parent
    if columns.split_column is None:
        check_fractions(fractions)
    required = [*columns.names(), *where]

    def asked_for(row: Mapping[str, Any]) -> bool:
        return all(_has(row[column], value) for column, value in where.items())

    # The table is read twice, for its labels and for its rows: held in memory, it would grow with the corpus.
    known = _collect_labels((row for _, row in _read_rows(table, required) if asked_for(row)), columns, table)
    reader = _RowReader(table, root.resolve(), columns, deid, name, fractions, parse_reports, known)
    records, excluded = Records(), Counter[str]()
    for number, row in _read_rows(table, required):
        if asked_for(row):
            records.append(Record(reader.sample(number, row)))
        else:
            excluded["where"] += 1
    return Plan(name, records, known.names, excluded)


@dataclasses.dataclass(frozen=True, slots=True)
class _Labels:
    """The label names that a table gives rise to."""

    plain: tuple[str, ...]
    by_category: Mapping[str, tuple[str, ...]]
    tags: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        categories = [f"{column}={word}" for column, words in self.by_category.items() for word in words]
        return (*self.plain, *categories, *self.tags)


@dataclasses.dataclass(frozen=True, slots=True)
class _RowReader:
    table: Path
    root: Path
    columns: TableColumns
    deid: Deidentifier
    name: str
    fractions: Mapping[str, float]
    parse_reports: bool
    known: _Labels

    def sample(self, number: int, row: Mapping[str, Any]) -> Sample:
        columns = self.columns
        image_text, patient_text = _text(row[columns.image_column]), _text(row[columns.patient_column])
        if not image_text or not patient_text:
            raise self._wrong(number, f"{columns.image_column} or {columns.patient_column} is empty")
        study_text = (_text(row[columns.study_column]) if columns.study_column else "") or image_text
        patient = self.deid.patient(patient_text)
        return Sample(
            key=self.deid.image(image_text),
            corpus=self.name,
            split=self._split(number, row, patient),
            patient=patient,
            study=self.deid.study(patient_text, study_text),
            image=self._image(number, image_text),
            sections=self._sections(row),
            labels=self._labels(number, row),
            view=(_text(row[columns.view_column]) or None) if columns.view_column else None,
            sex=_SEX.get(_text(row[columns.sex_column]).lower()) if columns.sex_column else None,
            age=cap_age(row[columns.age_column]) if columns.age_column else None,
            extra={column: _plain(row[column]) for column in columns.extra_column if _text(row[column])},
        )

    def _image(self, number: int, text: str) -> Path:
        path = (self.root / text).resolve()
        if not path.is_relative_to(self.root):
            raise self._wrong(
                number, f"{self.columns.image_column} leads out of the image root: name that with --image-root"
            )
        return path

    def _split(self, number: int, row: Mapping[str, Any], patient: str) -> str:
        if self.columns.split_column is None:
            return hash_split(patient, self.fractions)
        split = _text(row[self.columns.split_column])
        if not split.replace("-", "").replace("_", "").isalnum():
            raise self._wrong(number, f"{self.columns.split_column} must be a plain word, as it names a folder")
        return split

    def _sections(self, row: Mapping[str, Any]) -> dict[str, str]:
        sections: dict[str, str] = {}
        for column in self.columns.text_column:
            text = _text(row[column])
            if text and self.parse_reports:
                report = parse_report(text)
                sections.update(report.sections or {column: text})
            elif text:
                sections[column] = text
        return sections

    def _labels(self, number: int, row: Mapping[str, Any]) -> dict[str, int]:
        labels: dict[str, int] = {}
        for column in self.columns.label_column:
            text = _text(row[column])
            if text:
                if text not in ("1", "0", "-1", "1.0", "0.0", "-1.0"):
                    raise self._wrong(number, f"{column} must be 1, 0, -1 or empty")
                labels[column] = int(float(text))
        for column, words in self.known.by_category.items():
            value = _text(row[column])
            if value:
                labels.update({f"{column}={word}": int(word == value) for word in words})
        if self.columns.tags_column:
            listed = {tag for column in self.columns.tags_column for tag in _list(row[column])}
            labels.update({tag: int(tag in listed) for tag in self.known.tags})
        return labels

    def _wrong(self, number: int, what: str) -> CorpusError:
        return CorpusError(f"{self.table}, row {number}: {what}")


def _collect_labels(rows: Iterable[Mapping[str, Any]], columns: TableColumns, table: Path) -> _Labels:
    found: dict[str, set[str]] = {column: set() for column in columns.category_column}
    listed: set[str] = set()
    for row in rows:
        for column, words in found.items():
            words.add(_text(row[column]))
        for column in columns.tags_column:
            listed.update(_list(row[column]))
    by_category = {column: tuple(sorted(words - {""})) for column, words in found.items()}
    for column, values in by_category.items():
        if len(values) > _MAX_CATEGORIES:
            raise CorpusError(f"{table}: {column} holds {len(values)} different values; a category has few")
    tags = tuple(sorted(listed))
    labels = _Labels(columns.label_column, by_category, tags)
    if len(set(labels.names)) != len(labels.names):
        raise ConfigError(f"{table}: two columns give rise to the same label name")
    return labels


def _read_rows(table: Path, required: list[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """(row number, counted from 1, row)."""
    kind = table.name.removesuffix(".gz").rpartition(".")[2]
    if kind == "csv":
        yield from enumerate(read_table(table, required), start=1)
    elif kind == "jsonl":
        yield from read_json_lines(table, required)
    elif kind == "parquet":
        yield from _read_parquet(table, required)
    else:
        raise CorpusError(f"{table}: a table ends in .csv, .jsonl or .parquet (the first two also .gz)")


def read_json_lines(table: Path, required: Sequence[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """(line number, counted from 1, object) of a JSON lines file, gzipped or not; blank lines are passed over.

    Raises CorpusError when the file is missing, a line is no JSON object, or an object lacks a required field.
    """
    with open_text(table) as file:
        try:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise CorpusError(f"{table}, row {number}: not a JSON object")
                check_columns(table, list(row), required)
                yield number, row
        except (ValueError, EOFError, OSError) as error:
            raise CorpusError(f"{table} cannot be read as JSON lines ({type(error).__name__})") from error


def _read_parquet(table: Path, required: list[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(table)
        check_columns(table, file.schema_arrow.names, required)
        number = 0
        for batch in file.iter_batches(columns=sorted(set(required))):
            for row in batch.to_pylist():
                number += 1
                yield number, row
    except FileNotFoundError:
        raise CorpusError(f"{table} does not exist") from None
    except pyarrow.ArrowException as error:
        raise CorpusError(f"{table} cannot be read as Parquet ({type(error).__name__})") from error


def _text(value: object) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, bool):
        return str(int(value))
    return str(value).strip()


def _has(value: object, wanted: str) -> bool:
    """Whether a cell is what was asked for; a boolean of JSON or Parquet is true or 1, false or 0."""
    if isinstance(value, bool):
        return wanted.lower() in (str(value).lower(), str(int(value)))
    return _text(value) == wanted


def _plain(value: object) -> object:
    return value if isinstance(value, str | int | float | bool | list | dict) else str(value)


def _list(value: object) -> list[str]:
    if isinstance(value, list | tuple):
        return [_text(entry) for entry in value if _text(entry)]
    text = _text(value)
    if text.startswith("["):
        try:
            return _list(json.loads(text))
        except ValueError:
            pass  # not JSON after all: a plain word that begins with a bracket
    return [part.strip() for part in text.split("|") if part.strip()]
