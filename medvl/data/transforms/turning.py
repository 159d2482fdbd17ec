"""Augmentation for dense tasks: flips, right-angle turns and rotations that image, masks, boxes and text share."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any, Literal, Self

import cv2
import numpy as np

from medvl.common.checks import check_within
from medvl.data.reports.laterality import names_place, names_side
from medvl.data.transforms.image import BuiltTransform, EvalTransform, Flip, Transformed, check_flip

_REFLECTIONS = np.array([[[-1, 0], [0, 1]], [[1, 0], [0, -1]], [[0, 1], [1, 0]], [[0, -1], [-1, 0]]], np.float32)
"""Horizontal, vertical, and about the two diagonals."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LViTAugmentation:
    """LViT's augmentation: half of the images are reflected, half of the others rotated (arXiv 2206.14718, its code).

    The released code turns an image by a random multiple of 90 degrees and then flips it about a random axis, which is
    one of four reflections, and leaves the text as it is, also where it names a place: that is `flip="plain"`. By
    default only a horizontal flip, with left and right exchanged in the text, is allowed for a text that names a place;
    with `sideless`, none is.
    """

    size: int = 224
    fit: Literal["crop", "pad", "squash"] = "squash"
    """As in `EvalTransform`; a segmenter needs the value of its own transform."""
    flip: Flip = "swap_text"
    turns: bool = True
    """Vertical flips and reflections about a diagonal too. A text that names a place excludes them, unless `plain`."""
    rotation: float = 20.0
    """Maximum rotation in either direction, in degrees."""

    def __post_init__(self) -> None:
        check_flip(self.flip)
        check_within(self, "[0, 180]", "rotation")
        self.base()

    def base(self) -> EvalTransform:
        """Return the transform without augmentation."""
        return EvalTransform(size=self.size, fit=self.fit)

    def for_texts(self, texts: Iterable[str]) -> Self:
        """Return the augmentation that the texts of an image allow."""
        if self.flip == "plain":
            return self
        texts = list(texts)
        refused: dict[str, Any] = {}
        if self.turns and any(map(names_place, texts)):
            refused["turns"] = False
        if self.flip == "sideless" and any(map(names_side, texts)):
            refused["flip"] = "off"
        return dataclasses.replace(self, **refused) if refused else self

    def build(self) -> BuiltTransform:
        """Return the function that loader workers call."""
        base = self.base().build()
        first, last = 0 if self.flip != "off" else 1, 4 if self.turns else 1

        def apply(image: np.ndarray, rng: np.random.Generator) -> Transformed:
            chance, other, reflection, angle = rng.random(4)
            square_HWC = base(image, rng).image_HWC
            number, flipped = first, False
            turn_22 = np.eye(2, dtype=np.float32)
            if chance < 0.5 and first < last:
                number = first + int(reflection * (last - first))
                turn_22, flipped = _REFLECTIONS[number], number == 0
            elif other < 0.5:
                turn_22 = _rotation((2 * angle - 1) * self.rotation)
            return Transformed(turn(square_HWC, turn_22), flipped, turn_22)

        return apply


def turn(square_HWC: np.ndarray, turn_22: np.ndarray) -> np.ndarray:
    """Return a square image turned about its centre (`Transformed.turn_22`), black where it had no pixel."""
    if (turn_22 == np.eye(2)).all():
        return square_HWC
    size = len(square_HWC)
    center_2 = np.array([size - 1, size - 1]) / 2
    matrix_23 = np.concatenate([turn_22, (center_2 - turn_22 @ center_2)[:, None]], axis=1)
    flags = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
    turned = cv2.warpAffine(square_HWC, matrix_23.astype(np.float64), (size, size), flags=flags)
    return turned[:, :, None] if turned.ndim == 2 else turned


def _rotation(degrees: float) -> np.ndarray:
    cosine, sine = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return np.array([[cosine, -sine], [sine, cosine]], np.float32)
