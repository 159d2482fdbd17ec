"""ChestX-Det10 (2020): boxes of ten findings on images of NIH ChestX-ray14. See
`data_cards/chestxdet10.md`.
"""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from medvl.data.annotations import Box, read_corners, region_fields
from medvl.data.corpora.common.questions import read_rows
from medvl.data.corpora.common.record_file import Records
from medvl.data.corpora.common.rows import RowCounts
from medvl.data.corpora.common.tables import Plan, Record, malformed, split_training
from medvl.data.corpora.registry import Corpus, FileAccess, register_corpus
from medvl.data.privacy import Deidentifier
from medvl.data.splits import hash_split
from medvl.schema import Sample

LABELS = (
    "Atelectasis", "Calcification", "Consolidation", "Emphysema", "Fibrosis", "Fracture", "Mass",
    "Nodule", "Pleural Effusion", "Pneumothorax",
)  # fmt: skip

_RENAMED = {"Effusion": "Pleural Effusion"}
"""Release name -> CheXpert name."""
_SIZE = (1024, 1024)
_IMAGE = re.compile(r"(\d{8})_\d{3}\.png|\d{1,12}\.png")


@register_corpus("chestxdet10")
@dataclasses.dataclass(frozen=True, kw_only=True)
class ChestXDet10(Corpus):
    """Convert ChestX-Det10, with the official test split: boxes of ten findings."""

    labels: ClassVar[tuple[str, ...]] = LABELS
    counts: ClassVar[Mapping[str, int]] = {"images": 3_543, "test": 542}
    textless: ClassVar[bool] = True

    root: Path
    """folder with train.json, test.json, train_data/ and test_data/."""
    validate_share: float = 0.1
    """fraction of the patients of the official training images for validation."""

    def plan(self, deid: Deidentifier, access: FileAccess = FileAccess()) -> Plan:
        """Plan the samples of ChestX-Det10 from its annotations; no image is opened.

        Training images of patients in the test split are left out, counted as `patient_in_test`.
        Raises CorpusError when a file is missing, or a value does not match the data card;
        ConfigError when the share is not between 0 and 1.
        """
        root = self.root
        allowed = access.folders(root)
        shares = split_training(self.validate_share)
        rows = RowCounts()
        records = Records()
        tested = set[str]()
        for folder in ("test", "train"):
            path = root / f"{folder}.json"
            for row in rows.reading(read_rows(path, ("file_name", "syms", "boxes"), allowed)):
                name, number = _read_name(row, path)
                patient = deid.patient(number)
                boxes = _read_boxes(row, path)
                if folder == "test":
                    tested.add(patient)
                elif patient in tested:
                    rows.exclude("patient_in_test")
                    continue
                found = {box["label"] for box in boxes}
                sample = Sample(
                    key=deid.image(name),
                    corpus=self.corpus,
                    split=hash_split(patient, shares) if folder == "train" else "test",
                    patient=patient,
                    study=deid.study(number, name),
                    image=root / f"{folder}_data" / name,
                    labels={label: int(label in found) for label in self.labels},
                    extra=region_fields(_SIZE, {"boxes": boxes}),
                )
                records.append(Record(sample))
                rows.kept += 1
        return Plan(self.corpus, records, self.labels, rows, folders=allowed)


def _read_name(row: Mapping[str, Any], path: Path) -> tuple[str, str]:
    """Return the file name, and the patient's number in NIH ChestX-ray14 or else the file name."""
    name = row["file_name"]
    match = _IMAGE.fullmatch(name) if isinstance(name, str) else None
    if match is None:
        raise malformed(
            path, "expected a file_name like 36199.png or 00000042_006.png", "file_name"
        )
    return name, match[1] or name


def _read_boxes(row: Mapping[str, Any], path: Path) -> list[Box]:
    names = row["syms"]
    corners = row["boxes"]
    if not isinstance(names, list) or not isinstance(corners, list) or len(names) != len(corners):
        raise malformed(path, "expected lists of the same length for syms and boxes", "boxes")
    boxes = []
    for name, fields in zip(names, corners, strict=True):
        label = _RENAMED.get(name, name) if isinstance(name, str) else None
        if label not in LABELS:
            raise malformed(path, "expected one of the ten findings in syms", "syms")
        if not isinstance(fields, list):
            raise malformed(path, "expected a list of four numbers for each box", "boxes")
        boxes.append(read_corners(label, fields, _SIZE, path))
    return boxes
