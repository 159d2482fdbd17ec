"""Parquet files with images inside, as data sets of the Hugging Face hub. Card:
`data_cards/parquet.md`.

Texts are read a few rows at a time, and images page by page; they stay in the files.
"""

import dataclasses
import re
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from medvl.common.untrusted import ANYWHERE
from medvl.data.annotations import Question
from medvl.data.corpora.common import questions as vqa
from medvl.data.corpora.common.formats import (
    ParquetLimits,
    check_text_lengths,
    entry_type,
    has_bytes,
    is_binary,
    is_text,
    read_parquet,
)
from medvl.data.corpora.common.parquet_pages import ByteColumn, PageSizeError, Value
from medvl.data.corpora.common.record_file import Records
from medvl.data.corpora.common.rows import (
    RowCounts,
    cell_id,
    cell_label,
    cell_text,
    equals,
    json_value,
    raw_text,
    report_text,
    text_sections,
)
from medvl.data.corpora.common.tables import MAX_CELL_CHARACTERS, Plan, Record, malformed
from medvl.data.corpora.registry import Corpus, FileAccess, register_corpus
from medvl.data.privacy import Deidentifier
from medvl.data.reports.sentences import join_texts
from medvl.data.splits import check_disjoint, check_name, hash_split, named_values, parse_fractions
from medvl.data.storage.location import Location, RemotePath, locate
from medvl.errors import ConfigError, CorpusError
from medvl.schema import FilePart, Sample

_SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "validate", "valid", "val", "dev"), "validate"),
    **dict.fromkeys(("test", "testing"), "test"),
}
"""Word in the name of a file or of its folder -> split."""
_WILDCARD = re.compile(r"[^/]*[*?\[]")
_LIMITS = ParquetLimits(
    rows=16,
    memory=3 << 28,  # below the 1 GiB that Arrow reserves
    group=1 << 32,
    cell=1 << 26,
    advice="write the file again with pyarrow and a smaller row_group_size",
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ParquetColumns:
    """Column names by meaning. Only the columns named here are read; nothing else reaches a
    shard.
    """

    image_column: str = "image"
    """Encoded image: bytes, a struct with the field `bytes`, or a list of either, whose images
    are one study.
    """
    text_column: tuple[str, ...] = ()
    """Columns with a text or a list of texts, as COLUMN or as SECTION=COLUMN, such as
    findings=section_findings.
    """
    label_column: tuple[str, ...] = ()
    """Columns with 1 or true, 0 or false, -1 (uncertain), or nothing."""
    question_column: str | None = None
    """Question about the image. Rows with equal images become one sample with all their
    questions.
    """
    answer_column: str | None = None
    """Answer to the question; of questions with options, its text or letter."""
    options_column: str | None = None
    """List of the options of a question, with or without letters."""
    kind_column: str | None = None
    """Type of the question."""
    group_column: str | None = None
    """Patient or article, which splits are disjoint by; hashed."""
    split_column: str | None = None
    """Split; default: from the names of the files."""
    extra_column: tuple[str, ...] = ()
    """Further columns, kept unchanged: name only what may be shared."""

    def __post_init__(self) -> None:
        if (self.question_column is None) != (self.answer_column is None):
            field = "answer_column" if self.answer_column is None else "question_column"
            message = "expected both --question-column and --answer-column, got one of them"
            raise ConfigError(message, "missing", field=field)
        others = (*self.text_column, *self.label_column, *self.extra_column)
        if self.question_column is not None and others:
            message = "expected questions, or texts, labels and extra columns, got both"
            raise ConfigError(
                f"{message}; convert them one by one", "conflict", field="question_column"
            )
        if self.question_column is None and not (self.text_column or self.label_column):
            message = "give --text-column, --label-column, or --question-column and --answer-column"
            raise ConfigError(message, "missing", field="text_column")

    @property
    def sections(self) -> list[tuple[str, str]]:
        """Section and column of each text column."""
        return text_sections(self.text_column)

    @property
    def plain(self) -> list[str]:
        """Columns with a text or a number in each cell."""
        names = [self.question_column, self.answer_column, self.kind_column, self.group_column]
        return [*filter(None, [*names, self.split_column]), *self.label_column]

    def names(self) -> list[str]:
        """Return every column that is read."""
        texts = [column for _, column in self.sections]
        options = [] if self.options_column is None else [self.options_column]
        return [self.image_column, *texts, *options, *self.plain, *self.extra_column]

    def check_types(self, path: Path, schema: Any) -> None:
        """Raise CorpusError for a column whose Arrow type cannot be read as its meaning."""
        from pyarrow import types

        def check(column: str, fits: bool, expected: str) -> None:
            if not fits:
                kind = schema.field(column).type
                message = f"{path}: expected {expected} in {column}, got {kind}"
                raise CorpusError(message, "wrong_type", field=column)

        check(
            self.image_column,
            has_bytes(schema.field(self.image_column).type),
            "bytes, a struct with bytes, or a list of either (for paths: medvl shards table)",
        )
        for _, column in self.sections:
            kind = entry_type(schema.field(column).type)
            check(column, is_text(kind) or types.is_null(kind), "texts or lists of texts")
        if self.options_column is not None:
            kind = entry_type(schema.field(self.options_column).type)
            check(self.options_column, is_text(kind), "lists of texts")
        for column in self.plain:
            kind = schema.field(column).type
            check(column, not (types.is_nested(kind) or is_binary(kind)), "texts or numbers")


@register_corpus("parquet")
@dataclasses.dataclass(frozen=True, kw_only=True)
class ParquetFiles(Corpus):
    """Convert Parquet files with images inside, such as data sets of the Hugging Face hub.

    The conversion reads the images from the files. Remote files are copied into the private folder
    first, and removed from it at the end.
    """

    files: tuple[str, ...]
    """paths, folders or addresses of the files, with wildcards: 'data/train-*.parquet',
    'hf://datasets/OWNER/NAME@COMMIT/data/*.parquet'.
    """
    columns: ParquetColumns
    """names of their columns."""
    name: str = "parquet"
    """name of the corpus."""
    rows_are_patients: bool = False
    """declare that rows share no patient and no article, where no column names them."""
    split: str | None = None
    """split of all files, instead of the one in each file's name."""
    splits: tuple[str, ...] = ()
    """fractions, such as train=0.9 test=0.1: split by hash of the patient or article, instead of
    the names of the files.
    """
    where: tuple[str, ...] = ()
    """keep only rows with these values, such as modality=CT."""

    def __post_init__(self) -> None:
        check_name(self.name, "name")
        columns = self.columns
        sources = {
            "--split": self.split,
            "--splits": self.splits,
            "--split-column": columns.split_column,
        }
        options = [option for option, value in sources.items() if value]
        if len(options) > 1:
            raise ConfigError(
                f"expected one source of splits, got {' and '.join(options)}",
                "conflict",
                field="split",
            )
        if self.split is not None:
            check_name(self.split, "split")
        is_grouped = columns.group_column is not None or columns.question_column is not None
        if not is_grouped and not self.rows_are_patients:
            message = (
                "expected --group-column with the patient or article of each row; if rows share "
                "none, declare it with --rows-are-patients"
            )
            raise ConfigError(message, "missing", field="rows_are_patients")
        if is_grouped and self.rows_are_patients:
            grouped_by = "--group-column" if columns.group_column else "the images of questions"
            message = f"rows are grouped by {grouped_by}; leave out --rows-are-patients"
            raise ConfigError(message, "conflict", field="rows_are_patients")

    def keeps_textless(self) -> bool:
        return not self.columns.text_column

    def plan(self, deid: Deidentifier, access: FileAccess = FileAccess()) -> Plan:
        """Read the files and plan their samples.

        Raises:
            ConfigError: a pattern or an option cannot be used, two files have one name and split,
                or a file name has no split.
            CorpusError: a file is missing or damaged, or lacks a column or has another type in it.
            StorageError: a remote store cannot be reached.
        """
        where = named_values(self.where, "where")
        fractions = parse_fractions(self.splits) if self.splits else None
        files = [_File(file, self._split_of(file)) for file in _expand(self.files)]
        repeated = [file for file, count in Counter(map(str, files)).items() if count > 1]
        if repeated:
            message = (
                f"several files are named {repeated[0]}, which keys depend on; convert them one "
                f"by one with another --name, or rename them"
            )
            raise ConfigError(message, "conflict", field="files")
        reader = _Reader(self, deid, access, fractions, where)
        if self.columns.question_column is None:
            return reader.plan_samples(files)
        return reader.plan_questions(files)

    def _split_of(self, file: Location) -> str | None:
        """Return the split of a file; None where rows or hashes decide."""
        if self.split is not None or self.splits or self.columns.split_column:
            return self.split
        for name in (file.name, file.parent.name):
            splits = {_SPLITS[word] for word in re.split(r"[-_.]", name.lower()) if word in _SPLITS}
            if len(splits) == 1:
                return splits.pop()
        message = (
            f"{file}: expected one of train, validation and test in the name of the file or its "
            f"folder; give --split, --split-column or --splits"
        )
        raise ConfigError(message, "missing", field="split")

    def notes(self, plan: Plan) -> list[str]:
        """Return the number of questions in each split, or a line about rows as patients."""
        if self.columns.question_column is not None:
            return vqa.question_notes(plan)
        if not self.rows_are_patients:
            return []
        return [
            "Rows count as patients (--rows-are-patients): patients or articles shared by splits, "
            "or with other shards, are not noticed."
        ]


class _File(NamedTuple):
    """A file and the split in its name."""

    location: Location
    split: str | None

    def __str__(self) -> str:
        return f"{self.split or ''}/{self.location.name}"


def _expand(patterns: Sequence[str]) -> list[Location]:
    """Return the files of patterns, in order and once each. Raises CorpusError where a pattern
    matches none.
    """
    locations: dict[Location, None] = {}
    for pattern in patterns:
        text = pattern if pattern.endswith(".parquet") else f"{pattern.rstrip('/')}/*.parquet"
        wildcard = _WILDCARD.search(text)
        start = len(text) if wildcard is None else wildcard.start()
        base = locate(text[:start] or ".")
        files: list[Location] = [base] if wildcard is None else sorted(base.glob(text[start:]))
        if not files or not files[0].is_file():
            raise CorpusError(f"{pattern} matches no .parquet file", "not_found", field="files")
        locations.update(dict.fromkeys(files))
    return list(locations)


class _Row(NamedTuple):
    """A row with its images."""

    file: _File
    number: int
    """From 1 in its file."""
    cells: Mapping[str, Any]
    images: list[Value]
    path: Path
    """Its file on this machine."""

    @property
    def place(self) -> str:
        """File and number, for messages."""
        return f"{self.file.location}, row {self.number}"

    def part(self, number: int) -> FilePart:
        """Return the place of an image."""
        image = self.images[number]
        name = f"row {self.number}" + (f", image {number + 1}" if len(self.images) > 1 else "")
        return FilePart(str(self.path), name, image.offset, image.size, image.page)


@dataclasses.dataclass(slots=True)
class _EqualImages:
    """Counts of equal images in several rows; 12 bytes of memory for each image."""

    hashes: "array[int]" = dataclasses.field(default_factory=lambda: array("Q"))
    splits: "array[int]" = dataclasses.field(default_factory=lambda: array("i"))
    numbers: dict[str, int] = dataclasses.field(default_factory=dict)

    def add(self, image: bytes | memoryview, split: str) -> None:
        self.hashes.append(int.from_bytes(sha256(image).digest()[:8], "big"))
        self.splits.append(self.numbers.setdefault(split, len(self.numbers)))

    def counts(self) -> Counter[str]:
        """Return how many images repeat an earlier one, and how many of another split."""
        hash_N = np.frombuffer(self.hashes, np.uint64)
        split_N = np.frombuffer(self.splits, np.intc)
        order_N = np.lexsort((split_N, hash_N))
        equal_N = hash_N[order_N[1:]] == hash_N[order_N[:-1]]
        leaked_N = equal_N & (split_N[order_N[1:]] != split_N[order_N[:-1]])
        return Counter(
            repeated_images=int(equal_N.sum()), images_in_other_splits=int(leaked_N.sum())
        )


class _Reader:
    """Converter of rows to samples."""

    def __init__(
        self,
        corpus: ParquetFiles,
        deid: Deidentifier,
        access: FileAccess,
        fractions: Mapping[str, float] | None,
        where: Mapping[str, str],
    ) -> None:
        self.corpus = corpus
        self.columns = corpus.columns
        self.deid = deid
        self.access = access
        self.fractions = fractions
        self.where = where
        self.warnings = Counter[str]()

    def plan_samples(self, files: Sequence[_File]) -> Plan:
        """Return a plan with one record for each image."""
        rows = RowCounts("rows")
        records = Records()
        equal = _EqualImages()
        for row in self._rows(files, rows):
            try:
                samples = self._samples(row)
            except CorpusError as error:
                rows.skip(f"cell_{error.code}", message=str(error))
                continue
            for sample, image in zip(samples, row.images, strict=True):
                equal.add(image.content, sample.split)
                records.append(Record(sample))
            rows.kept += 1
        self.warnings.update(equal.counts())
        if self.corpus.rows_are_patients:
            self.warnings["rows_are_patients"] = rows.kept
        labels = self.columns.label_column
        return Plan(self.corpus.name, records, labels, rows, +self.warnings, ANYWHERE)

    def plan_questions(self, files: Sequence[_File]) -> Plan:
        """Return a plan with one record for each different image, which has its questions."""
        rows = RowCounts("questions")
        questions: list[tuple[str, Question]] = []
        images: dict[str, FilePart] = {}
        patients: dict[str, str] = {}
        numbers = Counter[str]()
        splits: dict[str, set[str]] = {}
        for row in self._rows(files, rows):
            try:
                if len(row.images) > 1:
                    raise malformed(row.place, "expected one image, got several", "image_column")
                name = sha256(row.images[0].content).hexdigest()
                group = self._group(row) or name
                patient = patients.get(name, group)
                self.warnings["images_in_several_groups"] += patient != group
                split = self._split(row, self.deid.patient(patient))
                answer = vqa.clean_text(row.cells[str(self.columns.answer_column)])
                choice = self._choice(row, answer)
            except CorpusError as error:
                rows.skip(f"cell_{error.code}", message=str(error))
                continue
            if name not in images:
                images[name] = row.part(0)
                patients[name] = patient
            numbers[split] += 1
            splits.setdefault(split, set()).add(self.deid.patient(patient))
            self.warnings["no_answer"] += not answer
            kind = self.columns.kind_column
            question = Question(
                id=f"{split}-{numbers[split]}",
                question=vqa.clean_text(row.cells[str(self.columns.question_column)]),
                kind="" if kind is None else vqa.clean_text(row.cells[kind]),
                split=split,
                **choice,
            )
            questions.append((name, question))
        if self.columns.group_column is not None:
            check_disjoint(splits, self.corpus.name)
        return vqa.plan_questions(
            self.corpus.name,
            self.deid,
            images,
            questions,
            rows,
            +self.warnings,
            patients=patients,
        )

    def _choice(self, row: _Row, answer: str) -> Mapping[str, Any]:
        """Return the fields of an answer. Raises CorpusError for malformed options."""
        column = self.columns.options_column
        if column is None:
            return {"answer": answer, "answer_type": vqa.infer_answer_type(answer)}
        fields = vqa.choice_fields(row.cells[column], answer)
        if fields is None:
            raise CorpusError(f"{row.place}: malformed options", "options", field=column)
        return fields

    def _rows(self, files: Sequence[_File], rows: RowCounts) -> Iterator[_Row]:
        """Yield the rows with images, and count the others."""
        for file in files:
            location = file.location
            path = (
                self.access.local_copy(location) if isinstance(location, RemotePath) else location
            )
            for number, cells, values in rows.reading(self._read(path, location)):
                if not all(equals(cells[name], value) for name, value in self.where.items()):
                    rows.exclude("where")
                    continue
                images = self._images(cells.get(self.columns.image_column), values)
                if images:
                    yield _Row(file, number, cells, images, path)
                else:
                    rows.exclude("no_image")

    def _read(
        self, path: Path, location: Location
    ) -> Iterator[tuple[int, dict[str, Any], list[Value | None]]]:
        """Yield number, cells and images of the rows of a local file; the image column of the cells
        has paths only.
        """
        import pyarrow

        name = self.columns.image_column

        def check_schema(schema: Any) -> None:
            self.columns.check_types(path, schema)

        def check_batch(batch: Any, number: int) -> None:
            check_text_lengths(path, batch, number, 4 * MAX_CELL_CHARACTERS)

        rows = read_parquet(
            path,
            [*self.columns.names(), *self.where],
            ANYWHERE,
            _LIMITS,
            bytes_column=name,
            check_schema=check_schema,
            check_batch=check_batch,
        )
        images: Iterator[list[Value | None]] = iter(())
        try:
            for number, cells in rows:
                if number == 1:  # the file and its columns have been checked
                    images = ByteColumn.find(path, name, _LIMITS.memory).rows()
                yield number, cells, next(images)
        except (ValueError, StopIteration, MemoryError, pyarrow.ArrowException) as error:
            code = "too_large" if isinstance(error, PageSizeError | MemoryError) else "malformed"
            message = f"the images of {location} cannot be read ({error or type(error).__name__})"
            raise CorpusError(f"{message}; {_LIMITS.advice}", code, field=name) from error

    def _images(self, cell: Any, values: Sequence[Value | None]) -> list[Value]:
        """Return the encoded images of a row; those that are only a path are left out and
        counted. `cell` has the paths.
        """
        cells = cell if isinstance(cell, list) else [cell]
        self.warnings["images_outside_of_file"] += sum(
            not (value and value.content) and isinstance(entry, dict) and bool(entry.get("path"))
            for value, entry in zip(values, cells, strict=False)  # an empty list has one value
        )
        return [value for value in values if value and value.content]

    def _samples(self, row: _Row) -> list[Sample]:
        """Return a sample for each image of a row. Raises CorpusError for an invalid cell."""
        identity = f"{self.corpus.name} {row.file} {row.number}"
        group = self._group(row) or identity
        patient = self.deid.patient(group)
        sections = self._sections(row)
        labels = self._labels(row)
        split = self._split(row, patient)
        names = [identity, *(f"{identity} {number}" for number in range(1, len(row.images)))]
        keys = list(map(self.deid.image, names))
        return [
            Sample(
                key=key,
                corpus=self.corpus.name,
                split=split,
                patient=patient,
                study=self.deid.study(group, identity),
                image=row.part(place),
                sections=sections,
                labels=labels,
                extra={
                    column: json_value(row.cells[column])
                    for column in self.columns.extra_column
                    if raw_text(row.cells[column])
                },
            )
            for place, key in enumerate(keys)
        ]

    def _group(self, row: _Row) -> str | None:
        """Return the patient or article of a row; None where no column names it."""
        column = self.columns.group_column
        if column is None:
            return None
        try:
            text = cell_id(row.cells[column])
        except ValueError:
            message = f"{column} has a number that was rounded; write the ids as text"
            raise malformed(row.place, message, column) from None
        if not text:
            raise CorpusError(f"{row.place}: {column} is empty", "missing", field=column)
        return text

    def _split(self, row: _Row, patient: str) -> str:
        if self.fractions is not None:
            return hash_split(patient, self.fractions)
        column = self.columns.split_column
        if column is None:
            return str(row.file.split)
        split = cell_text(row.cells[column])
        if not split.replace("-", "").replace("_", "").isalnum():
            raise malformed(
                row.place, f"{column} must be a plain word, as it names a folder", column
            )
        return _SPLITS.get(split.lower(), split)

    def _sections(self, row: _Row) -> dict[str, str]:
        sections: dict[str, list[str]] = {}
        for section, column in self.columns.sections:
            cell = row.cells[column]
            for entry in cell if isinstance(cell, list) else [cell]:
                text = report_text(entry, self.warnings)
                if len(text) > MAX_CELL_CHARACTERS:
                    message = f"{column} has more than {MAX_CELL_CHARACTERS} characters"
                    advice = "shorten the text, or leave the row out"
                    raise CorpusError(
                        f"{row.place}: {message}; {advice}", "too_large", field=column
                    )
                if text and text not in sections.setdefault(section, []):
                    sections[section].append(text)
        return {name: join_texts(texts) for name, texts in sections.items() if texts}

    def _labels(self, row: _Row) -> dict[str, int]:
        labels = {}
        for column in self.columns.label_column:
            try:
                label = cell_label(row.cells[column])
            except ValueError:
                message = f"{column} must be 1, 0, -1, true, false or empty"
                raise malformed(row.place, message, column) from None
            if label is not None:
                labels[column] = label
        return labels
