"""Bounding boxes of an image in `Sample.extra`.

    {"boxes": [{"label": "Mass", "x": 225.1, "y": 547.0, "width": 86.8, "height": 79.2}],
     "image_width": 1024, "image_height": 1024}

x and y are the left and top edge. All values are in pixels of the published image, whose size is stored too: shards
hold a smaller copy. An annotated image without any box has an empty list. Where the tables of a release lack the size,
the conversion fills it in from the image (`add_size`).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from medvl.errors import CorpusError, ImageError

Box = dict[str, object]
Size = tuple[float, float]
"""Width and height in pixels."""

_UNKNOWN: Size = (math.inf, math.inf)
_SAME_OBJECT_IOU = 0.5


def read_box(label: str, fields: Sequence[str | float], size: tuple[int, int] | None, where: Path) -> Box:
    """Parse a box from its left, top, width and height in a table, for an image of `size` (width, height).

    With None for the size, the right and bottom edges are checked by `add_size`. Raises CorpusError, naming the file,
    when a field is not a number, or the box is empty or exceeds the image by more than a pixel.
    """
    x, y, width, height = _four_numbers(label, fields, where)
    return _checked(label, (x, y, width, height), size or _UNKNOWN, where)


def read_corners(label: str, fields: Sequence[str | float], size: tuple[int, int] | None, where: Path) -> Box:
    """Parse a box from its left, top, right and bottom edge; otherwise as `read_box`."""
    left, top, right, bottom = _four_numbers(label, fields, where)
    return _checked(label, (left, top, right - left, bottom - top), size or _UNKNOWN, where)


def add_size(extra: Mapping[str, object], shape: tuple[int, ...]) -> Mapping[str, object]:
    """Return `Sample.extra` with the size of the image of `shape` (height, width) if it has boxes and lacks the size.

    Raises ImageError ("mismatch") when a box exceeds the image by more than a pixel: it is not the published one.
    """
    boxes: Any = extra.get("boxes")
    if boxes is None or "image_width" in extra:
        return extra
    height, width = shape[:2]
    if not all(_is_inside((box["x"], box["y"], box["width"], box["height"]), (width, height)) for box in boxes):
        message = f"a box exceeds the image of {width} x {height} pixels; expected the image as published, not resized"
        raise ImageError(message, "mismatch", field="boxes")
    return region_fields((width, height), extra)


def merge_readers(boxes_by_reader: Iterable[Sequence[Box]]) -> list[Box]:
    """Return the boxes of several readers of one image, with the boxes of one object replaced by their mean.

    A box joins the first group of its label that has no box of its reader yet and whose first box it overlaps by an
    intersection over union of at least 0.5; else it begins a group.
    """
    groups: list[tuple[list[Box], set[int]]] = []
    for reader, boxes in enumerate(boxes_by_reader):
        for box in boxes:
            for group, readers in groups:
                if (
                    reader not in readers
                    and box["label"] == group[0]["label"]
                    and _iou(box, group[0]) >= _SAME_OBJECT_IOU
                ):
                    group.append(box)
                    readers.add(reader)
                    break
            else:
                groups.append(([box], {reader}))
    return [_mean(group) for group, _ in groups]


def _four_numbers(label: str, fields: Sequence[str | float], where: Path) -> tuple[float, float, float, float]:
    try:
        a, b, c, d = (float(field) for field in fields)
    except (TypeError, ValueError):
        raise CorpusError(f"{where}: expected four numbers for a box of {label}", "malformed", field="boxes") from None
    return a, b, c, d


def _checked(label: str, box: tuple[float, float, float, float], size: Size, where: Path) -> Box:
    x, y, width, height = box
    if not all(map(math.isfinite, box)) or width <= 0 or height <= 0 or not _is_inside(box, size):
        message = f"{where}: a box of {label} is empty or exceeds its image of {size[0]} x {size[1]} pixels"
        raise CorpusError(message, "out_of_range", field="boxes")
    return {"label": label, "x": x, "y": y, "width": width, "height": height}


def _is_inside(box: tuple[float, float, float, float], size: Size) -> bool:
    x, y, width, height = box
    return x > -1 and y > -1 and x + width < size[0] + 1 and y + height < size[1] + 1


def _edges(box: Mapping[str, Any]) -> tuple[float, float, float, float]:
    return box["x"], box["y"], box["x"] + box["width"], box["y"] + box["height"]


def _iou(one: Box, other: Box) -> float:
    (left, top, right, bottom), (left_2, top_2, right_2, bottom_2) = _edges(one), _edges(other)
    overlap = max(0.0, min(right, right_2) - max(left, left_2)) * max(0.0, min(bottom, bottom_2) - max(top, top_2))
    union = (right - left) * (bottom - top) + (right_2 - left_2) * (bottom_2 - top_2) - overlap
    return overlap / union


def _mean(group: Sequence[Mapping[str, Any]]) -> Box:
    sides = ("x", "y", "width", "height")
    return {"label": group[0]["label"], **{side: sum(box[side] for box in group) / len(group) for side in sides}}


def region_fields(size: tuple[int, int], regions: Mapping[str, object]) -> dict[str, object]:
    """Return the fields of `Sample.extra` for regions in pixels of an image of `size` (width, height)."""
    return {**regions, "image_width": size[0], "image_height": size[1]}
