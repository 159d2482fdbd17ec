"""VinDr-PCXR 1.0.0. Layout, counts and access: `data_cards/vindr-pcxr.md`."""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import ClassVar

from medvl.common.untrusted import InputFolders
from medvl.data.annotations import Box, read_corners
from medvl.data.corpora.boxes_and_masks.vindr_cxr import CORNERS, VALUES, read_image_id
from medvl.data.corpora.common.record_file import Records
from medvl.data.corpora.common.rows import RowCounts
from medvl.data.corpora.common.tables import (
    Plan,
    Record,
    find_file,
    find_suffix,
    malformed,
    no_patients_note,
    own_study,
    read_header,
    read_table,
    split_training,
)
from medvl.data.corpora.registry import Corpus, FileAccess, register_corpus
from medvl.data.privacy import Deidentifier
from medvl.data.splits import hash_split
from medvl.errors import CorpusError
from medvl.schema import Sample

RENAMED = {
    "No finding": "No Finding",
    "Brocho-pneumonia": "Broncho-pneumonia",
    "Diagphramatic hernia": "Diaphragmatic hernia",
    "Diffuse aveolar opacity": "Diffuse alveolar opacity",
    "Bronchectasis": "Bronchiectasis",
    "Paraveterbral mass": "Paravertebral mass",
    "Pleural effusion": "Pleural Effusion",
    "Pleural thickening": "Pleural Thickening",
}
"""Release name -> label name here: the right spelling, and CheXpert's or NIH's name."""

_LABELS = 15
_FINDINGS = 36
_IDS = ("image_id", "rad_ID")
_NO_FINDING = "No Finding"


@register_corpus("vindr-pcxr")
@dataclasses.dataclass(frozen=True, kw_only=True)
class VinDrPCXR(Corpus):
    """Convert VinDr-PCXR, radiographs of children, with the official test split: labels, boxes."""

    counts: ClassVar[Mapping[str, int]] = {"images": 9_125, "test": 1_397}
    textless: ClassVar[bool] = True

    root: Path
    """folder of the release: the four tables (or annotations/ with them), train/ and test/."""
    validate_share: float = 0.1
    """fraction of the official training images for validation."""

    def plan(self, deid: Deidentifier, access: FileAccess = FileAccess()) -> Plan:
        """Plan the samples of VinDr-PCXR from its tables; no image is opened.

        Raises CorpusError when a table is missing, or a value does not match the data card;
        ConfigError when the share is not between 0 and 1.
        """
        root = self.root
        allowed = access.folders(root)
        shares = split_training(self.validate_share)
        rows = RowCounts()
        warnings = Counter[str]()
        records = Records()
        names: tuple[str, ...] = ()
        for folder in ("train", "test"):
            table = _find(root, f"image_labels_{folder}.csv")
            columns = _label_columns(table, allowed)
            names = tuple(columns.values())
            votes = _read_labels(table, columns, warnings, allowed)
            boxes = _read_boxes(_find(root, f"annotations_{folder}.csv"), votes, allowed)
            suffix: str | None = None
            for image, named in rows.reading(votes.items()):
                own = own_study(image, deid)
                file = root / folder / f"{image}.dicom"
                suffix = suffix or find_suffix(file, (".dicom", ".dcm"))
                image_boxes = boxes.get(image, [])
                release_names = {*named, *(str(box["release_label"]) for box in image_boxes)}
                sample = Sample(
                    **own,
                    corpus=self.corpus,
                    split=hash_split(own["patient"], shares) if folder == "train" else "test",
                    image=file.with_suffix(suffix or ".dicom"),
                    labels=_labels(named, names),
                    extra={
                        "boxes": image_boxes,
                        "release_names": {
                            RENAMED[name]: name for name in sorted(release_names & RENAMED.keys())
                        },
                    },
                )
                records.append(Record(sample))
                rows.kept += 1
        warnings["rows_are_patients"] = rows.kept
        return Plan(self.corpus, records, names, rows, +warnings, allowed)

    def notes(self, plan: Plan) -> list[str]:
        return [no_patients_note("image", "rows_are_patients")]


def _find(root: Path, name: str) -> Path:
    return find_file(root, name, f"annotations/{name}")


def _label_columns(table: Path, allowed: InputFolders) -> dict[str, str]:
    """Return the columns of labels and their names here. Raises CorpusError for another number."""
    columns = [name for name in read_header(table, allowed) if name and name not in _IDS]
    if len(columns) != _LABELS:
        message = f"expected {_LABELS} columns of labels beside {' and '.join(_IDS)}"
        raise malformed(table, f"{message}, got {len(columns)}: {', '.join(columns)}", "image_id")
    return {name: RENAMED.get(name, name) for name in columns}


def _read_labels(
    table: Path, columns: Mapping[str, str], warnings: Counter[str], allowed: InputFolders
) -> dict[str, set[str]]:
    """Read image -> labels that one or more readers gave, in the release's spelling."""
    votes: dict[str, set[str]] = {}
    for row in read_table(table, (*_IDS[:1], *columns), allowed):
        image = read_image_id(row, table)
        cells = {name: row[name].strip() for name in columns}
        unknown = [name for name, cell in cells.items() if cell not in VALUES]
        if unknown:
            message = f"expected 1, 0 or blank for {unknown[0]}, got another value"
            raise malformed(table, message, unknown[0])
        warnings["several_readers"] += image in votes
        votes.setdefault(image, set()).update(name for name, cell in cells.items() if VALUES[cell])
    return votes


def _labels(named: Iterable[str], names: Iterable[str]) -> dict[str, int]:
    """Return label -> 1 or 0. No Finding is 1 only if no other label is."""
    present = {RENAMED.get(name, name) for name in named}
    labels = {name: int(name in present) for name in names}
    if _NO_FINDING in labels:
        labels[_NO_FINDING] &= sum(labels.values()) == 1
    return labels


def _read_boxes(
    table: Path, images: Mapping[str, object], allowed: InputFolders
) -> dict[str, list[Box]]:
    """Read image -> boxes; rows of No finding have none."""
    boxes: defaultdict[str, list[Box]] = defaultdict(list)
    findings = set[str]()
    for row in read_table(table, ("image_id", "class_name", *CORNERS), allowed):
        image = read_image_id(row, table)
        if image not in images:
            message = f"{table} has an image that the table of labels lacks: download both again"
            raise CorpusError(message, "mismatch")
        name = row["class_name"].strip()
        label = RENAMED.get(name, name)
        corners = [row[column].strip() for column in CORNERS]
        if label == _NO_FINDING and not any(corners):
            continue
        findings.add(label)
        if len(findings) > _FINDINGS:
            message = f"expected at most {_FINDINGS} findings in class_name"
            raise malformed(table, message, "class_name")
        boxes[image].append({**read_corners(label, corners, None, table), "release_label": name})
    return boxes
