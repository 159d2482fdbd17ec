"""Tables of small real collections in the folder that `MEDVL_REAL_DATA` names, for `medvl shards table`.

Splits are those of the collections' files, which share no patient or case. MedPix is without the images of
VQA-RAD. Of the paediatric radiographs, images of a person number that the training images have too are left out, and a
tenth of the training persons are for validation.
"""

import csv
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

from medvl.common.files import write_atomic
from medvl.errors import ConfigError

_REGIONS = ("Head", "Spine and Muscles", "Thorax", "Abdomen", "Reproductive and Urinary System")
_CAUSES = ("COVID-19", "Bacterial", "Fungal")
_NIH = (
    *("Atelectasis", "Cardiomegaly", "Consolidation", "Edema", "Effusion", "Infiltration", "Mass", "Nodule"),
    *("Pneumonia", "Pneumothorax", "No Finding"),
)
_PARTS = {"train": "train", "val": "validate", "test": "test"}
Row = dict[str, Any]


def write_table(name: str, folder: Path) -> list[Path]:
    """Write NAME.csv for `medvl shards table`, and NAME.json with a prompt for each label.

    Raises ConfigError where `MEDVL_REAL_DATA` names no folder with the collection.
    """
    real = Path(os.environ.get("MEDVL_REAL_DATA") or "/MEDVL_REAL_DATA is not set")
    try:
        rows = list(TABLES[name](real))
    except FileNotFoundError as error:
        message = f"{error.filename} does not exist; set MEDVL_REAL_DATA to the folder of the real collections"
        raise ConfigError(message, "not_found", field="MEDVL_REAL_DATA") from None
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    labels = [column for column in rows[0] if column not in ("image", "patient", "impression", "split")]
    classes = {label: {"positive": [f"{label.lower()}."]} for label in labels}
    prompts = {"name": name, "scoring": "class_softmax", "temperature": 0.1, "classes": classes}
    return [path, write_atomic(folder / f"{name}.json", json.dumps(prompts) + "\n")]


def _medpix(real: Path) -> Iterator[Row]:
    for row in _lines(real / "medpix/captions.jsonl"):
        if row["also_in_vqa_rad"]:
            continue
        labels = {name: int(row["location_category"] == name) for name in _REGIONS}
        labels |= {name: int(row["modality_type"] == name) for name in ("CT", "MR")}
        yield _row(f"medpix/{row['image']}", row["case_id"], row["caption"], row["split"], labels)


def _radiographs(real: Path) -> Iterator[Row]:
    for row in _lines(real / "cxr/cxr.jsonl"):
        if row["text"]:
            labels = {name: int(name in row["labels"]) for name in _CAUSES}
            yield _row(f"cxr/{row['image']}", row["patient_id"], row["text"], row["split"], labels)


def _nih(real: Path) -> Iterator[Row]:
    for row in _lines(real / "cxr/cxr.jsonl"):
        if row["source"] == "nih-chestxray14":
            labels = {name: int(name in row["labels"]) for name in _NIH}
            yield _row(f"cxr/{row['image']}", row["patient_id"], "", row["split"], labels)


def _paediatric(real: Path) -> Iterator[Row]:
    for row in _lines(real / "cxr_pediatric_pneumonia/items.jsonl"):
        if row["split"] == "test" and row["person_also_in_train"]:
            continue
        person = f"{row['label']}-{row['person']}"  # numbers are those of a class
        kept_out = row["split"] == "train" and crc32(person.encode()) % 10 == 0
        labels = {"Pneumonia": int(row["label"] != "normal"), "Bacterial": int(row["label"] == "bacteria")}
        split = "val" if kept_out else row["split"]
        yield _row(f"cxr_pediatric_pneumonia/{row['image']}", person, "", split, labels)


TABLES: Mapping[str, Callable[[Path], Iterator[Row]]] = {
    "medpix": _medpix,
    "radiographs": _radiographs,
    "nih": _nih,
    "paediatric": _paediatric,
}


def _row(image: str, patient: str, text: str, split: str, labels: Mapping[str, int]) -> Row:
    return {"image": image, "patient": patient, "impression": text, "split": _PARTS[split], **labels}


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        yield from map(json.loads, file)
