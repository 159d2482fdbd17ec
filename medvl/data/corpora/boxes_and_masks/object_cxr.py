"""Object-CXR (MIDL 2020): foreign objects on chest radiographs. Layout, counts, access:
`data_cards/object-cxr.md`.
"""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from medvl.data.annotations import Box, read_corners
from medvl.data.corpora.common.record_file import Records
from medvl.data.corpora.common.rows import RowCounts
from medvl.data.corpora.common.tables import (
    Plan,
    Record,
    malformed,
    own_study,
    read_table,
    split_training,
)
from medvl.data.corpora.registry import Corpus, FileAccess, register_corpus
from medvl.data.privacy import Deidentifier
from medvl.data.splits import hash_split
from medvl.schema import Sample

LABEL = "Foreign Object"
LABELS = (LABEL,)
SHAPES = {"0": "rectangle", "1": "ellipse", "2": "polygon"}
"""Type of an annotation in the tables -> shape."""

# numbers
_CORNERS = 4
_MIN_POLYGON = 6
_IMAGE = re.compile(r"\w[\w-]{0,100}\.jpg")


@register_corpus("object-cxr")
@dataclasses.dataclass(frozen=True, kw_only=True)
class ObjectCXR(Corpus):
    """Convert Object-CXR, with the images of dev.csv as test split: boxes of foreign objects."""

    labels: ClassVar[tuple[str, ...]] = LABELS
    counts: ClassVar[Mapping[str, int]] = {"images": 9_000, "test": 1_000}
    """Counts of the public part of the release."""
    textless: ClassVar[bool] = True

    root: Path
    """folder with train.csv, dev.csv, train/ and dev/."""
    validate_share: float = 0.2
    """fraction of the official training images for validation."""

    def plan(self, deid: Deidentifier, access: FileAccess = FileAccess()) -> Plan:
        """Plan the samples of Object-CXR from its tables; no image is opened.

        Raises CorpusError when a table is missing, or a value does not match the data card;
        ConfigError when the share is not between 0 and 1.
        """
        root = self.root
        allowed = access.folders(root)
        shares = split_training(self.validate_share)
        rows = RowCounts()
        records = Records()
        warnings = Counter[str]()
        for folder in ("train", "dev"):
            table = root / f"{folder}.csv"
            for row in rows.reading(read_table(table, ("annotation",), allowed)):
                name = row.get("image_name", row.get("image_path", "")).rpartition("/")[2]
                if not _IMAGE.fullmatch(name):
                    raise malformed(
                        table,
                        "expected a column image_name (or image_path) like 00001.jpg",
                        "image_name",
                    )
                image = f"{folder}/{name}"
                own = own_study(image, deid)
                shapes = _read_shapes(row["annotation"], table)
                boxes = [box for shape in shapes if (box := _box(shape, table))]
                warnings["empty_shape"] += len(shapes) - len(boxes)
                sample = Sample(
                    **own,
                    corpus=self.corpus,
                    split=hash_split(own["patient"], shares) if folder == "train" else "test",
                    image=root / folder / name,
                    labels={LABEL: int(bool(shapes))},
                    extra={
                        "boxes": boxes,
                        "shapes": [
                            {"shape": kind, "points": list(points)} for kind, points in shapes
                        ],
                    },
                )
                records.append(Record(sample))
                rows.kept += 1
        return Plan(self.corpus, records, self.labels, rows, +warnings, allowed)


def _read_shapes(text: str, table: Path) -> list[tuple[str, tuple[float, ...]]]:
    """Read shapes and their coordinates x1 y1 x2 y2 ...; an image without objects has no text."""
    shapes = []
    for annotation in filter(None, map(str.strip, text.split(";"))):
        kind, *fields = annotation.split()
        try:
            points = tuple(map(float, fields))
        except ValueError:
            raise malformed(
                table, "expected numbers after the type of a shape", "annotation"
            ) from None
        polygon = SHAPES.get(kind) == "polygon"
        complete = (
            len(points) >= _MIN_POLYGON and len(points) % 2 == 0
            if polygon
            else len(points) == _CORNERS
        )
        if kind not in SHAPES or not complete or not all(map(math.isfinite, points)):
            expected = "0 or 1 and two corners, or 2 and three or more points"
            raise malformed(
                table, f"expected {expected}, separated by blanks, for each shape", "annotation"
            )
        shapes.append((SHAPES[kind], points))
    return shapes


def _box(shape: tuple[str, tuple[float, ...]], table: Path) -> Box | None:
    """Return the bounding box of a shape, or None where it has no area."""
    x = shape[1][::2]
    y = shape[1][1::2]
    if min(x) == max(x) or min(y) == max(y):
        return None
    return read_corners(LABEL, (min(x), min(y), max(x), max(y)), None, table)
