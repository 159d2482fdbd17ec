"""MS-CXR: phrases with boxes on images of MIMIC-CXR. Layout, counts and access: `data_cards/ms-cxr.md`."""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, get_args

from medvl.data.annotations.boxes import Box, read_box, region_fields
from medvl.data.annotations.phrases import Phrase
from medvl.data.corpora.common.record_file import Records
from medvl.data.corpora.common.tables import Plan, Record, find_file, read_table
from medvl.data.privacy.deidentify import Deidentifier
from medvl.errors import ConfigError, CorpusError
from medvl.schema import Sample

NAME = "ms-cxr"
TABLES = ("MS_CXR_Local_Alignment_v1.1.0.csv", "MS_CXR_Local_Alignment_v1.0.0.csv")
LABELS = (
    "Atelectasis",
    "Cardiomegaly",
    "Consolidation",
    "Edema",
    "Lung Opacity",
    "Pleural Effusion",
    "Pneumonia",
    "Pneumothorax",
)

Splits = Literal["test", "release"]

_COLUMNS = ("dicom_id", "category_name", "label_text", "path", "x", "y", "w", "h", "image_width", "image_height")
_SPLITS = {"train": "train", "val": "validate", "valid": "validate", "validate": "validate", "test": "test"}
_ID = r"[0-9a-f]{8}(?:-[0-9a-f]{8}){4}"
_PATH = re.compile(rf"files/p\d{{2}}/p(\d{{8}})/s(\d{{8}})/({_ID})\.(?:jpg|dcm)")


def plan(root: Path, deid: Deidentifier, *, images: Path | None = None, splits: Splits = "test") -> Plan:
    """Everything that the table says about its images; no image is opened.

    An image is a sample, with all its phrases in `extra`. Ids are hashed as those of MIMIC-CXR, so that with one salt
    an image has the key, and a patient the hash, that they have there.

    Args:
        root: the folder of the release, which holds the table.
        deid: hashes patient, study and image ids.
        images: folder that holds `files/` of MIMIC-CXR-JPG or MIMIC-CXR; default `root`.
        splits: "test" makes a test set of all, as the published results do; "release" takes the table's own column.

    Raises:
        CorpusError: the table is missing, or a value is not what the data card says.
        ConfigError: an option is unknown.
    """
    root, images = Path(root), Path(images or root)
    if splits not in get_args(Splits):
        raise ConfigError(f"splits must be one of {', '.join(get_args(Splits))}, got {splits!r}")
    table = find_file(root, *TABLES)
    by_image: dict[str, list[dict[str, str]]] = {}
    for row in read_table(table, (*_COLUMNS, "split") if splits == "release" else _COLUMNS):
        by_image.setdefault(row["path"], []).append(row)
    records = Records()
    suffix: str | None = None
    for name, rows in by_image.items():
        match = _PATH.fullmatch(name)
        if match is None or any(row["dicom_id"] != match[3] for row in rows):
            raise CorpusError(f"{table}: a path is not that of its dicom_id below files/, as in MIMIC-CXR-JPG")
        suffix = suffix or next((end for end in (".jpg", ".dcm") if (images / name).with_suffix(end).is_file()), None)
        subject, study, image = match.groups()
        size = _one_size(rows, table)
        phrases = [phrase.as_json() for phrase in _phrases(rows, size, table)]
        sample = Sample(
            key=deid.image(image),
            corpus=NAME,
            split="test" if splits == "test" else _split(rows, table),
            patient=deid.patient(subject),
            study=deid.study(subject, study),
            image=(images / name).with_suffix(suffix or ".jpg"),
            labels={row["category_name"]: 1 for row in rows},
            extra=region_fields(size, {"phrases": phrases}),
        )
        records.append(Record(sample))
    return Plan(NAME, records, LABELS, Counter())


def iter_samples(root: Path, *, deid: Deidentifier, images: Path | None = None) -> Iterator[Sample]:
    """Samples with their phrases. Raises CorpusError."""
    for record in plan(root, deid, images=images).records:
        yield record.sample


def _phrases(rows: list[dict[str, str]], size: tuple[int, int], table: Path) -> list[Phrase]:
    """The phrases of one image in the order of the table: rows of one finding and one text are boxes of one phrase."""
    boxes: dict[tuple[str, str], list[Box]] = {}
    for row in rows:
        label, text = row["category_name"], " ".join(row["label_text"].split())
        if label not in LABELS or not text:
            raise CorpusError(f"{table}: a row has no text, or its category_name is none of {', '.join(LABELS)}")
        found = boxes.setdefault((label, text), [])
        found.append(read_box(label, [row[name] for name in ("x", "y", "w", "h")], size, table))
    return [Phrase(label=label, text=text, boxes=tuple(found)) for (label, text), found in boxes.items()]


def _one_size(rows: list[dict[str, str]], table: Path) -> tuple[int, int]:
    """(width, height) of an image, on which all its rows agree."""
    sizes = {(row["image_width"], row["image_height"]) for row in rows}
    width, height = rows[0]["image_width"], rows[0]["image_height"]
    if len(sizes) != 1 or not (width.isdigit() and height.isdigit()):
        raise CorpusError(f"{table}: image_width and image_height are not two whole numbers, the same for one image")
    return int(width), int(height)


def _split(rows: list[dict[str, str]], table: Path) -> str:
    found = {_SPLITS.get(row["split"]) for row in rows}
    split = found.pop()
    if found or split is None:
        raise CorpusError(f"{table}: split is none of {', '.join(_SPLITS)}, or not the same for all rows of an image")
    return split
