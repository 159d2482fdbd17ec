"""Studies as samples: one image of each study, together with another image of it."""

from collections import defaultdict

import numpy as np

from medvl.data.loading.sources import Source
from medvl.data.loading.subset import Subset
from medvl.data.views import frontal_or_lateral
from medvl.errors import ImageError


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
            lateral = frontal_or_lateral(sample.view) == "lateral"
            order = (number if isinstance(number, int) else 0, lateral, position)
            studies[sample.patient, sample.study].append(order)
        ordered = sorted(_first_and_others(sorted(images)) for images in studies.values())
        super().__init__(source, [first for first, *_ in ordered])
        self._images = np.array([place for images in ordered for place in images], np.int64)
        self._ends = np.cumsum([len(images) for images in ordered])

    def two_images(
        self, position: int, color: bool | None = None, rng: np.random.Generator | None = None
    ) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Return the decoded pixels of two images of a study: the first and the other one, or with `rng` any two.

        An image is None where the study or the sample has none. Raises ImageError or ShardError.
        """
        images = self._images[self._ends[position - 1] if position else 0 : self._ends[position]]
        if rng is not None:
            images = rng.permutation(images)
        first, other, *_ = [*(self._pixels(int(place), color) for place in images[:2]), None]
        return (other, None) if first is None else (first, other)

    def _pixels(self, place: int, color: bool | None) -> np.ndarray | None:
        try:
            return self.source.pixels(place, color)
        except ImageError as error:
            if error.code != "no_image":
                raise
            return None


def _first_and_others(images: list[tuple[int, bool, int]]) -> list[int]:
    """Return the positions of a study's images, the other one second."""
    (_, lateral, first), *others = images
    others.sort(key=lambda image: image[1] == lateral)
    return [first, *(place for *_, place in others)]
