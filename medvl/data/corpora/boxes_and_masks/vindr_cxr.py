"""VinDr-CXR 1.0.0. Layout, counts and access: `data_cards/vindr-cxr.md`."""

import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import ClassVar, Literal, get_args

from medvl.common.config_io import check_choice
from medvl.common.untrusted import InputFolders
from medvl.data.annotations import Box, merge_readers, read_corners
from medvl.data.corpora.common.record_file import Records
from medvl.data.corpora.common.rows import RowCounts
from medvl.data.corpora.common.tables import (
    Plan,
    Record,
    find_suffix,
    malformed,
    own_study,
    read_table,
    split_training,
)
from medvl.data.corpora.registry import Corpus, FileAccess, register_corpus
from medvl.data.privacy import Deidentifier
from medvl.data.splits import hash_split
from medvl.errors import ConfigError, CorpusError
from medvl.schema import Sample

LOCAL_LABELS = (
    "Aortic enlargement", "Atelectasis", "Calcification", "Cardiomegaly", "Clavicle fracture",
    "Consolidation", "Edema", "Emphysema", "Enlarged PA", "ILD", "Infiltration", "Lung Opacity",
    "Lung cavity", "Lung cyst", "Mediastinal shift", "Nodule/Mass", "Pleural Effusion",
    "Pleural Thickening", "Pneumothorax", "Pulmonary fibrosis", "Rib fracture", "Other lesion",
)  # fmt: skip
"""Findings, which have boxes."""
GLOBAL_LABELS = ("COPD", "Lung tumor", "Pneumonia", "Tuberculosis", "Other diseases", "No Finding")
"""Diagnoses, which have none."""
LABELS = (*LOCAL_LABELS, *GLOBAL_LABELS)

Boxes = Literal["merged", "all"]

_RENAMED = {
    "Pleural effusion": "Pleural Effusion",
    "Pleural thickening": "Pleural Thickening",
    "No finding": "No Finding",
    "Other disease": "Other diseases",  # in the table of the test split
}
"""Release name -> label name here: the CheXpert or NIH name where the finding is the same."""
_READERS = 3
_ID = re.compile(r"[0-9a-f]{32}")
CORNERS = ("x_min", "y_min", "x_max", "y_max")
"""Columns of a box."""
VALUES = {"1": True, "1.0": True, "0": False, "0.0": False, "": False}
"""Cell of a label -> whether it is given."""


@register_corpus("vindr-cxr")
@dataclasses.dataclass(frozen=True, kw_only=True)
class VinDrCXR(Corpus):
    """Convert VinDr-CXR, with the official test split: labels and boxes."""

    labels: ClassVar[tuple[str, ...]] = LABELS
    counts: ClassVar[Mapping[str, int]] = {"images": 18_000, "test": 3_000}
    textless: ClassVar[bool] = True

    root: Path
    """folder of the release: annotations/, train/ and test/."""
    agreement: int = 2
    """how many of the three radiologists of a training image have to name a label."""
    boxes: Boxes = "merged"
    """merged replaces the radiologists' boxes of one object by their mean; all keeps each of them.
    """
    validate_share: float = 0.1
    """fraction of the official training images for validation."""

    def plan(self, deid: Deidentifier, access: FileAccess = FileAccess()) -> Plan:
        """Plan the samples of VinDr-CXR from its tables; no image is opened.

        Raises CorpusError when a table is missing, or a value does not match the data card;
        ConfigError when an option is unknown or out of range.
        """
        root = self.root
        allowed = access.folders(root)
        check_choice(self.boxes, get_args(Boxes), "boxes")
        shares = split_training(self.validate_share)
        if not 1 <= self.agreement <= _READERS:
            raise ConfigError(
                f"agreement must be 1 to {_READERS}, got {self.agreement}",
                "out_of_range",
                field="agreement",
            )
        rows = RowCounts()
        records = Records()
        for folder in ("train", "test"):
            votes = _read_votes(
                root / "annotations" / f"image_labels_{folder}.csv", folder, allowed
            )
            drawn = _read_boxes(
                root / "annotations" / f"annotations_{folder}.csv", folder, votes, allowed
            )
            suffix: str | None = None
            for image, named in rows.reading(votes.items()):
                own = own_study(image, deid)
                file = root / folder / f"{image}.dicom"
                suffix = suffix or find_suffix(file, (".dicom", ".dcm"))
                labels = _labels(named, self.agreement if folder == "train" else 1)
                readers = [
                    [box for box in group if labels[str(box["label"])]]
                    for group in drawn.get(image, {}).values()
                ]
                sample = Sample(
                    **own,
                    corpus=self.corpus,
                    split=hash_split(own["patient"], shares) if folder == "train" else "test",
                    image=file.with_suffix(suffix or ".dicom"),
                    labels=labels,
                    view="PA",
                    extra={
                        "boxes": merge_readers(readers)
                        if self.boxes == "merged"
                        else [*itertools.chain(*readers)]
                    },
                )
                records.append(Record(sample))
                rows.kept += 1
        return Plan(self.corpus, records, self.labels, rows, folders=allowed)


