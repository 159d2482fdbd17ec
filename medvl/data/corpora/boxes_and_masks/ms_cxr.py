"""MS-CXR: phrases with boxes on images of MIMIC-CXR. Layout, counts and access:
`data_cards/ms-cxr.md`.
"""

import dataclasses
import re
from pathlib import Path
from typing import ClassVar, Literal, get_args

from medvl.common.config_io import check_choice
from medvl.data.annotations import Box, Phrase, read_box, region_fields
from medvl.data.corpora.common.record_file import Records
from medvl.data.corpora.common.rows import RowCounts
from medvl.data.corpora.common.tables import (
    Plan,
    Record,
    find_file,
    find_suffix,
    malformed,
    read_table,
)
from medvl.data.corpora.registry import Corpus, FileAccess, register_corpus
from medvl.data.privacy import Deidentifier
from medvl.schema import Sample

TABLES = ("MS_CXR_Local_Alignment_v1.1.0.csv", "MS_CXR_Local_Alignment_v1.0.0.csv")
LABELS = (
    "Atelectasis", "Cardiomegaly", "Consolidation", "Edema", "Lung Opacity", "Pleural Effusion",
    "Pneumonia", "Pneumothorax",
)  # fmt: skip

Splits = Literal["test", "release"]

_COLUMNS = (
    "dicom_id",
    "category_name",
    "label_text",
    "path",
    "x",
    "y",
    "w",
    "h",
    "image_width",
    "image_height",
)
_SPLITS = {
    "train": "train",
    "val": "validate",
    "valid": "validate",
    "validate": "validate",
    "test": "test",
}
_ID = r"[0-9a-f]{8}(?:-[0-9a-f]{8}){4}"
_PATH = re.compile(rf"files/p\d{{2}}/p(\d{{8}})/s(\d{{8}})/({_ID})\.(?:jpg|dcm)")


@register_corpus("ms-cxr")
@dataclasses.dataclass(frozen=True, kw_only=True)
class MSCXR(Corpus):
    """Convert MS-CXR: phrases with boxes, for `medvl eval grounding`.

    Use the salt of your MIMIC-CXR shards, so that training patients are recognized.
    """

    labels: ClassVar[tuple[str, ...]] = LABELS
    textless: ClassVar[bool] = True

    root: Path
    """folder of the release with its table."""
    images: Path | None = None
    """folder with files/ of MIMIC-CXR-JPG or MIMIC-CXR; default root."""
    splits: Splits = "test"
    """test puts all images into one test split; release uses the table's column."""

    def plan(self, deid: Deidentifier, access: FileAccess = FileAccess()) -> Plan:
        """Plan the samples of MS-CXR from its table; no image is opened.

        Each image is one sample, with all its phrases in `extra`. Ids are hashed as in MIMIC-CXR:
        with the same salt, images and patients have the same hashes in both corpora.

        Raises CorpusError when the table is missing, or a value does not match the data card;
        ConfigError when an option is unknown.
        """
        root = self.root
        images = self.images or root
        allowed = access.folders(root, images)
        check_choice(self.splits, get_args(Splits), "splits")
        table = find_file(root, *TABLES)
        by_image: dict[str, list[dict[str, str]]] = {}
        for row in read_table(
            table, (*_COLUMNS, "split") if self.splits == "release" else _COLUMNS, allowed
        ):
            by_image.setdefault(row["path"], []).append(row)
        counts = RowCounts()
        records = Records()
        suffix: str | None = None
        for name, rows in counts.reading(by_image.items()):
            match = _PATH.fullmatch(name)
            if match is None or any(row["dicom_id"] != match[3] for row in rows):
                raise malformed(
                    table,
                    "expected a path below files/ that ends with the dicom_id of its row",
                    "path",
                )
            suffix = suffix or find_suffix(images / name, (".jpg", ".dcm"))
            subject, study, image = match.groups()
            size = _image_size(rows, table)
            phrases = [phrase.as_json() for phrase in _phrases(rows, size, table)]
            sample = Sample(
                key=deid.image(image),
                corpus=self.corpus,
                split="test" if self.splits == "test" else _split(rows, table),
                patient=deid.patient(subject),
                study=deid.study(subject, study),
                image=(images / name).with_suffix(suffix or ".jpg"),
                labels={row["category_name"]: 1 for row in rows},
                extra=region_fields(size, {"phrases": phrases}),
            )
            records.append(Record(sample))
            counts.kept += 1
        return Plan(self.corpus, records, self.labels, counts, folders=allowed)


def _phrases(rows: list[dict[str, str]], size: tuple[int, int], table: Path) -> list[Phrase]:
    """Return the phrases of one image in table order; rows with the same finding and text form
    one phrase.
    """
    boxes: dict[tuple[str, str], list[Box]] = {}
    for row in rows:
        label = row["category_name"]
        text = " ".join(row["label_text"].split())
        if label not in LABELS or not text:
            field = "category_name" if text else "label_text"
            raise malformed(table, f"expected a text and one of {', '.join(LABELS)}", field)
        box = read_box(label, [row[name] for name in ("x", "y", "w", "h")], size, table)
        boxes.setdefault((label, text), []).append(box)
    return [
        Phrase(label=label, text=text, boxes=tuple(group)) for (label, text), group in boxes.items()
    ]


def _image_size(rows: list[dict[str, str]], table: Path) -> tuple[int, int]:
    """Return (width, height) of an image. Raises CorpusError when its rows disagree."""
    sizes = {(row["image_width"], row["image_height"]) for row in rows}
    width = rows[0]["image_width"]
    height = rows[0]["image_height"]
    if len(sizes) != 1 or not (width.isdecimal() and height.isdecimal()):
        raise malformed(
            table, "expected whole numbers, the same in all rows of an image", "image_width"
        )
    return int(width), int(height)


def _split(rows: list[dict[str, str]], table: Path) -> str:
    splits = {_SPLITS.get(row["split"]) for row in rows}
    split = splits.pop()
    if splits or split is None:
        raise malformed(
            table,
            f"expected one of {', '.join(_SPLITS)}, the same in all rows of an image",
            "split",
        )
    return split
