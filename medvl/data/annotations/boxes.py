"""Bounding boxes of an image in `Sample.extra`.

    {"boxes": [{"label": "Mass", "x": 225.1, "y": 547.0, "width": 86.8, "height": 79.2}],
     "image_width": 1024, "image_height": 1024}

x and y are the left and top edge. All values are in pixels of the published image, whose size is stored too: shards
hold a smaller copy. An annotated image without any box has an empty list.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from medvl.errors import CorpusError

Box = dict[str, object]


def read_box(label: str, fields: Sequence[str], size: tuple[int, int], where: Path) -> Box:
    """Parse a box from its left, top, width and height in a table, for an image of `size` (width, height).

    Raises CorpusError, naming the file, when a field is not a number, or the box is empty or exceeds the image by more
    than a pixel.
    """
    try:
        x, y, width, height = (float(field) for field in fields)
    except ValueError:
        raise CorpusError(f"{where}: expected four numbers for a box of {label}", "malformed", field="boxes") from None
    inside = x > -1 and y > -1 and x + width < size[0] + 1 and y + height < size[1] + 1
    if not all(map(math.isfinite, (x, y, width, height))) or width <= 0 or height <= 0 or not inside:
        message = f"{where}: a box of {label} is empty or exceeds its image of {size[0]} x {size[1]} pixels"
        raise CorpusError(message, "out_of_range", field="boxes")
    return {"label": label, "x": x, "y": y, "width": width, "height": height}


def region_fields(size: tuple[int, int], regions: Mapping[str, object]) -> dict[str, object]:
    """Return the fields of `Sample.extra` for regions in pixels of an image of `size` (width, height)."""
    return {**regions, "image_width": size[0], "image_height": size[1]}
