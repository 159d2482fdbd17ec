"""Studies as samples: one image of each study, together with another image of it."""

from collections import defaultdict

import numpy as np

from medvl.data.loading.sources import Source
from medvl.data.loading.subset import Subset
from medvl.errors import ImageError

_NONE = -1
_LATERAL = ("LATERAL", "LL", "RL")


class StudySource(Subset):
    """Source with one sample per study: its first image, and another image of it. Reads all samples once.

    Images are ordered by `extra["image_number"]` where the corpus has one, then frontal views before lateral ones, then
    as in the source. The other image is the next one of the other projection (frontal or lateral), else the next one.
    """

    def __init__(self, source: Source) -> None:
        studies: defaultdict[tuple[str, str], list[tuple[int, bool, int]]] = defaultdict(list)
        for position in range(len(source)):
            sample = source.sample(position)
            number = sample.extra.get("image_number", 0)
            lateral = sample.view is not None and sample.view.upper().startswith(_LATERAL)
            order = (number if isinstance(number, int) else 0, lateral, position)
            studies[sample.patient, sample.study].append(order)
        pairs = sorted(_first_and_other(sorted(images)) for images in studies.values())
        super().__init__(source, [first for first, _ in pairs])
        self._others = np.array([other for _, other in pairs], np.int64)

    def other_pixels(self, position: int, color: bool = False) -> np.ndarray | None:
        """Return the decoded other image of a study, None where it has one image. Raises ImageError or ShardError."""
        other = int(self._others[position])
        if other == _NONE:
            return None
        try:
            return self.source.pixels(other, color)
        except ImageError as error:
            if error.code != "no_image":
                raise
            return None


def _first_and_other(images: list[tuple[int, bool, int]]) -> tuple[int, int]:
    (_, lateral, first), *others = images
    if not others:
        return first, _NONE
    return first, next((place for _, side, place in others if side != lateral), others[0][2])
