"""RSNA Pneumonia Detection Challenge (2018), stage 2. Layout, counts and access: `data_cards/rsna.md`."""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, get_args

from medvl.data.annotations.boxes import Box, read_box, region_fields
from medvl.data.corpora.common.record_file import Records
from medvl.data.corpora.common.tables import Plan, Record, find_file, read_table
from medvl.data.privacy.deidentify import Deidentifier
from medvl.data.splits import check_fractions, hash_split
from medvl.errors import ConfigError, CorpusError
from medvl.schema import Sample

NAME = "rsna"
COUNTS: Mapping[str, int] = {"images": 26_684}
"""Labelled images of stage 2: what `medvl verify --full` compares with."""
LABELS = ("Pneumonia", "No Finding")
FRACTIONS: Mapping[str, float] = {"train": 0.7, "validate": 0.15, "test": 0.15}
"""Of GLoRIA and those who followed it; the release has no test labels."""

Patients = Literal["mapping", "image"]

_MAPPING = "pneumonia-challenge-dataset-mappings_2018.json"
_IMAGES = "stage_2_train_images"
_SIZE = (1024, 1024)
_CLASSES = ("Normal", "No Lung Opacity / Not Normal", "Lung Opacity")
_ID, _NIH = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"), re.compile(r"(\d{8})_\d{3}\.png")
_BOX = ("x", "y", "width", "height")


def plan(
    root: Path,
    deid: Deidentifier,
    *,
    patients: Patients = "mapping",
    fractions: Mapping[str, float] = FRACTIONS,
) -> Plan:
    """Everything that the tables say about the images; no image is opened.

    Args:
        root: the folder of the release: the two tables, `stage_2_train_images/`, and RSNA's mapping to NIH's files.
        deid: hashes patients and images.
        patients: "mapping" takes the patients of NIH ChestX-ray14, where the images come from; "image" takes every
            image for a patient of its own, as published splits do: the splits then share patients.
        fractions: of the splits.

    Raises:
        CorpusError: a table is missing, or a value is not what the data card says.
        ConfigError: an option is unknown or the fractions do not sum to one.
    """
    root = Path(root)
    if patients not in get_args(Patients):
        raise ConfigError(f"patients must be one of {', '.join(get_args(Patients))}, got {patients!r}")
    check_fractions(fractions)
    classes = _read_classes(find_file(root, "stage_2_detailed_class_info.csv"))
    boxes = _read_boxes(find_file(root, "stage_2_train_labels.csv"), classes)
    patient_of = _read_mapping(root) if patients == "mapping" else {}
    records = Records()
    for image, found in boxes.items():
        if patients == "mapping" and image not in patient_of:
            raise CorpusError(f"{root / _MAPPING} lacks an image of the labels: download it again")
        name = patient_of.get(image, image)
        patient = deid.patient(name)
        sample = Sample(
            key=deid.image(image),
            corpus=NAME,
            split=hash_split(patient, fractions),
            patient=patient,
            study=deid.study(name, image),
            image=root / _IMAGES / f"{image}.dcm",
            labels={"Pneumonia": int(bool(found)), "No Finding": int(classes[image] == "Normal")},
            extra={"class": classes[image], **region_fields(_SIZE, {"boxes": found})},
        )
        records.append(Record(sample))
    return Plan(NAME, records, LABELS, Counter())


def iter_samples(root: Path, *, deid: Deidentifier, patients: Patients = "mapping") -> Iterator[Sample]:
    """Samples of all splits. Raises CorpusError."""
    for record in plan(root, deid, patients=patients).records:
        yield record.sample


def _read_classes(table: Path) -> dict[str, str]:
    """Image -> one of the three classes; an image stands there once for every box."""
    classes: dict[str, str] = {}
    for row in read_table(table, ("patientId", "class")):
        image, name = row["patientId"], row["class"]
        if not _ID.fullmatch(image) or name not in _CLASSES or classes.setdefault(image, name) != name:
            raise CorpusError(f"{table}: a row has no image id, an unknown class, or another class than before")
    return classes


def _read_boxes(table: Path, classes: Mapping[str, str]) -> dict[str, list[Box]]:
    """Image -> its boxes, none where it has no pneumonia."""
    boxes: dict[str, list[Box]] = {}
    for row in read_table(table, ("patientId", *_BOX, "Target")):
        image, target = row["patientId"], row["Target"]
        if target not in ("0", "1") or (classes.get(image) == "Lung Opacity") != (target == "1"):
            raise CorpusError(f"{table}: a Target is not 0 or 1, or does not agree with the class of its image")
        found = boxes.setdefault(image, [])
        if target == "1":
            found.append(read_box("Pneumonia", [row[name] for name in _BOX], _SIZE, table))
    if len(boxes) != len(classes):
        raise CorpusError(f"{table} has {len(boxes)} images, the table of classes {len(classes)}: download both again")
    return boxes


def _read_mapping(root: Path) -> dict[str, str]:
    """Image -> number of its patient in NIH ChestX-ray14."""
    path = root / _MAPPING
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        found = {row["subset_img_id"]: _NIH.fullmatch(row["img_id"]) for row in rows}
    except FileNotFoundError:
        raise CorpusError(
            f"{path} does not exist: without it nobody knows which images are of one patient. RSNA's page of the "
            "challenge has it (see the data card); or take --patients image, which lets patients stand in two splits"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise CorpusError(f"{path} is not RSNA's list of subset_img_id and img_id ({type(error).__name__})") from error
    if not all(found.values()):
        raise CorpusError(f"{path}: an img_id is not of the form 00000001_000.png")
    return {image: match[1] for image, match in found.items() if match}
