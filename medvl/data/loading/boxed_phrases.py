"""Phrases of an image with the share of each cell that their boxes cover, in the augmented image.

The boxes are drawn on a picture that is augmented with the same draws as the image, so that any
transform moves both alike. Phrases whose boxes the crop removed are left out. A phrase without
boxes covers no cell.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from medvl.data.annotations import Phrase, all_phrases_of, published_size
from medvl.data.images.codecs import JpegImage
from medvl.data.transforms.image import BuiltTransform
from medvl.schema import Sample

CELLS = 32
"""Cells along a side, which models average over those of their own grid."""
MOST = 4
"""Phrases of an image in an epoch; of more, some are drawn at random."""
_INK = 255
_FLAT = 16
"""Range of grey levels of a picture without an edge of a box."""


class BoxedPhrase(NamedTuple):
    """A phrase, and the share of each cell that its boxes cover."""

    text: str
    cover_HW: NDArray[np.uint8]
    """(CELLS, CELLS); 255 is all of a cell."""


def boxed_phrases(
    sample: Sample,
    pixels: NDArray[np.uint8] | JpegImage,
    transform: BuiltTransform,
    rng_for: Callable[[str], np.random.Generator],
) -> tuple[BoxedPhrase, ...]:
    """Return up to `MOST` phrases of a sample (`all_phrases_of`).

    Args:
        sample: of the image; without annotations, there are no phrases.
        pixels: of the stored image.
        transform: augmentation of the image.
        rng_for: function from "image" to a new generator with the draws of the image, and from
            "phrases" to that of the choice of phrases.

    Raises CorpusError when the annotations are malformed.
    """
    phrases = all_phrases_of(sample)
    if len(phrases) > MOST:
        chosen = sorted(rng_for("phrases").choice(len(phrases), MOST, replace=False).tolist())
        phrases = tuple(phrases[place] for place in chosen)
    result = []
    for phrase in phrases:
        cover_HW = np.zeros((CELLS, CELLS), np.uint8)
        if phrase.boxes:
            picture = _drawn(phrase, pixels, published_size(sample))
            cover_HW = _cover(transform(picture, rng_for("image")).image_HWC)
        if not phrase.boxes or cover_HW.any():
            result.append(BoxedPhrase(phrase.text, cover_HW))
    return tuple(result)


def _drawn(
    phrase: Phrase, pixels: NDArray[np.uint8] | JpegImage, published: tuple[int, int]
) -> NDArray[np.uint8]:
    """Return a black picture of the shape of `pixels` with white boxes."""
    picture = np.zeros(pixels.shape, np.uint8)
    down = pixels.shape[0] / published[0]
    across = pixels.shape[1] / published[1]
    for box in phrase.boxes:
        left, top, width, height = (float(str(box[side])) for side in ("x", "y", "width", "height"))
        rows = slice(max(0, round(top * down)), max(1, round((top + height) * down)))
        columns = slice(max(0, round(left * across)), max(1, round((left + width) * across)))
        picture[rows, columns] = _INK
    return picture


def _cover(image_HWC: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the share of each cell that is white, whatever brightness, contrast and blur did."""
    grey_HW = image_HWC[:, :, 0].astype(np.float32)
    lowest, highest = float(grey_HW.min()), float(grey_HW.max())
    middle = (lowest + highest) / 2 if highest - lowest > _FLAT else _INK / 4
    white_HW = (grey_HW > middle).astype(np.float32) * _INK
    return cv2.resize(white_HW, (CELLS, CELLS), interpolation=cv2.INTER_AREA).astype(np.uint8)


def stack_phrases(rows: Sequence[Sequence[BoxedPhrase]]) -> tuple[list[list[str]], Tensor]:
    """Return the texts of each row, and (B, S, CELLS, CELLS) uint8, zeros for padding; S is at
    least 1.
    """
    longest = max(1, *map(len, rows))
    cover_BSHW = np.zeros((len(rows), longest, CELLS, CELLS), np.uint8)
    for row, phrases in enumerate(rows):
        for place, phrase in enumerate(phrases):
            cover_BSHW[row, place] = phrase.cover_HW
    texts = [[phrase.text for phrase in phrases] for phrases in rows]
    return texts, torch.from_numpy(cover_BSHW)
