"""CT-RATE (2024). Layout, counts and access: `data_cards/ct-rate.md`."""

import dataclasses
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np

from medvl.common.untrusted import InputFolders
from medvl.data.corpora.common.record_file import Records
from medvl.data.corpora.common.rows import RowCounts, cell_label, cell_text, report_text
from medvl.data.corpora.common.tables import (
    Plan,
    Record,
    find_file,
    malformed,
    order_studies,
    read_lines,
    read_table,
    split_training,
)
from medvl.data.corpora.registry import Corpus, FileAccess, register_corpus
from medvl.data.privacy import Deidentifier, cap_age
from medvl.data.splits import hash_split
from medvl.data.volumes.options import VolumeFile
from medvl.errors import ConfigError, CorpusError
from medvl.schema import Sample

LABELS = (
    "Medical material",
    "Arterial wall calcification",
    "Cardiomegaly",
    "Pericardial effusion",
    "Coronary artery wall calcification",
    "Hiatal hernia",
    "Lymphadenopathy",
    "Emphysema",
    "Atelectasis",
    "Lung nodule",
    "Lung opacity",
    "Pulmonary fibrotic sequela",
    "Pleural effusion",
    "Mosaic attenuation pattern",
    "Peribronchial thickening",
    "Consolidation",
    "Bronchiectasis",
    "Interlobular septal thickening",
)
SECTIONS = {
    "ClinicalInformation_EN": "indication",
    "Technique_EN": "technique",
    "Findings_EN": "findings",
    "Impressions_EN": "impression",
}
BROKEN = ("train_1267_a_4.nii.gz", "train_11755_a_3.nii.gz", "train_11755_a_4.nii.gz")
"""Reconstructions of the release that cannot be used."""

_NAME = re.compile(r"((train|valid)_\d+)_([a-z]+)_(\d+)\.nii\.gz")
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
_NOT_GIVEN = re.compile(r"not given\.?", re.IGNORECASE)
_PARTS = {"train": ("train", "train"), "valid": ("validation", "valid")}
"""Part, as in names of volumes and folders -> its name in tables of reports and in those of
labels.
"""
_GEOMETRY = ("RescaleSlope", "RescaleIntercept", "XYSpacing", "ZSpacing", "ImageOrientationPatient")
_PERSON = ("PatientSex", "PatientAge", "StudyDate")
_LETTERS = ("LR", "PA", "SI")
_NEAREST = 0.94  # cosine of 20 degrees


@register_corpus("ct-rate")
@dataclasses.dataclass(frozen=True, kw_only=True)
class CTRate(Corpus):
    """Convert CT-RATE: chest CT with reports, and 18 labels that were predicted from them."""

    labels: ClassVar[tuple[str, ...]] = LABELS
    counts: ClassVar[Mapping[str, int]] = {"images": 50_188}
    """Reconstructions of both tables of reports."""
    has_volumes: ClassVar[bool] = True

    root: Path
    """folder with dataset/, or dataset/ itself."""
    release: Literal["auto", "fixed", "raw"] = "auto"
    """fixed: train_fixed/ and valid_fixed/, whose values are Hounsfield units; raw: train/ and
    valid/, which are rescaled by the table; auto: fixed where the file exists.
    """
    validate_share: float = 0.1
    """share of the training patients that become the split validate."""

    def plan(self, deid: Deidentifier, access: FileAccess = FileAccess()) -> Plan:
        """Plan the samples of CT-RATE from its tables; no volume is opened.

        Raises CorpusError when no table of reports is found, or a table does not match the data
        card.
        """
        shares = split_training(self.validate_share)
        if self.release not in ("auto", "fixed", "raw"):
            raise ConfigError(
                f"expected release auto, fixed or raw, got {self.release!r}",
                "unknown_name",
                field="release",
            )
        inner = self.root / "dataset"
        root = inner if inner.is_dir() else self.root
        rows = RowCounts()
        warnings = Counter[str]()
        records = Records()
        allowed = access.folders(self.root)
        parts = [part for part in _PARTS if (root / _reports(part)).is_file()]
        if not parts:
            find_file(root, *map(_reports, _PARTS))
        for part in parts:
            reader = _PartReader(self, root, part, deid, allowed, warnings)
            for row in rows.reading(
                read_table(root / _reports(part), ("VolumeName", *SECTIONS), allowed)
            ):
                try:
                    record = reader.record(row, shares)
                except CorpusError as error:
                    rows.skip(f"row_{error.code}", message=str(error))
                    continue
                if isinstance(record, str):
                    rows.exclude(record)
                else:
                    records.append(record)
                    rows.kept += 1
        return Plan(self.corpus, records, self.labels, rows, +warnings, allowed)


