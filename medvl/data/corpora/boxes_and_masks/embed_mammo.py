"""EMBED, the Emory breast imaging data set (2023), its open part. Layout, counts and access:
`data_cards/embed-mammo.md`.
"""

import dataclasses
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import ClassVar, NamedTuple

from medvl.common.untrusted import InputFolders
from medvl.data.annotations import Box, read_corners
from medvl.data.corpora.boxes_and_masks.vindr_mammo import (
    BIRADS,
    DENSITY,
    VIEWS,
    breast_labels,
    most_suspicious,
)
from medvl.data.corpora.common.record_file import Records
from medvl.data.corpora.common.rows import RowCounts, cell_text
from medvl.data.corpora.common.tables import (
    Plan,
    Record,
    find_file,
    malformed,
    order_studies,
    read_table,
)
from medvl.data.corpora.registry import Corpus, FileAccess, register_corpus
from medvl.data.privacy import Deidentifier, cap_age
from medvl.data.splits import hash_split, parse_fractions
from medvl.errors import CorpusError
from medvl.schema import Sample

METADATA = tuple(f"EMBED_OpenData_metadata{suffix}.csv" for suffix in ("", "_reduced"))
CLINICAL = tuple(f"EMBED_OpenData_clinical{suffix}.csv" for suffix in ("", "_reduced"))
ASSESSMENTS = {"A": "0", "N": "1", "B": "2", "P": "3", "S": "4", "M": "5", "K": "6"}
"""Letter of `asses` -> BI-RADS category."""
DENSITIES = {"1": "A", "2": "B", "3": "C", "4": "D"}
"""Number of `tissueden` -> density."""
LABELS = (
    *(f"{BIRADS}{category}" for category in sorted(ASSESSMENTS.values())),
    *(f"{DENSITY}{category}" for category in DENSITIES.values()),
)
FIELDS = {
    "massshape": "mass_shape",
    "massmargin": "mass_margin",
    "calcfind": "calcification",
    "calcdistri": "calcification_distribution",
    "path_severity": "path_severity",
}
"""Column of a finding -> field of `extra.findings`; codes as in the release's legend."""

_IMAGE_COLUMNS = (
    "empi_anon", "acc_anon", "study_date_anon", "anon_dicom_path", "FinalImageType", "ViewPosition",
    "ImageLateralityFinal",
)  # fmt: skip
_FINDING_COLUMNS = ("empi_anon", "acc_anon", "side", "asses", "tissueden")
_BOTH = ("B", "")
"""Sides of a finding of both breasts; blank as in the notebook of the release."""
_PATH = re.compile(r"(?:[\w-][\w.-]*/)*[\w-][\w.-]*\.dcm")
_COHORT = re.compile(r"(?:^|/)(?=cohort_\d+/)")
_ROI = "ROI"
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_COORDINATES = re.compile(r"[\s\d.,()\[\]-]*")


class _Finding(NamedTuple):
    """A row of the clinical table."""

    side: str
    birads: str | None
    density: str | None
    age: int | None
    fields: Mapping[str, str]


@register_corpus("embed-mammo")
@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbedMammo(Corpus):
    """Convert EMBED's open part, mammograms: BI-RADS, density, findings of a breast, regions."""

    labels: ClassVar[tuple[str, ...]] = LABELS
    textless: ClassVar[bool] = True
    crop_background: ClassVar[bool] = True

    root: Path
    """folder with tables/ and images/."""
    image_types: tuple[str, ...] = ("2D",)
    """keep these values of FinalImageType, such as 2D cview."""
    splits: tuple[str, ...] = ("train=0.8", "validate=0.1", "test=0.1")
    """fractions of the splits, by patient."""

    def plan(self, deid: Deidentifier, access: FileAccess = FileAccess()) -> Plan:
        """Plan the samples of EMBED from its tables; no image is opened.

        An image has the findings of its patient, exam and side.

        Raises CorpusError when a table or column is missing, or a value does not match the data
        card; ConfigError when the fractions do not sum to one.
        """
        root = self.root
        allowed = access.folders(root)
        fractions = parse_fractions(self.splits)
        table = find_file(root, *_places(METADATA))
        clinical = find_file(root, *_places(CLINICAL))
        warnings = Counter[str]()
        findings = _read_findings(clinical, warnings, allowed)
        orders = _orders(read_table(table, _IMAGE_COLUMNS, allowed), table)
        folder = root / "images" if (root / "images").is_dir() else root
        rows = RowCounts()
        records = Records()
        for row in rows.reading(read_table(table, _IMAGE_COLUMNS, allowed)):
            if row["FinalImageType"].strip() not in self.image_types:
                rows.exclude("image_type")
                continue
            patient, exam, side = _key(row, table)
            of_exam = findings.get((patient, exam), [])
            of_breast = [each for each in of_exam if each.side in (side, *_BOTH)]
            warnings["no_clinical_row"] += not of_breast
            categories = {each.birads for each in of_breast if each.birads is not None}
            warnings["assessments_of_breast_differ"] += len(categories) > 1
            birads = most_suspicious(sorted(categories))
            density = next((each.density for each in of_breast if each.density), None)
            path = _path(row, table)
            view = cell_text(row["ViewPosition"])
            warnings["unknown_view"] += bool(view) and view not in VIEWS
            hashed = deid.patient(patient)
            sample = Sample(
                key=deid.image(path),
                corpus=self.corpus,
                split=hash_split(hashed, fractions),
                patient=hashed,
                study=deid.study(patient, exam),
                image=folder / path,
                labels=breast_labels(birads, density, LABELS),
                view=view if view in VIEWS else None,
                sex="F",
                age=next((each.age for each in of_breast if each.age is not None), None),
                order=orders.get(f"{patient}/{exam}"),
                extra={
                    "laterality": side,
                    "breast_birads": birads,
                    "breast_density": density,
                    "findings": [{"birads": each.birads, **each.fields} for each in of_breast],
                    "image_type": row["FinalImageType"].strip(),
                    "boxes": _regions(cell_text(row.get("ROI_coords")), table),
                },
            )
            records.append(Record(sample))
            rows.kept += 1
        return Plan(self.corpus, records, LABELS, rows, +warnings, allowed)


