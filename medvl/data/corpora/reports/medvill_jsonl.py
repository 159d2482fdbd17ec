"""MedViLL's preparations of Open-i and MIMIC-CXR: `Train.jsonl`, `Valid.jsonl`, `Test.jsonl` and
their images.

Data card: `data_cards/medvill-jsonl.md`.
"""

import dataclasses
import os
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from medvl.common.config_io import check_choice
from medvl.common.untrusted import InputFolders
from medvl.data.corpora.common.record_file import Records
from medvl.data.corpora.common.rows import RowCounts
from medvl.data.corpora.common.tables import Plan, Record, malformed, read_json_lines, read_table
from medvl.data.corpora.registry import Corpus, FileAccess, register_corpus
from medvl.data.privacy import Deidentifier
from medvl.data.reports.cleaning import clean_text
from medvl.data.reports.sentences import one_line
from medvl.errors import ConfigError, CorpusError
from medvl.schema import Sample

Source = Literal["openi", "mimic"]
_SPLITS = {"Train.jsonl": "train", "Valid.jsonl": "validate", "Test.jsonl": "test"}
_FIELDS = ("id", "label", "text", "img")
_ID = re.compile(r"[\w.-]{1,80}")
_LABEL = re.compile(r"'([^']{1,60})'")


@register_corpus("medvill-jsonl")
@dataclasses.dataclass(frozen=True, kw_only=True)
class MedViLLJsonl(Corpus):
    """Convert MedViLL's preparation of Open-i or MIMIC-CXR (JSON lines), with its split."""

    root: Path
    """folder with Train.jsonl, Valid.jsonl, Test.jsonl, or some of them."""
    source: Source = "openi"
    """corpus that the files were made from."""
    images: Path | None = None
    """folder that image paths are relative to; default root."""
    patients: Path | None = None
    """mimic-cxr-2.0.0-split.csv(.gz), which names the patients of MIMIC-CXR."""

    def plan(self, deid: Deidentifier, access: FileAccess = FileAccess()) -> Plan:
        """Plan the samples of MedViLL's files: one for each line, with the report of its image; no
        image is opened.

        Raises CorpusError when there is no file, or one is damaged or has a line of another form;
        ConfigError when `patients` is given for Open-i.
        """
        check_choice(self.source, get_args(Source), "source")
        if self.patients is not None and self.source != "mimic":
            raise ConfigError("patients applies to source=mimic", "conflict", field="patients")
        root = self.root
        home = Path(os.path.realpath(self.images or root))
        allowed = access.folders(root, home, *([self.patients.parent] if self.patients else []))
        known = {} if self.patients is None else _patients(self.patients, allowed)
        rows = RowCounts()
        warnings = Counter[str]()
        records = Records()
        for name, split in _SPLITS.items():
            path = root / name
            if not path.is_file():
                continue
            for number, row in rows.reading(read_json_lines(path, _FIELDS, allowed)):
                where = f"{path}, row {number}"
                records.append(
                    Record(_sample(row, where, split, self.source, home, known, deid, warnings))
                )
                rows.kept += 1
        if not records:
            raise CorpusError(
                f"{root} has no line in {', '.join(_SPLITS)}: see the data card", "not_found"
            )
        return Plan(self.corpus, records, (), rows, +warnings, allowed)


def _sample(
    row: Mapping[str, Any],
    where: str,
    split: str,
    source: Source,
    images: Path,
    known: Mapping[str, tuple[str, str]],
    deid: Deidentifier,
    warnings: Counter[str],
) -> Sample:
    if not all(isinstance(row[name], str) for name in _FIELDS) or not _ID.fullmatch(row["id"]):
        raise malformed(where, "expected texts as id, label, text and img")
    image = Path(os.path.normpath(images / row["img"]))
    if not image.is_relative_to(images):
        raise malformed(where, "img leads out of the folder of images", "img")
    if source == "openi":  # ids are the numbers of Open-i's reports
        patient = study = row["id"] if row["id"].startswith("CXR") else f"CXR{row['id']}"
    # a study's id is that of its folder, such as s50414267
    elif (name := row["id"].removeprefix("s")) in known:
        patient, study = known[name]
    else:
        patient = study = row["id"]
        warnings["patient_unknown"] += 1
    text = one_line(clean_text(row["text"]))
    warnings["empty_report"] += not text
    labels = _LABEL.findall(row["label"])
    warnings["label_unreadable"] += bool(row["label"].strip(" '")) and not labels
    return Sample(
        key=deid.image(f"{source} {row['id']} {row['img']}"),
        corpus=MedViLLJsonl.corpus,
        split=split,
        patient=deid.patient(patient),
        study=deid.study(patient, study),
        image=image,
        sections={"findings": text} if text else {},
        extra={"medvill_labels": labels},
    )


def _patients(path: Path, allowed: InputFolders) -> dict[str, tuple[str, str]]:
    """Return (patient, study) by the id of an image and by the id of a study."""
    known = {}
    for row in read_table(path, ("dicom_id", "study_id", "subject_id"), allowed):
        known[row["dicom_id"]] = known[row["study_id"]] = (row["subject_id"], row["study_id"])
    return known
