"""Baseline of the pointing game that looks at no image: one place for each finding.

It is the place that most boxes of the finding cover in images of other patients, of which every
image has the same one. Findings have their usual places, so that it can be far above a random
guess.

Shape letters: H, W pixels of an image; C places of equal cover.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from medvl.data.annotations import phrases_of
from medvl.errors import EvaluationError
from medvl.eval.grounding.heatmaps import region_mask, stored_boxes
from medvl.schema import Sample

_CELLS = 128
"""Rows and columns into which an image is divided."""


class MeanPlaces:
    """The places that most boxes of each finding cover.

    Args:
        samples: images with phrases and their boxes.

    Raises EvaluationError if no phrase has a box.
    """

    def __init__(self, samples: Iterable[Sample]) -> None:
        covers: dict[str | None, NDArray[np.int64]] = {}
        for sample in samples:
            for phrase in phrases_of(sample):
                if not phrase.boxes:
                    continue
                boxes = stored_boxes(phrase, sample, (_CELLS, _CELLS))
                inside_HW = region_mask(boxes, _CELLS, _CELLS)
                for label in (phrase.label, None):
                    covers[label] = covers.get(label, 0) + inside_HW.astype(np.int64)
        if not covers:
            message = "no phrase of the validation images has a box: give other shards as valid"
            raise EvaluationError(message, "empty", field="valid")
        self._places = {
            label: np.argwhere(cover_HW == cover_HW.max()) for label, cover_HW in covers.items()
        }

    def pointing_game(self, label: str, inside_HW: NDArray[np.bool_]) -> float:
        """Return whether the place of a finding is inside of the boxes of an image; a finding
        without boxes has the place of all findings.

        Places of equal cover count by the share of them that is inside.
        """
        place_C2 = self._places.get(label, self._places[None])
        pixel_C2 = ((place_C2 + 0.5) / _CELLS * inside_HW.shape).astype(np.int64)
        return float(inside_HW[pixel_C2[:, 0], pixel_C2[:, 1]].mean())
