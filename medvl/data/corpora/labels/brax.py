"""BRAX 1.1.0. Layout, counts and access: `data_cards/brax.md`."""

import dataclasses
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import ClassVar, Literal, get_args

from medvl.common.config_io import check_choice
from medvl.data.corpora.common.record_file import Records
from medvl.data.corpora.common.rows import RowCounts
from medvl.data.corpora.common.tables import (
    Plan,
    Record,
    find_file,
    malformed,
    order_studies,
    parse_findings,
    read_table,
)
from medvl.data.corpora.registry import Corpus, FileAccess, register_corpus
from medvl.data.privacy import Deidentifier
from medvl.data.splits import hash_split, parse_fractions
from medvl.schema import FINDINGS, Sample

TABLES = ("master_spreadsheet_update.csv", "master_spreadsheet.csv")
VIEWS = {
    "PA": "PA", "AP": "AP", "AP LLD": "AP LLD", "L": "LATERAL", "RL": "RL", "LT-DECUB": "LLD",
    "RLO": "RLO",
}  # fmt: skip
"""ViewPosition of the release -> view."""

Files = Literal["png", "dicom"]

_PATHS = {"png": "PngPath", "dicom": "DicomPath"}
_COLUMNS = (
    *_PATHS.values(), "PatientID", "PatientSex", "PatientAge", "AccessionNumber", "StudyDate",
    "ViewPosition", *FINDINGS,
)  # fmt: skip
_PATH = re.compile(r"(?:images|Anonymized_DICOMs)(?:/[\w-][\w.-]*)+")
_AGE_BIN = re.compile(r"[\w <>+-]{1,20}")


@register_corpus("brax")
@dataclasses.dataclass(frozen=True, kw_only=True)
class BRAX(Corpus):
    """Convert BRAX, chest radiographs of a hospital in Brazil: CheXpert's labels, no text."""

    labels: ClassVar[tuple[str, ...]] = FINDINGS
    counts: ClassVar[Mapping[str, int]] = {"images": 40_967}
    """Rows of the table."""
    textless: ClassVar[bool] = True

    root: Path
    """folder of the release: the table, images/ or Anonymized_DICOMs/."""
    files: Files = "png"
    """png or dicom."""
    views: tuple[str, ...] = ()
    """keep only these of PA, AP, AP LLD, LATERAL, RL, LLD and RLO."""
    splits: tuple[str, ...] = ("train=0.8", "validate=0.1", "test=0.1")
    """fractions of the splits, by patient."""

    def plan(self, deid: Deidentifier, access: FileAccess = FileAccess()) -> Plan:
        """Plan the samples of BRAX from its table; no image is opened.

        Raises CorpusError when the table or a column is missing, or a value does not match the data
        card; ConfigError when an option is unknown or the fractions do not sum to one.
        """
        check_choice(self.files, get_args(Files), "files")
        for name in self.views:
            check_choice(name, tuple(VIEWS.values()), "views")
        fractions = parse_fractions(self.splits)
        allowed = access.folders(self.root)
        table = find_file(self.root, *TABLES)
        orders = _orders(read_table(table, _COLUMNS, allowed))
        rows = RowCounts()
        warnings = Counter[str]()
        records = Records()
        for row in rows.reading(read_table(table, _COLUMNS, allowed)):
            position = row["ViewPosition"].strip()
            view = VIEWS.get(position)
            if self.views and view not in self.views:
                rows.exclude("view")
                continue
            warnings["unknown_view"] += bool(position) and view is None
            patient, accession = row["PatientID"], row["AccessionNumber"]
            sample = Sample(
                key=deid.image(_path(row, "PngPath", table)),
                corpus=self.corpus,
                split="",
                patient=deid.patient(patient),
                study=deid.study(patient, accession),
                image=self.root / _path(row, _PATHS[self.files], table),
                labels=parse_findings(row, table),
                view=view,
                sex=row["PatientSex"] if row["PatientSex"] in ("F", "M") else None,
                order=orders.get(f"{patient}/{accession}"),
                extra=_age_bin(row["PatientAge"].strip(), warnings),
            )
            split = hash_split(sample.patient, fractions)
            records.append(Record(dataclasses.replace(sample, split=split)))
            rows.kept += 1
        return Plan(self.corpus, records, self.labels, rows, +warnings, allowed)


def _path(row: Mapping[str, str], column: str, table: Path) -> str:
    path = row[column].strip()
    if not _PATH.fullmatch(path):
        raise malformed(table, f"expected {column} below images/ or Anonymized_DICOMs/", column)
    return path


def _age_bin(text: str, warnings: Counter[str]) -> dict[str, object]:
    """Return the bin of five years, which is not an age."""
    if text and not _AGE_BIN.fullmatch(text):
        warnings["age_malformed"] += 1
        return {}
    return {"age_bin": text} if text else {}


def _orders(rows: Iterable[Mapping[str, str]]) -> dict[str, int]:
    """Return the place of each study among its patient's studies.

    Accession numbers are not unique, so a study is a patient and a number.
    """
    times: defaultdict[str, dict[str, tuple[int, str]]] = defaultdict(dict)
    for row in rows:
        date = re.sub(r"\.0$|-", "", row["StudyDate"].strip())
        study = f"{row['PatientID']}/{row['AccessionNumber']}"
        if date.isdecimal():
            times[row["PatientID"]].setdefault(study, (int(date), study))
    return order_studies(times)