def _labels(named: Counter[str], agreement: int) -> dict[str, int]:
    """Return label -> 1 or 0. No Finding is 1 only if no other label is, also under a lower
    agreement.
    """
    labels = {label: int(named[label] >= agreement) for label in LABELS}
    labels["No Finding"] &= sum(labels.values()) == 1
    return labels


def _read_votes(table: Path, folder: str, allowed: InputFolders) -> dict[str, Counter[str]]:
    """Read image -> label -> number of readers who named it; the test split has one row per
    image.
    """
    votes: dict[str, Counter[str]] = {}
    seen: set[tuple[str, str]] = set()
    for row in read_table(table, _columns(folder), allowed):
        cells = {_name(column): value.strip() for column, value in row.items()}
        missing = [label for label in LABELS if label not in cells]
        if missing:
            raise CorpusError(
                f"{table} lacks the column of {missing[0]}", "missing", field=missing[0]
            )
        image = read_image_id(cells, table)
        unknown = [label for label in LABELS if cells[label] not in VALUES]
        if unknown:
            raise malformed(
                table, f"expected 1, 0 or blank for {unknown[0]}, got another value", unknown[0]
            )
        reader = image, cells.get("rad_id", "")
        if reader in seen:
            raise malformed(table, "the same reader has two rows for one image", "image_id")
        seen.add(reader)
        votes.setdefault(image, Counter()).update(label for label in LABELS if VALUES[cells[label]])
    return votes


def _read_boxes(
    table: Path, folder: str, images: Iterable[str], allowed: InputFolders
) -> dict[str, dict[str, list[Box]]]:
    """Read image -> reader -> boxes. Rows without a finding have no coordinates."""
    boxes: dict[str, dict[str, list[Box]]] = {}
    known = set(images)
    for row in read_table(table, (*_columns(folder), "class_name", *CORNERS), allowed):
        image = read_image_id(row, table)
        label = _name(row["class_name"])
        if image not in known:
            raise CorpusError(
                f"{table} has an image that the table of labels lacks: download both again",
                "mismatch",
            )
        if label in GLOBAL_LABELS and not any(row[name].strip() for name in CORNERS):
            continue
        if label not in LOCAL_LABELS:
            raise malformed(
                table, "expected a finding with a box, or No finding without one", "class_name"
            )
        box = read_corners(label, [row[name] for name in CORNERS], None, table)
        boxes.setdefault(image, {}).setdefault(row.get("rad_id", ""), []).append(box)
    return boxes


def _columns(folder: str) -> tuple[str, ...]:
    return ("image_id", "rad_id") if folder == "train" else ("image_id",)


def _name(text: str) -> str:
    return _RENAMED.get(text.strip(), text.strip())


def read_image_id(row: Mapping[str, str], table: Path) -> str:
    """Return the image of a row. Raises CorpusError when it is malformed."""
    if not _ID.fullmatch(row["image_id"]):
        raise malformed(table, "expected an image_id of 32 hexadecimal digits", "image_id")
    return row["image_id"]
