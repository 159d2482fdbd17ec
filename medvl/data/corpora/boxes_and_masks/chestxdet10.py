"""ChestX-Det10 (2020) and ChestX-Det (2021): boxes of ten and of thirteen findings, and masks of
the latter, on images of NIH ChestX-ray14. See `data_cards/chestxdet10.md`.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import cv2
import numpy as np

from medvl.data.annotations import Box, encode_runs, read_corners, region_fields
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

LABELS_13 = tuple(sorted((*LABELS, "Cardiomegaly", "Diffuse Nodule", "Pleural Thickening")))
"""Findings of ChestX-Det."""

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
    annotations: ClassVar[str] = ""
    """Text before train.json and test.json in the names of the files."""
    has_masks: ClassVar[bool] = False

    root: Path
    """folder with train.json, test.json, train_data/ and test_data/."""
    validate_share: float = 0.1
    """fraction of the patients of the official training images for validation."""

    def plan(self, deid: Deidentifier, access: FileAccess = FileAccess()) -> Plan:
        """Plan the samples from the annotations; no image is opened.

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
            path = root / f"{self.annotations}{folder}.json"
            for row in rows.reading(read_rows(path, self._columns(), allowed)):
                name, number = _read_name(row, path)
                patient = deid.patient(number)
                boxes = _read_boxes(row, path, self.labels)
                masks = {"masks": _read_masks(row, path, boxes)} if self.has_masks else {}
                if folder == "test":
                    tested.add(patient)
                elif patient in tested:
                    rows.exclude("patient_in_test")
                    continue
                findings = {box["label"] for box in boxes}
                sample = Sample(
                    key=deid.image(name),
                    corpus=self.corpus,
                    split=hash_split(patient, shares) if folder == "train" else "test",
                    patient=patient,
                    study=deid.study(number, name),
                    image=root / f"{folder}_data" / name,
                    labels={label: int(label in findings) for label in self.labels},
                    extra=region_fields(_SIZE, {"boxes": boxes, **masks}),
                )
                records.append(Record(sample))
                rows.kept += 1
        return Plan(self.corpus, records, self.labels, rows, folders=allowed)

    def _columns(self) -> tuple[str, ...]:
        return ("file_name", "syms", "boxes", *(("polygons",) if self.has_masks else ()))


@register_corpus("chestxdet")
@dataclasses.dataclass(frozen=True, kw_only=True)
class ChestXDet(ChestXDet10):
    """Convert ChestX-Det, with the official test split: boxes and masks of thirteen findings."""

    labels: ClassVar[tuple[str, ...]] = LABELS_13
    counts: ClassVar[Mapping[str, int]] = {"images": 3_578}
    annotations: ClassVar[str] = "ChestX_Det_"
    has_masks: ClassVar[bool] = True

    root: Path
    """folder with ChestX_Det_train.json, ChestX_Det_test.json, train_data/ and test_data/."""


def _read_name(row: Mapping[str, Any], path: Path) -> tuple[str, str]:
    """Return the file name, and the patient's number in NIH ChestX-ray14 or else the file name."""
    name = row["file_name"]
    match = _IMAGE.fullmatch(name) if isinstance(name, str) else None
    if match is None:
        raise malformed(
            path, "expected a file_name like 36199.png or 00000042_006.png", "file_name"
        )
    return name, match[1] or name


def _read_boxes(row: Mapping[str, Any], path: Path, labels: Sequence[str]) -> list[Box]:
    names = row["syms"]
    corners = row["boxes"]
    if not isinstance(names, list) or not isinstance(corners, list) or len(names) != len(corners):
        raise malformed(path, "expected lists of the same length for syms and boxes", "boxes")
    boxes = []
    for name, fields in zip(names, corners, strict=True):
        label = _RENAMED.get(name, name) if isinstance(name, str) else None
        if label is None or label not in labels:
            raise malformed(path, f"expected one of {', '.join(labels)} in syms", "syms")
        if not isinstance(fields, list):
            raise malformed(path, "expected a list of four numbers for each box", "boxes")
        boxes.append(read_corners(label, fields, _SIZE, path))
    return boxes


def _read_masks(row: Mapping[str, Any], path: Path, boxes: Sequence[Box]) -> list[dict[str, str]]:
    """Return the mask of each finding from the points of its outline."""
    polygons = row["polygons"]
    if not isinstance(polygons, list) or len(polygons) != len(boxes):
        raise malformed(path, "expected a polygon for each of syms", "polygons")
    masks = []
    for box, polygon in zip(boxes, polygons, strict=True):
        try:
            points_N2 = np.array(polygon, dtype=np.float64).reshape(-1, 2)
        except (TypeError, ValueError):
            points_N2 = np.zeros((0, 2))
        inside = (points_N2 >= -1).all() and (points_N2 <= np.array(_SIZE)).all()
        if not len(points_N2) or not inside:
            message = "expected points inside of the image for each of polygons"
            raise malformed(path, message, "polygons")
        mask_HW = np.zeros(_SIZE[::-1], np.uint8)
        cv2.fillPoly(mask_HW, [np.rint(points_N2).astype(np.int32)], (1,))
        masks.append({"label": str(box["label"]), "runs": encode_runs(mask_HW > 0)})
    return masks
