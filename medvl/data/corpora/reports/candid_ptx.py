"""CANDID-PTX (2021). Layout, counts and access: `data_cards/candid-ptx.md`."""

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from medvl.common.untrusted import InputFolders
from medvl.data.annotations import EMPTY, read_starts, region_fields
from medvl.data.corpora.common.record_file import Records
from medvl.data.corpora.common.rows import RowCounts, report_text
from medvl.data.corpora.common.tables import (
    Plan,
    Record,
    malformed,
    no_patients_note,
    read_header,
    read_table,
    report_sections,
)
from medvl.data.corpora.registry import Corpus, FileAccess, register_corpus
from medvl.data.privacy import Deidentifier
from medvl.data.reports.sections import parse_report
from medvl.data.splits import hash_split, parse_fractions
from medvl.errors import CorpusError
from medvl.schema import Sample

TABLE = "Pneumothorax_reports.csv"
PNEUMOTHORAX = "Pneumothorax"
OTHER_MASKS = {"chest_tube.csv": "Chest tube", "Rib_fracture_mask_rle.csv": "Rib fracture"}
"""Table of masks -> label."""
LABELS = (PNEUMOTHORAX, *OTHER_MASKS.values())

_COLUMNS = ("SOPInstanceUID", "StudyInstanceUID", "Report", "EncodedPixels")
_ID_COLUMNS = ("anon_SOPUID", "SOPInstanceUID")
_MASK_COLUMNS = ("mask_rle", "EncodedPixels")
_SUFFIXES = (".dcm", ".jpg", ".png")
_SIZE = (1024, 1024)
"""Width and height of the images that masks refer to."""
_UID = re.compile(r"[0-9.]{8,64}")


@dataclasses.dataclass(slots=True)
class _Image:
    """An image: its rows have one mask each, and repeat study and report."""

    study: str
    report: str
    masks: dict[str, list[str]]
    """Label -> runs of each of its masks."""


@register_corpus("candid-ptx")
@dataclasses.dataclass(frozen=True, kw_only=True)
class CandidPTX(Corpus):
    """Convert CANDID-PTX: reports, and masks of pneumothoraces, chest tubes and rib fractures."""

    labels: ClassVar[tuple[str, ...]] = LABELS
    counts: ClassVar[Mapping[str, int]] = {"rows": 19_640}
    """Rows of the table of reports."""
    textless: ClassVar[bool] = True

    root: Path
    """folder with Pneumothorax_reports.csv and the tables of other masks."""
    images: Path | None = None
    """folder with the DICOM or JPEG files at any depth; default root."""
    splits: tuple[str, ...] = ("train=0.8", "validate=0.1", "test=0.1")
    """fractions of the splits, by study: the tables have no patient ids."""

    def plan(self, deid: Deidentifier, access: FileAccess = FileAccess()) -> Plan:
        """Plan the samples of CANDID-PTX from its tables; no image is opened.

        Raises CorpusError when the table or a column is missing, or a value does not match the data
        card; ConfigError when the fractions do not sum to one.
        """
        folder = self.images or self.root
        allowed = access.folders(self.root, folder)
        fractions = parse_fractions(self.splits)
        warnings = Counter[str]()
        rows = RowCounts(unit="rows")
        images = _read_images(self.root / TABLE, rows, warnings, allowed)
        annotated = [PNEUMOTHORAX]
        for name, label in OTHER_MASKS.items():
            if (self.root / name).is_file():
                annotated.append(label)
                _add_masks(self.root / name, label, images, warnings, allowed)
        files = _find_images(folder, images)
        records = Records()
        for name, image in images.items():
            patient = deid.patient(image.study)
            masks = [
                {"label": label, "runs": runs} for label in annotated for runs in image.masks[label]
            ]
            sample = Sample(
                key=deid.image(name),
                corpus=self.corpus,
                split=hash_split(patient, fractions),
                patient=patient,
                study=deid.study(image.study, image.study),
                image=files.get(name, folder / f"{name}.dcm"),
                sections=_sections(image.report, warnings),
                labels={label: int(bool(image.masks[label])) for label in annotated},
                extra=region_fields(_SIZE, {"masks": masks}),
            )
            records.append(Record(sample))
        warnings["studies_are_patients"] = len(records)
        return Plan(self.corpus, records, tuple(annotated), rows, +warnings, allowed)

    def notes(self, plan: Plan) -> list[str]:
        return [no_patients_note("study", "studies_are_patients")]


def _read_images(
    table: Path, rows: RowCounts, warnings: Counter[str], allowed: InputFolders
) -> dict[str, _Image]:
    images: dict[str, _Image] = {}
    for row in rows.reading(read_table(table, _COLUMNS, allowed)):
        name, study = (_uid(row, column, table) for column in _COLUMNS[:2])
        image = images.get(name)
        if image is None:
            masks: dict[str, list[str]] = {label: [] for label in LABELS}
            image = images[name] = _Image(study, row["Report"], masks)
        if image.study != study:
            raise malformed(table, "expected one study in all rows of an image", _COLUMNS[1])
        warnings["reports_of_image_differ"] += image.report != row["Report"]
        _add_mask(image.masks[PNEUMOTHORAX], row["EncodedPixels"], table, warnings)
        rows.kept += 1
    return images


def _add_masks(
    table: Path,
    label: str,
    images: Mapping[str, _Image],
    warnings: Counter[str],
    allowed: InputFolders,
) -> None:
    columns = read_header(table, allowed)
    id_column = _known_column(columns, _ID_COLUMNS, table)
    mask_column = _known_column(columns, _MASK_COLUMNS, table)
    for row in read_table(table, (id_column, mask_column), allowed):
        image = images.get(_uid(row, id_column, table))
        if image is None:
            warnings["mask_without_report"] += 1
        else:
            _add_mask(image.masks[label], row[mask_column], table, warnings)


def _known_column(columns: Sequence[str], known: Sequence[str], table: Path) -> str:
    """Return the column of a table that has one of several names."""
    for name in known:
        if name in columns:
            return name
    message = f"{table} has none of the columns {', '.join(known)}; it has {', '.join(columns)}"
    raise CorpusError(message, "missing", field=known[0])


def _uid(row: Mapping[str, str], column: str, table: Path) -> str:
    if not _UID.fullmatch(row[column].strip()):
        raise malformed(table, f"expected {column} of digits and dots", column)
    return row[column].strip()


def _add_mask(masks: list[str], text: str, table: Path, warnings: Counter[str]) -> None:
    try:
        runs = read_starts(text, _SIZE[1], _SIZE[0])
    except CorpusError as error:
        raise error.prefixed(f"{table}: ") from None
    warnings["repeated_mask"] += runs in masks
    if runs != EMPTY and runs not in masks:
        masks.append(runs)


def _sections(text: str, warnings: Counter[str]) -> dict[str, str]:
    """Return the sections of a report, or the whole of one without headers."""
    text = report_text(text, warnings)
    report = parse_report(text)
    if report.has_headers:
        return report_sections(report, warnings)
    return {"report": text} if text else {}


def _find_images(folder: Path, names: Iterable[str]) -> dict[str, Path]:
    """Return the file of each image, whose name has a suffix or none."""
    image_names = set(names)
    files: dict[str, Path] = {}
    for path in sorted(folder.rglob("*"), reverse=True):
        name = path.stem if path.suffix.lower() in _SUFFIXES else path.name
        if name in image_names and path.is_file():
            files[name] = path
    return files
