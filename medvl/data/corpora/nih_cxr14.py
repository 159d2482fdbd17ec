"""NIH ChestX-ray14 (2017). Layout, counts and access: `data_cards/nih-cxr14.md`."""

import csv
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from medvl.data.annotations.boxes import Box, read_box, region_fields
from medvl.data.corpora.common.record_file import Records
from medvl.data.corpora.common.tables import Plan, Record, check_columns, find_file, open_text, read_table
from medvl.data.privacy.deidentify import Deidentifier, cap_age
from medvl.data.splits import hash_split
from medvl.errors import ConfigError, CorpusError
from medvl.schema import Sample

NAME = "nih-cxr14"
COUNTS: Mapping[str, int] = {"images": 112_120, "test": 25_596}
"""Of the full release: what `medvl verify --full` compares with."""
LABELS = (
    "Atelectasis",
    "Cardiomegaly",
    "Consolidation",
    "Edema",
    "Emphysema",
    "Fibrosis",
    "Hernia",
    "Infiltration",
    "Mass",
    "No Finding",
    "Nodule",
    "Pleural Effusion",
    "Pleural Thickening",
    "Pneumonia",
    "Pneumothorax",
)

_RENAMED = {"Effusion": "Pleural Effusion", "Pleural_Thickening": "Pleural Thickening", "Infiltrate": "Infiltration"}
"""The release's names that are written otherwise here: as in CheXpert where it is the same finding."""
_TABLES = ("Data_Entry_2017_v2020.csv", "Data_Entry_2017.csv")
_COLUMNS = ("Image Index", "Finding Labels", "Patient ID", "Patient Age", "View Position")
_SEX_COLUMNS = ("Patient Gender", "Patient Sex")
_SIZE = (1024, 1024)
"""Of every PNG of the release, which is what its boxes are drawn in; the radiographs were larger."""
_IMAGE = re.compile(r"(\d{8})_\d{3}\.png")
_OLDEST = 120  # some ages are beyond anyone's: the first release has 411


def plan(root: Path, deid: Deidentifier, *, validate_share: float = 0.125) -> Plan:
    """Everything that the tables say about the images; no image is opened.

    Args:
        root: the folder that holds the table, the two lists, and `images/` or `images_001/images/` to `images_012/`.
        deid: hashes patients and images.
        validate_share: of the patients of the official `train_val_list.txt`, by hash, who validate.

    Raises:
        CorpusError: a table or list is missing, or a value is not what the data card says.
        ConfigError: the share is not within 0 and 1.
    """
    root = Path(root)
    if not 0 < validate_share < 1:
        raise ConfigError(f"validate_share must be between 0 and 1, got {validate_share:g}")
    shares = {"train": 1 - validate_share, "validate": validate_share}
    table = find_file(root, *_TABLES)
    official = _read_lists(root)
    boxes = _read_boxes(root / "BBox_List_2017.csv")
    folders = _image_folders(root)
    excluded, noticed = Counter[str](), Counter[str]()
    records = Records()
    for row in read_table(table, _COLUMNS):
        name = row["Image Index"]
        match = _IMAGE.fullmatch(name)
        if match is None or match[1].lstrip("0") != row["Patient ID"].lstrip("0"):
            raise CorpusError(f"{table}: an Image Index is not that of its Patient ID, such as 00000013_005.png")
        if name not in official:
            excluded["in_no_official_list"] += 1
            continue
        patient = deid.patient(match[1])  # with the zeros, as RSNA's mapping has it: shared patients are found
        regions = {"boxes": boxes[name]} if name in boxes else {}
        sample = Sample(
            key=deid.image(name),
            corpus=NAME,
            split=hash_split(patient, shares) if official[name] == "train_val" else "test",
            patient=patient,
            study=deid.study(match[1], name),
            image=folders.get(name, root / "images") / name,
            labels=_labels(row["Finding Labels"], table),
            view=row["View Position"] or None,
            sex=_sex(row),
            age=_age(row["Patient Age"], noticed),
            extra=region_fields(_SIZE, regions) if regions else {},
        )
        records.append(Record(sample))
    return Plan(NAME, records, LABELS, excluded, noticed)


def iter_samples(root: Path, *, deid: Deidentifier) -> Iterator[Sample]:
    """Samples of all splits. Raises CorpusError."""
    for record in plan(root, deid).records:
        yield record.sample


def _labels(text: str, table: Path) -> dict[str, int]:
    named = {_RENAMED.get(word, word) for word in text.split("|")}
    unknown = named - set(LABELS)
    if unknown:
        raise CorpusError(f"{table}: Finding Labels has {min(unknown)!r}, which is none of the 15 names")
    return {label: int(label in named) for label in LABELS}


def _sex(row: Mapping[str, str]) -> str | None:
    text = next((row[column] for column in _SEX_COLUMNS if column in row), "")
    return text if text in ("F", "M") else None


def _age(text: str, noticed: Counter[str]) -> int | None:
    if text.rstrip("Y").isdigit() and int(text.rstrip("Y")) > _OLDEST:
        noticed["impossible_age"] += 1
        return None
    return cap_age(text)


def _read_lists(root: Path) -> dict[str, str]:
    """Image -> "train_val" or "test"."""
    official: dict[str, str] = {}
    for split in ("train_val", "test"):
        path = root / f"{split}_list.txt"
        with open_text(path) as file:
            names = file.read().split()
        if any(not _IMAGE.fullmatch(name) or official.setdefault(name, split) != split for name in names):
            raise CorpusError(f"{path}: a line is no image, or an image of the other list")
    return official


def _read_boxes(path: Path) -> dict[str, list[Box]]:
    """Image -> its boxes. The header writes one name over four columns, so the columns go by their place."""
    boxes: dict[str, list[Box]] = {}
    if not path.is_file():
        return boxes
    with open_text(path) as file:
        rows = csv.reader(file)
        check_columns(path, next(rows, []), ("Image Index", "Finding Label", "Bbox [x"))
        for image, label, *fields in rows:
            name = _RENAMED.get(label, label)
            if name not in LABELS or not _IMAGE.fullmatch(image):
                raise CorpusError(f"{path}: a row does not name an image and one of the findings")
            boxes.setdefault(image, []).append(read_box(name, fields[:4], _SIZE, path))
    return boxes


def _image_folders(root: Path) -> dict[str, Path]:
    """File name -> folder that it lies in; the archives unpack into twelve folders, some mirrors have one."""
    folders = [root / "images", *sorted(root.glob("images_*/images"))]
    return {entry.name: folder for folder in folders if folder.is_dir() for entry in os.scandir(folder)}
