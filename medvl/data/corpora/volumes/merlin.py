"""Merlin Abdominal CT (2024). Layout, counts and access: `data_cards/merlin.md`."""

import dataclasses
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from medvl.common.untrusted import InputFolders
from medvl.data.corpora.common.formats import read_sheet
from medvl.data.corpora.common.record_file import Records
from medvl.data.corpora.common.rows import RowCounts, cell_id, cell_label, cell_text, report_text
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
from medvl.schema import NEGATIVE, POSITIVE, Sample

_REPORTS = ("reports_final_updated.xlsx", "reports_final.xlsx", "reports_final.csv")
_LABELS = "zero_shot_findings_disease_cls.csv"
_SPLITS = {"train": "train", "val": "validate", "valid": "validate", "validation": "validate"}
_SPLITS |= {"test": "test"}
_NAME = re.compile(r"[A-Za-z0-9]+")
_SUFFIXES = (".nii.gz", ".nii")


@register_corpus("merlin")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Merlin(Corpus):
    """Convert Merlin: abdominal CT with the findings of their reports, and labels."""

    counts: ClassVar[Mapping[str, int]] = {"images": 25_494}
    has_volumes: ClassVar[bool] = True

    root: Path
    """folder with merlin_data/ and the tables."""

    def notes(self, plan: Plan) -> list[str]:
        return [no_patients_note("scan", "no_patient_id")]

    def plan(self, deid: Deidentifier, access: FileAccess = FileAccess()) -> Plan:
        """Plan the samples of Merlin from its tables; no volume is opened.

        Raises CorpusError when the table of reports is missing, or a table does not match the data
        card.
        """
        allowed = access.folders(self.root)
        table = find_file(self.root, *_REPORTS)
        labels, names = _read_labels(self.root / _LABELS, allowed)
        rows = RowCounts()
        warnings = Counter[str]()
        records = Records()
        columns = ("study id", "Findings", "Split")
        for row in rows.reading(read_sheet(table, columns, allowed)):
            try:
                study = cell_id(row["study id"])
                split = _SPLITS.get(cell_text(row["Split"]).lower())
                if not _NAME.fullmatch(study) or split is None:
                    column = "Split" if split is None else "study id"
                    raise malformed(table, f"expected another value for {column}", column)
            except (CorpusError, ValueError) as error:
                code = error.code if isinstance(error, CorpusError) else "malformed"
                rows.skip(f"row_{code}", message=str(error))
                continue
            text = report_text(row["Findings"], warnings)
            warnings["no_patient_id"] += 1
            sample = Sample(
                key=deid.image(study),
                corpus=self.corpus,
                split=split,
                patient=deid.patient(study),
                study=deid.study(study, study),
                image=self._path(study),
                sections={"findings": text} if text else {},
                labels=labels.get(study, {}),
            )
            records.append(Record(sample, volume=VolumeFile()))
            rows.kept += 1
        return Plan(self.corpus, records, names, rows, +warnings, allowed)

    def _path(self, study: str) -> Path:
        paths = [self.root / "merlin_data" / f"{study}{suffix}" for suffix in _SUFFIXES]
        return next((path for path in paths if path.is_file()), paths[0])


def _read_labels(
    path: Path, allowed: InputFolders
) -> tuple[dict[str, dict[str, int]], tuple[str, ...]]:
    """Return the labels of each study, and their names. -1 is a finding that is not mentioned."""
    if not path.is_file():
        return {}, ()
    first, *names = read_header(path, allowed)
    labels = {}
    for row in read_table(path, (first, *names), allowed):
        try:
            values = {name: cell_label(row[name]) for name in names}
            study = cell_id(row[first])
        except ValueError:
            raise malformed(path, "expected an id, and 1, 0, -1 or blank for findings") from None
        labels[study] = {
            name: value for name, value in values.items() if value in (POSITIVE, NEGATIVE)
        }
    return labels, tuple(names)
