"""INSPECT (2023). Layout, counts and access: `data_cards/inspect.md`."""

import dataclasses
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from medvl.common.untrusted import InputFolders
from medvl.data.corpora.common.record_file import Records
from medvl.data.corpora.common.rows import RowCounts, cell_id, cell_label, cell_text, report_text
from medvl.data.corpora.common.tables import Plan, Record, malformed, read_table
from medvl.data.corpora.registry import Corpus, FileAccess, register_corpus
from medvl.data.privacy import Deidentifier
from medvl.data.volumes.options import VolumeFile
from medvl.errors import CorpusError
from medvl.schema import Sample

_SPLITS = {"train": "train", "valid": "validate", "validation": "validate", "test": "test"}
_IMAGE = re.compile(r"[A-Za-z0-9]+")
_SUFFIX = ".nii.gz"
_ID = "impression_id"
_CENSORED = ("censored", "censor")
_FINDINGS = {
    "pe_positive_nlp": "Pulmonary embolism",
    "pe_acute_nlp": "Acute pulmonary embolism",
    "pe_subsegmentalonly_nlp": "Subsegmental pulmonary embolism only",
}
_OUTCOMES = {
    f"{months}_month_{outcome}": f"{outcome} within {months} months".replace("1 months", "1 month")
    for outcome, times in (("mortality", (1, 6, 12)), ("readmission", (1, 6, 12)), ("PH", (12,)))
    for months in times
}
_LABELS: Mapping[str, str] = {
    **_FINDINGS,
    **{column: name[0].upper() + name[1:] for column, name in _OUTCOMES.items()},
}
"""Column -> label; PH is pulmonary hypertension."""


@register_corpus("inspect")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Inspect(Corpus):
    """Convert INSPECT: CT pulmonary angiograms with impressions, embolism and outcomes."""

    counts: ClassVar[Mapping[str, int]] = {"images": 23_240}
    """Studies whose file is in the release."""
    has_volumes: ClassVar[bool] = True

    root: Path
    """folder with CTPA/ and the tables, such as full/ of the release."""

    def plan(self, deid: Deidentifier, access: FileAccess = FileAccess()) -> Plan:
        """Plan the samples of INSPECT from its tables; no volume is opened.

        Raises CorpusError when a table other than that of labels is missing, or one does not match
        the data card.
        """
        allowed = access.folders(self.root)
        splits = self._column("splits", "split", allowed)
        impressions = self._column("impressions", "impressions", allowed)
        labels, names = self._labels(allowed)
        table = self._table("study_mapping")
        rows = RowCounts()
        warnings = Counter[str]()
        records = Records()
        seen: set[str] = set()
        for row in rows.reading(read_table(table, (_ID, "person_id", "image_id"), allowed)):
            try:
                number, person = cell_id(row[_ID]), cell_id(row["person_id"])
                image = cell_text(row["image_id"]).removesuffix(_SUFFIX)
                if not number or not person or not _IMAGE.fullmatch(image):
                    raise malformed(table, "expected ids of impression, person and image", _ID)
            except (CorpusError, ValueError) as error:
                rows.skip("row_malformed", message=str(error))
                continue
            split = _SPLITS.get(splits.get(number, "").lower())
            if split is None:
                rows.skip("without_split")
                continue
            if image in seen:
                rows.exclude("duplicate_row")
                continue
            seen.add(image)
            text = report_text(impressions.get(number, ""), warnings)
            sample = Sample(
                key=deid.image(image),
                corpus=self.corpus,
                split=split,
                patient=deid.patient(person),
                study=deid.study(person, image),
                image=self.root / "CTPA" / f"{image}{_SUFFIX}",
                sections={"impression": text} if text else {},
                labels=labels.get(number, {}),
            )
            records.append(Record(sample, volume=VolumeFile()))
            rows.kept += 1
        return Plan(self.corpus, records, names, rows, +warnings, allowed)

    def _table(self, name: str) -> Path:
        """Return the newest table of a name. Raises CorpusError ("not_found") without one."""
        paths = sorted(self.root.glob(f"{name}_[0-9]*.tsv")) or [self.root / f"{name}.tsv"]
        if not paths[-1].is_file():
            raise CorpusError(
                f"{self.root}: expected {name}_DATE.tsv, got none; give the folder with CTPA/ and "
                "the tables",
                "not_found",
                field="root",
            )
        return paths[-1]

    def _column(self, name: str, column: str, allowed: InputFolders) -> dict[str, str]:
        """Return a column of a table by the id of the impression.

        Raises CorpusError for an id with two values.
        """
        table = self._table(name)
        values: dict[str, str] = {}
        for row in read_table(table, (_ID, column), allowed):
            number, value = _number(row, table), cell_text(row[column])
            if values.setdefault(number, value) != value:
                raise malformed(table, "expected one value for each impression", column)
        return values

    def _labels(self, allowed: InputFolders) -> tuple[dict[str, dict[str, int]], tuple[str, ...]]:
        """Return the labels of each impression, and their names; none without the table."""
        if not any(self.root.glob("labels*.tsv")):
            return {}, ()
        table = self._table("labels")
        labels: dict[str, dict[str, int]] = {}
        columns: list[str] = []
        for row in read_table(table, (_ID,), allowed):
            columns = columns or [name for name in row if name in _LABELS]
            try:
                values = {
                    _LABELS[column]: cell_label(row[column])
                    for column in columns
                    if cell_text(row[column]).lower() not in _CENSORED
                }
            except ValueError:
                message = "expected True, False, Censored or blank for labels"
                raise malformed(table, message) from None
            labels[_number(row, table)] = {
                name: value for name, value in values.items() if value is not None
            }
        return labels, tuple(_LABELS[column] for column in columns)


def _number(row: Mapping[str, str], table: Path) -> str:
    try:
        return cell_id(row[_ID])
    except ValueError:
        raise malformed(table, "expected an id of an impression", _ID) from None
