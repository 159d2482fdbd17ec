"""RSNA Pneumonia Detection Challenge (2018), stage 2. Layout, counts and access:
`data_cards/rsna.md`.
"""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal, get_args

from medvl.common.config_io import check_choice
from medvl.common.untrusted import InputFolders
from medvl.data.annotations import Box, read_box, region_fields
from medvl.data.corpora.common.questions import read_json
from medvl.data.corpora.common.record_file import Records
from medvl.data.corpora.common.rows import RowCounts
from medvl.data.corpora.common.tables import Plan, Record, find_file, malformed, read_table
from medvl.data.corpora.registry import Corpus, FileAccess, register_corpus
from medvl.data.privacy import Deidentifier
from medvl.data.splits import hash_split, parse_fractions
from medvl.errors import CorpusError
from medvl.schema import Sample

LABELS = ("Pneumonia", "No Finding")

Patients = Literal["mapping", "image"]

_MAPPING = "pneumonia-challenge-dataset-mappings_2018.json"
_IMAGES = "stage_2_train_images"
_SIZE = (1024, 1024)
_CLASSES = ("Normal", "No Lung Opacity / Not Normal", "Lung Opacity")
_ID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_NIH = re.compile(r"(\d{8})_\d{3}\.png")
_BOX = ("x", "y", "width", "height")


@register_corpus("rsna")
@dataclasses.dataclass(frozen=True, kw_only=True)
class RSNA(Corpus):
    """Convert the RSNA pneumonia challenge: labels and boxes."""

    labels: ClassVar[tuple[str, ...]] = LABELS
    counts: ClassVar[Mapping[str, int]] = {"images": 26_684}
    """Labelled images of stage 2."""
    textless: ClassVar[bool] = True

    root: Path
    """folder of the release: its tables, stage_2_train_images/, and RSNA's mapping to NIH ChestX-
    ray14.
    """
    patients: Patients = "mapping"
    """mapping uses the patients of NIH ChestX-ray14; image treats every image as a patient, as
    published splits do, so that a patient may be in two splits.
    """
    # fractions of GLoRIA and later work; the release has no test labels
    splits: tuple[str, ...] = ("train=0.7", "validate=0.15", "test=0.15")
    """fractions of the splits, by patient."""

    def plan(self, deid: Deidentifier, access: FileAccess = FileAccess()) -> Plan:
        """Plan the samples of the RSNA challenge from its tables; no image is opened.

        Raises CorpusError when a table is missing, or a value does not match the data card;
        ConfigError when an option is unknown or the fractions do not sum to one.
        """
        root = self.root
        allowed = access.folders(root)
        check_choice(self.patients, get_args(Patients), "patients")
        fractions = parse_fractions(self.splits)
        classes = _read_classes(find_file(root, "stage_2_detailed_class_info.csv"), allowed)
        boxes = _read_boxes(find_file(root, "stage_2_train_labels.csv"), classes, allowed)
        patient_of = _read_mapping(root / _MAPPING, allowed) if self.patients == "mapping" else {}
        rows = RowCounts()
        records = Records()
        for image, image_boxes in rows.reading(boxes.items()):
            if self.patients == "mapping" and image not in patient_of:
                raise CorpusError(
                    f"{root / _MAPPING} lacks an image of the labels: download it again", "mismatch"
                )
            name = patient_of.get(image, image)
            patient = deid.patient(name)
            sample = Sample(
                key=deid.image(image),
                corpus=self.corpus,
                split=hash_split(patient, fractions),
                patient=patient,
                study=deid.study(name, image),
                image=root / _IMAGES / f"{image}.dcm",
                labels={
                    "Pneumonia": int(bool(image_boxes)),
                    "No Finding": int(classes[image] == "Normal"),
                },
                extra={"class": classes[image], **region_fields(_SIZE, {"boxes": image_boxes})},
            )
            records.append(Record(sample))
            rows.kept += 1
        return Plan(self.corpus, records, self.labels, rows, folders=allowed)


def _read_classes(table: Path, allowed: InputFolders) -> dict[str, str]:
    """Read image -> one of the three classes; the table has one row per box."""
    classes: dict[str, str] = {}
    for row in read_table(table, ("patientId", "class"), allowed):
        image = row["patientId"]
        name = row["class"]
        if (
            not _ID.fullmatch(image)
            or name not in _CLASSES
            or classes.setdefault(image, name) != name
        ):
            field = "class" if _ID.fullmatch(image) else "patientId"
            raise malformed(
                table, f"expected an image id and its class, one of {', '.join(_CLASSES)}", field
            )
    return classes


def _read_boxes(
    table: Path, classes: Mapping[str, str], allowed: InputFolders
) -> dict[str, list[Box]]:
    """Read image -> boxes, an empty list for images without pneumonia."""
    boxes: dict[str, list[Box]] = {}
    for row in read_table(table, ("patientId", *_BOX, "Target"), allowed):
        image = row["patientId"]
        target = row["Target"]
        if target not in ("0", "1") or (classes.get(image) == "Lung Opacity") != (target == "1"):
            raise malformed(
                table,
                "expected Target 1 for images of the class Lung Opacity and 0 for others",
                "Target",
            )
        image_boxes = boxes.setdefault(image, [])
        if target == "1":
            image_boxes.append(read_box("Pneumonia", [row[name] for name in _BOX], _SIZE, table))
    if boxes.keys() != classes.keys():
        raise CorpusError(
            f"{table} and the table of classes have different images: download both again",
            "mismatch",
        )
    return boxes


def _read_mapping(path: Path, allowed: InputFolders) -> dict[str, str]:
    """Read image -> patient number in NIH ChestX-ray14."""
    if not path.is_file():
        advice = (
            "download it from RSNA's page (see the data card), or let splits share "
            "patients: --patients image"
        )
        raise CorpusError(
            f"{path}, the images of each patient, does not exist: {advice}", "not_found"
        )
    rows = read_json(path, allowed)
    try:
        matches = {row["subset_img_id"]: _NIH.fullmatch(row["img_id"]) for row in rows}
    except (KeyError, TypeError) as error:
        raise malformed(
            path, f"expected a list of subset_img_id and img_id ({type(error).__name__})"
        ) from error
    if not all(matches.values()):
        raise malformed(path, "expected an img_id like 00000001_000.png", "img_id")
    return {image: match[1] for image, match in matches.items() if match}
