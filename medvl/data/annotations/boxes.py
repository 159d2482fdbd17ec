"""Boxes that a corpus has for its images, as `Sample.extra` carries them.

    {"boxes": [{"label": "Mass", "x": 225.1, "y": 547.0, "width": 86.8, "height": 79.2}],
     "image_width": 1024, "image_height": 1024}

x and y are the left and upper edge, all four in pixels of the image as it was published, whose size stands beside them:
shards hold a smaller copy. An image without any box has an empty list where the corpus looked for them.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from medvl.errors import CorpusError

Box = dict[str, object]


def read_box(label: str, fields: Sequence[str], size: tuple[int, int], where: Path) -> Box:
    """A box from its left, top, width and height as a table writes them, in an image of `size` (width, height).

    Raises CorpusError, naming the file, when a field is no number or the box is empty or leaves the image by more than
    a pixel.
    """
    try:
        x, y, width, height = (float(field) for field in fields)
    except ValueError:
        raise CorpusError(f"{where}: the fields of a box of {label} are not four numbers") from None
    inside = x > -1 and y > -1 and x + width < size[0] + 1 and y + height < size[1] + 1
    if not all(map(math.isfinite, (x, y, width, height))) or width <= 0 or height <= 0 or not inside:
        raise CorpusError(f"{where}: a box of {label} is empty or leaves its image of {size[0]} x {size[1]} pixels")
    return {"label": label, "x": x, "y": y, "width": width, "height": height}


def region_fields(size: tuple[int, int], regions: Mapping[str, object]) -> dict[str, object]:
    """What `Sample.extra` gets: the regions and the size (width, height) of the image that they are pixels of."""
    return {**regions, "image_width": size[0], "image_height": size[1]}
