"""NIH ChestX-ray14 (2017). Layout, counts and access: `data_cards/nih-cxr14.md`."""

import csv
import dataclasses
import os
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from medvl.common.untrusted import InputFolders
from medvl.data.annotations import Box, read_box, region_fields
from medvl.data.corpora.common import tables
from medvl.data.corpora.common.record_file import Records
from medvl.data.corpora.common.rows import RowCounts
from medvl.data.corpora.common.tables import Plan, Record, malformed
from medvl.data.corpora.registry import Corpus, FileAccess, register_corpus
from medvl.data.privacy import Deidentifier, cap_age
from medvl.data.splits import hash_split
from medvl.schema import Sample

LABELS = (
    "Atelectasis", "Cardiomegaly", "Consolidation", "Edema", "Emphysema", "Fibrosis", "Hernia",
    "Infiltration", "Mass", "No Finding", "Nodule", "Pleural Effusion", "Pleural Thickening",
    "Pneumonia", "Pneumothorax",
)  # fmt: skip

_RENAMED = {
    "Effusion": "Pleural Effusion",
    "Pleural_Thickening": "Pleural Thickening",
    "Infiltrate": "Infiltration",
}
"""Release name -> label name here: the CheXpert name where the finding is the same."""
_TABLES = ("Data_Entry_2017_v2020.csv", "Data_Entry_2017.csv")
_COLUMNS = ("Image Index", "Finding Labels", "Patient ID", "Patient Age", "View Position")
_SEX_COLUMNS = ("Patient Gender", "Patient Sex")
_SIZE = (1024, 1024)
"""Size of every PNG of the release, which the boxes refer to; the original radiographs were
larger.
"""
_IMAGE = re.compile(r"(\d{8})_\d{3}\.png")
_OLDEST = 120  # the first release has ages up to 411


@register_corpus("nih-cxr14")
@dataclasses.dataclass(frozen=True, kw_only=True)
class NIHCXR14(Corpus):
    """Convert NIH ChestX-ray14, with the official test split: labels and boxes."""

    labels: ClassVar[tuple[str, ...]] = LABELS
    counts: ClassVar[Mapping[str, int]] = {"images": 112_120, "test": 25_596}
    textless: ClassVar[bool] = True

    root: Path
    """folder with Data_Entry_2017.csv, the two lists, and images/ or images_001/ to images_012/."""
    validate_share: float = 0.125
    """fraction of the patients of the official training list for validation."""

    def plan(self, deid: Deidentifier, access: FileAccess = FileAccess()) -> Plan:
        """Plan the samples of ChestX-ray14 from its tables; no image is opened.

        Raises CorpusError when a table or list is missing, or a value does not match the data card;
        ConfigError when the share is not between 0 and 1.
        """
        root = self.root
        allowed = access.folders(root)
        shares = tables.split_training(self.validate_share)
        table = tables.find_file(root, *_TABLES)
        official = _read_lists(root, allowed)
        boxes = _read_boxes(root / "BBox_List_2017.csv", allowed)
        folders = _image_folders(root)
        rows = RowCounts()
        warnings = Counter[str]()
        records = Records()
        for row in rows.reading(tables.read_table(table, _COLUMNS, allowed)):
            name = row["Image Index"]
            match = _IMAGE.fullmatch(name)
            if match is None or match[1].lstrip("0") != row["Patient ID"].lstrip("0"):
                raise malformed(
                    table,
                    "expected a name like 00000013_005.png with the Patient ID",
                    "Image Index",
                )
            if name not in official:
                rows.exclude("in_no_official_list")
                continue
            # zeros kept as in RSNA's mapping, so that shared patients have the same hash
            patient = deid.patient(match[1])
            regions = {"boxes": boxes.pop(name)} if name in boxes else {}
            sample = Sample(
                key=deid.image(name),
                corpus=self.corpus,
                split=hash_split(patient, shares) if official[name] == "train_val" else "test",
                patient=patient,
                study=deid.study(match[1], name),
                image=folders.get(name, root / "images") / name,
                labels=_labels(row["Finding Labels"], table),
                view=row["View Position"] or None,
                sex=_sex(row),
                age=_age(row["Patient Age"], warnings),
                extra=region_fields(_SIZE, regions) if regions else {},
            )
            records.append(Record(sample))
            rows.kept += 1
        warnings["boxes_without_image"] = len(boxes)
        return Plan(self.corpus, records, self.labels, rows, +warnings, allowed)


def _labels(text: str, table: Path) -> dict[str, int]:
    findings = {_RENAMED.get(word, word) for word in text.split("|")}
    unknown = findings - set(LABELS)
    if unknown:
        raise malformed(
            table,
            f"unknown finding {min(unknown)!r}; known are {', '.join(LABELS)}",
            "Finding Labels",
        )
    return {label: int(label in findings) for label in LABELS}


def _sex(row: Mapping[str, str]) -> str | None:
    text = next((row[column] for column in _SEX_COLUMNS if column in row), "")
    return text if text in ("F", "M") else None


def _age(text: str, warnings: Counter[str]) -> int | None:
    if text.rstrip("Y").isdecimal() and int(text.rstrip("Y")) > _OLDEST:
        warnings["impossible_age"] += 1
        return None
    return cap_age(text)


def _read_lists(root: Path, allowed: InputFolders) -> dict[str, str]:
    """Read the official lists: image name -> "train_val" or "test"."""
    official: dict[str, str] = {}
    for split in ("train_val", "test"):
        path = root / f"{split}_list.txt"
        for name in map(str.strip, tables.read_lines(path, allowed)):
            if name and (not _IMAGE.fullmatch(name) or official.setdefault(name, split) != split):
                raise malformed(path, "a line is not an image name, or is also in the other list")
    return official


def _read_boxes(path: Path, allowed: InputFolders) -> dict[str, list[Box]]:
    """Read image name -> boxes. The header has one name over four columns, so columns are read
    by position.
    """
    boxes: dict[str, list[Box]] = {}
    if not path.is_file():
        return boxes
    rows = csv.reader(tables.read_lines(path, allowed))
    try:
        tables.check_columns(path, next(rows, []), ("Image Index", "Finding Label", "Bbox [x"))
        for row in filter(None, rows):
            image, label, *fields = row if len(row) > 1 else (*row, "")
            name = _RENAMED.get(label, label)
            if name not in LABELS or not _IMAGE.fullmatch(image):
                raise malformed(path, "expected an image name and one of the findings in each row")
            boxes.setdefault(image, []).append(read_box(name, fields[:4], _SIZE, path))
    except csv.Error as error:
        raise malformed(path, f"not readable as a CSV table ({error}); check its quotes") from error
    return boxes


def _image_folders(root: Path) -> dict[str, Path]:
    """Return file name -> folder; the official archives unpack into twelve folders, some mirrors
    into one.
    """
    folders = [root / "images", *sorted(root.glob("images_*/images"))]
    return {
        entry.name: folder for folder in folders if folder.is_dir() for entry in os.scandir(folder)
    }
