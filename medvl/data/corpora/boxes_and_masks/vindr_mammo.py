"""VinDr-Mammo 1.0.0. Layout, counts and access: `data_cards/vindr-mammo.md`."""

import dataclasses
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from medvl.common.untrusted import InputFolders
from medvl.data.annotations import Box, read_corners
from medvl.data.corpora.boxes_and_masks.vindr_cxr import read_image_id
from medvl.data.corpora.common.record_file import Records
from medvl.data.corpora.common.rows import RowCounts, python_names
from medvl.data.corpora.common.tables import (
    Plan,
    Record,
    find_suffix,
    malformed,
    no_patients_note,
    read_table,
    split_training,
)
from medvl.data.corpora.registry import Corpus, FileAccess, register_corpus
from medvl.data.privacy import Deidentifier
from medvl.data.splits import hash_split
from medvl.errors import CorpusError
from medvl.schema import Sample

TABLE = "breast-level_annotations.csv"
FINDINGS_TABLE = "finding_annotations.csv"
NO_FINDING = "No Finding"

_SPLITS = {"training": "train", "test": "test"}
_COLUMNS = (
    "study_id", "image_id", "laterality", "view_position", "height", "width", "breast_birads",
    "breast_density", "split",
)  # fmt: skip
_CORNERS = ("xmin", "ymin", "xmax", "ymax")
_ID = re.compile(r"[0-9a-f]{32}")


@register_corpus("vindr-mammo")
@dataclasses.dataclass(frozen=True, kw_only=True)
class VinDrMammo(Corpus):
    """Convert VinDr-Mammo, mammograms with the official test split: findings, boxes, BI-RADS."""

    counts: ClassVar[Mapping[str, int]] = {"images": 20_000, "test": 4_000}
    textless: ClassVar[bool] = True
    crop_background: ClassVar[bool] = True

    root: Path
    """folder of the release: the two tables and images/."""
    validate_share: float = 0.1
    """fraction of the official training exams for validation."""

    def plan(self, deid: Deidentifier, access: FileAccess = FileAccess()) -> Plan:
        """Plan the samples of VinDr-Mammo from its tables; no image is opened.

        Raises CorpusError when a table or column is missing, or a value does not match the data
        card; ConfigError when the share is not between 0 and 1.
        """
        root = self.root
        allowed = access.folders(root)
        shares = split_training(self.validate_share)
        table = root / TABLE
        warnings = Counter[str]()
        findings = _read_findings(root / FINDINGS_TABLE, warnings, allowed)
        categories = {name for of_image in findings.values() for name in of_image.categories}
        breasts = [_breast(row, table) for row in read_table(table, _COLUMNS, allowed)]
        names = (
            *sorted(categories | {NO_FINDING}),
            *sorted({f"{BIRADS}{birads}" for birads, _ in breasts}),
            *sorted({f"{DENSITY}{density}" for _, density in breasts}),
        )
        rows = RowCounts()
        records = Records()
        first: dict[tuple[str, str], tuple[str, str]] = {}
        suffix: str | None = None
        for row in rows.reading(read_table(table, _COLUMNS, allowed)):
            image, exam = read_image_id(row, table), row["study_id"]
            side, view = row["laterality"], row["view_position"]
            if not _ID.fullmatch(exam) or row["split"] not in _SPLITS or side not in ("L", "R"):
                message = (
                    "expected a study_id of 32 hexadecimal digits, laterality L or R, and a split"
                )
                raise malformed(table, f"{message} of {', '.join(_SPLITS)}", "study_id")
            breast = _breast(row, table)
            warnings["breast_labels_differ"] += first.setdefault((exam, side), breast) != breast
            of_image = findings.pop(image, _Findings())
            labels = {
                name: int(name in of_image.categories) for name in names if name in categories
            }
            labels[NO_FINDING] = int(not of_image.categories)
            file = root / "images" / exam / f"{image}.dicom"
            suffix = suffix or find_suffix(file, (".dicom", ".dcm"))
            patient = deid.patient(exam)
            official = _SPLITS[row["split"]]
            sample = Sample(
                key=deid.image(image),
                corpus=self.corpus,
                split=hash_split(patient, shares) if official == "train" else official,
                patient=patient,
                study=deid.study(exam, exam),
                image=file.with_suffix(suffix or ".dicom"),
                labels={**labels, **breast_labels(*breast, names)},
                view=view if view in VIEWS else None,
                extra={
                    "laterality": side,
                    "breast_birads": breast[0],
                    "breast_density": breast[1],
                    "boxes": of_image.boxes,
                },
            )
            records.append(Record(sample))
            rows.kept += 1
        if findings:
            message = f"{root / FINDINGS_TABLE} has images that {TABLE} lacks: download both again"
            raise CorpusError(message, "mismatch")
        warnings["studies_are_patients"] = rows.kept
        return Plan(self.corpus, records, names, rows, +warnings, allowed)

    def notes(self, plan: Plan) -> list[str]:
        return [no_patients_note("exam", "studies_are_patients")]