def _places(names: Iterable[str]) -> list[str]:
    return [f"{folder}{name}" for folder in ("tables/", "") for name in names]


def _key(row: Mapping[str, str], table: Path) -> tuple[str, str, str]:
    """Return patient, exam and side of an image."""
    side = row["ImageLateralityFinal"].strip()
    if side not in ("L", "R"):
        raise malformed(table, "expected L or R", "ImageLateralityFinal")
    return _id(row, "empi_anon", table), _id(row, "acc_anon", table), side


def _id(row: Mapping[str, str], column: str, table: Path) -> str:
    """Return an id of digits; pandas writes 7 as 7.0 in a column with empty cells."""
    text = row[column].strip().removesuffix(".0")
    if not text.isdecimal():
        message = f"expected digits in {column}; a program may have rounded them"
        raise malformed(table, message, column)
    return text


def _path(row: Mapping[str, str], table: Path) -> str:
    """Return the path of an image below images/: that of the publishers' storage is cut off."""
    path = _COHORT.split(row["anon_dicom_path"].strip())[-1].removeprefix("images/")
    if not _PATH.fullmatch(path):
        message = "expected a path such as .../cohort_1/PATIENT/EXAM/SERIES/IMAGE.dcm"
        raise malformed(table, message, "anon_dicom_path")
    return path


def _read_findings(
    table: Path, warnings: Counter[str], allowed: InputFolders
) -> dict[tuple[str, str], list[_Finding]]:
    """Read (patient, exam) -> findings, in the order of the table."""
    findings: defaultdict[tuple[str, str], list[_Finding]] = defaultdict(list)
    for row in read_table(table, _FINDING_COLUMNS, allowed):
        side, letter = cell_text(row["side"]), cell_text(row["asses"])
        if side not in ("L", "R", *_BOTH):
            raise malformed(table, "expected L, R, B or blank", "side")
        if letter and letter not in ASSESSMENTS:
            message = f"expected one of {', '.join(ASSESSMENTS)}, or blank"
            raise malformed(table, message, "asses")
        density = cell_text(row["tissueden"]).removesuffix(".0")
        warnings["unknown_density"] += bool(density) and density not in DENSITIES
        codes = {name: cell_text(row.get(column)) for column, name in FIELDS.items()}
        codes["path_severity"] = codes["path_severity"].removesuffix(".0")
        finding = _Finding(
            side,
            ASSESSMENTS.get(letter),
            DENSITIES.get(density),
            cap_age(row.get("age_at_study", "")),
            {name: code for name, code in codes.items() if code},
        )
        exam = (_id(row, "empi_anon", table), _id(row, "acc_anon", table))
        findings[exam].append(finding)
    return findings


def _regions(text: str, table: Path) -> list[Box]:
    """Return the regions of interest of a text such as [[ymin, xmin, ymax, xmax], ...]."""
    numbers = [float(number) for number in _NUMBER.findall(text)]
    expected = "expected [ymin, xmin, ymax, xmax] for each region"
    if not _COORDINATES.fullmatch(text) or len(numbers) % 4:
        raise malformed(table, expected, "ROI_coords")
    regions = []
    for place in range(0, len(numbers), 4):
        top, left, bottom, right = numbers[place : place + 4]
        try:
            regions.append(read_corners(_ROI, (left, top, right, bottom), None, table))
        except CorpusError:
            message = f"{expected}, minima below maxima; another order is not read"
            raise malformed(table, message, "ROI_coords") from None
    return regions


def _orders(rows: Iterable[Mapping[str, str]], table: Path) -> dict[str, int]:
    """Return the place of each exam that has a date among its patient's exams."""
    times: defaultdict[str, dict[str, tuple[int, str]]] = defaultdict(dict)
    for row in rows:
        date = re.sub(r"[ T].*|-", "", row["study_date_anon"].strip())
        if date.isdecimal():
            patient, exam = _id(row, "empi_anon", table), _id(row, "acc_anon", table)
            times[patient].setdefault(f"{patient}/{exam}", (int(date), exam))
    return order_studies(times)