class _PartReader:
    """Reader of the rows of one part of the release."""

    def __init__(
        self,
        corpus: CTRate,
        root: Path,
        part: str,
        deid: Deidentifier,
        allowed: InputFolders,
        warnings: Counter[str],
    ) -> None:
        self._corpus = corpus
        self._root = root
        self._part = part
        self._deid = deid
        self._warnings = warnings
        self._table = root / _reports(part)
        long, short = _PARTS[part]
        self._no_chest = _no_chest(root / f"metadata/no_chest_{short}.txt", allowed, warnings)
        self._metadata = _by_name(
            root / f"metadata/{long}_metadata.csv", (*_GEOMETRY, *_PERSON), allowed
        )
        labels = root / f"multi_abnormality_labels/{short}_predicted_labels.csv"
        self._labels = _by_name(labels, LABELS, allowed)
        self._label_table = labels
        self._orders = _orders(self._metadata)
        self._of_scan: dict[str, tuple[dict[str, str], dict[str, int]]] = {}

    def record(self, row: Mapping[str, str], shares: Mapping[str, float]) -> Record | str:
        """Return the record of a row of the table of reports, or why it is left out."""
        name = row["VolumeName"].strip()
        match = _NAME.fullmatch(name)
        if match is None or match[2] != self._part:
            raise malformed(
                self._table, f"expected a VolumeName like {self._part}_1_a_1.nii.gz", "VolumeName"
            )
        patient, _, letter, reconstruction = match.groups()
        scan = f"{patient}_{letter}"
        if self._no_chest & {name, name.removesuffix(".nii.gz"), scan, patient}:
            return "not_chest"
        if name in BROKEN:
            return "broken"
        metadata = self._metadata.get(name, {})
        hashed = self._deid.patient(patient)
        sections, labels = self._shared(scan, row, name)
        sex = cell_text(metadata.get("PatientSex"))[:1].upper()
        path, file = self._file(name, patient, scan, metadata)
        sample = Sample(
            key=self._deid.image(name),
            corpus=CTRate.corpus,
            split="test" if self._part == "valid" else hash_split(hashed, shares),
            patient=hashed,
            study=self._deid.study(patient, letter),
            image=path,
            sections=sections,
            labels=labels,
            sex=sex if sex in ("F", "M") else None,
            age=cap_age(metadata.get("PatientAge")),
            order=self._orders.get(scan),
            extra={"reconstruction": int(reconstruction)},
        )
        return Record(sample, volume=file)

    def _shared(
        self, scan: str, row: Mapping[str, str], name: str
    ) -> tuple[dict[str, str], dict[str, int]]:
        """Return report and labels of a scan, which its reconstructions share: those of the first
        row.
        """
        sections = {
            section: text
            for column, section in SECTIONS.items()
            if (text := report_text(row[column], self._warnings)) and not _NOT_GIVEN.fullmatch(text)
        }
        labels = {}
        for label in LABELS:
            try:
                value = cell_label(self._labels.get(name, {}).get(label))
            except ValueError:
                raise malformed(
                    self._label_table, f"expected 1, 0 or blank for {label}", label
                ) from None
            if value is not None:
                labels[label] = value
        self._warnings["no_labels"] += not labels
        first = self._of_scan.setdefault(scan, (sections, labels))
        self._warnings["reports_of_a_scan_differ"] += first[0] != sections
        self._warnings["labels_of_a_scan_differ"] += first[1] != labels
        return first

    def _file(
        self, name: str, patient: str, scan: str, metadata: Mapping[str, str]
    ) -> tuple[Path, VolumeFile]:
        """Return the file of a volume and how it is read."""
        place = Path(patient) / scan / name
        fixed = self._root / f"{self._part}_fixed" / place
        raw = self._root / self._part / place
        release = self._corpus.release
        if release == "fixed" or (release == "auto" and (fixed.is_file() or not raw.is_file())):
            return fixed, VolumeFile()
        where = f"metadata of {name}"
        slope, intercept = (
            _numbers(metadata.get(column), 1, where, column)[0] for column in _GEOMETRY[:2]
        )
        y, x = _numbers(metadata.get("XYSpacing"), 2, where, "XYSpacing")
        (z,) = _numbers(metadata.get("ZSpacing"), 1, where, "ZSpacing")
        cosines = _numbers(
            metadata.get("ImageOrientationPatient"), 6, where, "ImageOrientationPatient"
        )
        return raw, VolumeFile(
            orientation=_orientation(cosines, where), spacing=(x, y, z), rescale=(slope, intercept)
        )


