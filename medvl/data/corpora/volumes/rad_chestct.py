"""RAD-ChestCT (2021). Layout, counts and access: `data_cards/rad-chestct.md`."""

import dataclasses
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from medvl.common.untrusted import InputFolders
from medvl.data.corpora.common.record_file import Records
from medvl.data.corpora.common.rows import RowCounts, cell_label, cell_text
from medvl.data.corpora.common.tables import (
    Plan,
    Record,
    find_file,
    malformed,
    no_patients_note,
    read_header,
    read_table,
)
from medvl.data.corpora.registry import Corpus, FileAccess, register_corpus
from medvl.data.privacy import Deidentifier
from medvl.data.volumes.options import VolumeFile
from medvl.errors import CorpusError
from medvl.schema import Sample

FILE = VolumeFile(orientation="IPL", spacing=(0.8, 0.8, 0.8))
"""Axes of the arrays: to the feet, the back and the left."""

_TABLES = {
    split: f"img{name}_Abnormality_and_Location_Labels.csv"
    for split, name in (("train", "train"), ("validate", "valid"), ("test", "test"))
}
_PATIENTS = "CT_Scan_Metadata_Complete_35747.csv"
_ID = "NoteAcc_DEID"
_NAME = re.compile(r"[A-Za-z]{3}\d+")


@register_corpus("rad-chestct")
@dataclasses.dataclass(frozen=True, kw_only=True)
class RADChestCT(Corpus):
    """Convert RAD-ChestCT: chest CT with 84 labels, without reports."""

    counts: ClassVar[Mapping[str, int]] = {"images": 3_630}
    """Volumes that are public."""
    textless: ClassVar[bool] = True
    has_volumes: ClassVar[bool] = True

    root: Path
    """folder with the .npz files and the tables."""

    def notes(self, plan: Plan) -> list[str]:
        return [no_patients_note("scan", "no_patient_id")] if plan.warnings["no_patient_id"] else []

    def plan(self, deid: Deidentifier, access: FileAccess = FileAccess()) -> Plan:
        """Plan the samples of RAD-ChestCT from its tables; no volume is opened.

        A label is 1 where its abnormality is at any place. Raises CorpusError when no table is
        found or one does not match the data card.
        """
        allowed = access.folders(self.root)
        tables = {
            split: self.root / name
            for split, name in _TABLES.items()
            if (self.root / name).is_file()
        }
        if not tables:
            find_file(self.root, *_TABLES.values())
        patients = _patients(self.root / _PATIENTS, allowed)
        rows = RowCounts()
        warnings = Counter[str]()
        records = Records()
        names: dict[str, None] = {}
        for split, table in tables.items():
            columns = [name for name in read_header(table, allowed) if "*" in name]
            names.update(dict.fromkeys(sorted({name.partition("*")[0] for name in columns})))
            for row in rows.reading(read_table(table, (_ID, *columns), allowed)):
                name = row[_ID].strip()
                try:
                    if not _NAME.fullmatch(name):
                        raise malformed(table, f"expected an {_ID} like trn00001", _ID)
                    labels = _labels(row, columns, table)
                except CorpusError as error:
                    rows.skip(f"row_{error.code}", message=str(error))
                    continue
                path = self.root / f"{name}.npz"
                if not path.is_file():
                    rows.exclude("not_public")
                    continue
                patient = patients.get(name, "")
                warnings["no_patient_id"] += not patient
                sample = Sample(
                    key=deid.image(name),
                    corpus=self.corpus,
                    split=split,
                    patient=deid.patient(patient or name),
                    study=deid.study(patient or name, name),
                    image=path,
                    labels=labels,
                )
                records.append(Record(sample, volume=FILE))
                rows.kept += 1
        return Plan(self.corpus, records, tuple(names), rows, +warnings, allowed)


def _labels(row: Mapping[str, str], columns: list[str], table: Path) -> dict[str, int]:
    labels: dict[str, int] = {}
    for column in columns:
        try:
            value = cell_label(row[column])
        except ValueError:
            raise malformed(table, f"expected 1, 0 or blank for {column}", column) from None
        if value is not None:
            name = column.partition("*")[0]
            labels[name] = max(value, labels.get(name, 0))
    return labels


def _patients(path: Path, allowed: InputFolders) -> dict[str, str]:
    """Return the patient of each scan; nothing without the table."""
    if not path.is_file():
        return {}
    rows = read_table(path, (_ID, "MRN_DEID"), allowed)
    return {row[_ID].strip(): cell_text(row["MRN_DEID"]) for row in rows}