@dataclasses.dataclass(slots=True)
class _Findings:
    """Findings of an image: their categories without No Finding, and boxes."""

    categories: set[str] = dataclasses.field(default_factory=set)
    boxes: list[Box] = dataclasses.field(default_factory=list)


def _breast(row: Mapping[str, str], table: Path) -> tuple[str, str]:
    """Return the BI-RADS category ("0" to "6") and the density (A to D) of a row's breast."""
    birads = row["breast_birads"].strip().removeprefix("BI-RADS ")
    density = row["breast_density"].strip().removeprefix("DENSITY ")
    if birads not in tuple("0123456") or density not in tuple("ABCD"):
        message = "expected BI-RADS 0 to 6 and DENSITY A to D"
        raise malformed(table, message, "breast_birads")
    return birads, density


def _read_findings(
    table: Path, warnings: Counter[str], allowed: InputFolders
) -> dict[str, _Findings]:
    """Read image -> findings. A box of several categories is one box for each of them."""
    findings: dict[str, _Findings] = {}
    columns = ("image_id", "finding_categories", "finding_birads", "height", "width", *_CORNERS)
    for row in read_table(table, columns, allowed):
        of_image = findings.setdefault(read_image_id(row, table), _Findings())
        try:
            names = python_names(row["finding_categories"].strip())
        except ValueError:
            message = "expected a list of names such as ['Mass']"
            raise malformed(table, message, "finding_categories") from None
        names = [name for name in names if name != NO_FINDING]
        of_image.categories.update(names)
        if not names:
            continue
        birads = row["finding_birads"].strip().removeprefix("BI-RADS ") or None
        for name in names:
            box = _box(name, row, table)
            warnings["box_malformed"] += box is None
            of_image.boxes += [] if box is None else [{**box, "birads": birads}]
    return findings


def _box(label: str, row: Mapping[str, str], table: Path) -> Box | None:
    try:
        size = (int(row["width"]), int(row["height"]))
        return read_corners(label, [row[name] for name in _CORNERS], size, table)
    except (ValueError, CorpusError):
        return None


BIRADS = "Breast BI-RADS "
"""Beginning of the labels of the assessment: 0 to 6 follow."""
DENSITY = "Breast density "
"""Beginning of the labels of the density: A to D follow."""
VIEWS = ("CC", "MLO", "ML", "LM", "LMO", "XCCL", "XCCM", "FB", "AT")

_SUSPICION = ("6", "5", "4", "0", "3", "2", "1")
"""BI-RADS categories, the most suspicious first; 0 is incomplete: more images are needed."""


def most_suspicious(categories: Sequence[str]) -> str | None:
    """Return the most suspicious of BI-RADS categories "0" to "6"; None without one."""
    return next((category for category in _SUSPICION if category in categories), None)


def breast_labels(
    birads: str | None, density: str | None, names: Sequence[str]
) -> Mapping[str, int]:
    """Return a breast's labels, 1 or 0, of those in `names`; absent where it has no category."""
    given = {BIRADS: birads, DENSITY: density}
    return {
        name: int(name == f"{kind}{category}")
        for kind, category in given.items()
        if category is not None
        for name in names
        if name.startswith(kind)
    }