def _reports(part: str) -> str:
    return f"radiology_text_reports/{_PARTS[part][0]}_reports.csv"


def _by_name(
    path: Path, columns: tuple[str, ...], allowed: InputFolders
) -> dict[str, dict[str, str]]:
    """Return some columns of a table by VolumeName; nothing where the table does not exist."""
    if not path.is_file():
        return {}
    return {
        row["VolumeName"].strip(): {column: row[column] for column in columns}
        for row in read_table(path, ("VolumeName", *columns), allowed)
    }


def _no_chest(path: Path, allowed: InputFolders, warnings: Counter[str]) -> frozenset[str]:
    """Return the names of scans of other parts of the body."""
    if not path.is_file():
        warnings["no_list_of_other_body_parts"] += 1
        return frozenset()
    lines = (line.strip().rpartition("/")[2] for line in read_lines(path, allowed))
    return frozenset(line for line in lines if line)


def _orders(metadata: Mapping[str, Mapping[str, str]]) -> dict[str, int]:
    """Return the place of each scan among its patient's; scans without a date have none."""
    times: defaultdict[str, dict[str, tuple[str, str]]] = defaultdict(dict)
    for name, row in metadata.items():
        match = _NAME.fullmatch(name)
        date = cell_text(row["StudyDate"])
        if match and date:
            scan = f"{match[1]}_{match[3]}"
            times[match[1]][scan] = (date, match[3])
    return order_studies(times)


def _numbers(text: str | None, count: int, where: str, column: str) -> list[float]:
    """Return the numbers of a cell such as "[0.7, 0.7]"."""
    numbers = [float(number) for number in _NUMBER.findall(text or "")]
    if len(numbers) != count or not np.isfinite(numbers).all():
        raise malformed(where, f"expected {count} numbers for {column}", column)
    return numbers


def _orientation(cosines: list[float], where: str) -> str:
    """Return the directions of columns, rows and slices as letters such as LPS."""
    row, column = np.array(cosines).reshape(2, 3)
    letters = ""
    for direction in (row, column, np.cross(row, column)):
        axis = int(np.abs(direction).argmax())
        if abs(direction[axis]) < _NEAREST:
            raise malformed(
                where, "expected directions along the patient's axes", "ImageOrientationPatient"
            )
        letters += _LETTERS[axis][int(direction[axis] < 0)]
    return letters
