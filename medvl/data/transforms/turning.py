"""Augmentation for dense tasks: flips, right-angle turns and rotations that image, masks, boxes
and text share.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, Self

import cv2
import numpy as np

from medvl.common.config_io import check_within
from medvl.data.reports.cleaning import names_place, names_side, swap_laterality
from medvl.data.transforms.image import BuiltTransform, EvalTransform, Flip, Transformed, check_flip
from medvl.schema import Sample

_REFLECTIONS = np.array(
    [[[-1, 0], [0, 1]], [[1, 0], [0, -1]], [[0, 1], [1, 0]], [[0, -1], [-1, 0]]], np.float32
)
"""Horizontal, vertical, and about the two diagonals."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LViTAugmentation:
    """LViT's augmentation: half of the images are reflected, half of the others rotated (arXiv
    2206.14718, its code).

    The released code turns an image by a random multiple of 90 degrees and then flips it about a
    random axis, which is one of four reflections, and leaves the text as it is, also where it names
    a place: that is `flip="plain"`. By default only a horizontal flip, with left and right
    exchanged in the text, is allowed for a text that names a place; with `sideless`, none is.
    """

    size: int = 224
    fit: Literal["crop", "pad", "squash"] = "squash"
    """As in `EvalTransform`; a segmenter needs the value of its own transform."""
    flip: Flip = "swap_text"
    turns: bool = True
    """Vertical flips and reflections about a diagonal too. A text that names a place excludes
    them, unless `plain`.
    """
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
        changes: dict[str, Any] = {}
        if self.turns and any(map(names_place, texts)):
            changes["turns"] = False
        if self.flip == "sideless" and any(map(names_side, texts)):
            changes["flip"] = "off"
        return dataclasses.replace(self, **changes) if changes else self

    def build(self) -> BuiltTransform:
        """Return the function that loader workers call."""
        base = self.base().build()
        first = 0 if self.flip != "off" else 1
        last = 4 if self.turns else 1

        def apply(image: np.ndarray, rng: np.random.Generator) -> Transformed:
            chance, other, reflection, angle = rng.random(4)
            square_HWC = base(image, rng).image_HWC
            number = first
            is_flipped = False
            turn_22 = np.eye(2, dtype=np.float32)
            if chance < 0.5 and first < last:
                number = first + int(reflection * (last - first))
                turn_22 = _REFLECTIONS[number]
                is_flipped = number == 0
            elif other < 0.5:
                turn_22 = _rotation((2 * angle - 1) * self.rotation)
            return Transformed(turn(square_HWC, turn_22), is_flipped, turn_22)

        return apply


def turn(square_HWC: np.ndarray, turn_22: np.ndarray) -> np.ndarray:
    """Return a square image turned about its centre (`Transformed.turn_22`), black where it had
    no pixel.
    """
    if (turn_22 == np.eye(2)).all():
        return square_HWC
    size = len(square_HWC)
    center_2 = np.array([size - 1, size - 1]) / 2
    matrix_23 = np.concatenate([turn_22, (center_2 - turn_22 @ center_2)[:, None]], axis=1)
    flags = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
    output_HWC = cv2.warpAffine(square_HWC, matrix_23.astype(np.float64), (size, size), flags=flags)
    return output_HWC[:, :, None] if output_HWC.ndim == 2 else output_HWC


def _rotation(degrees: float) -> np.ndarray:
    cosine = math.cos(math.radians(degrees))
    sine = math.sin(math.radians(degrees))
    return np.array([[cosine, -sine], [sine, cosine]], np.float32)


# Exchange of left and right in the names of labels, boxes and masks, so that those of a mirrored
# image stay true.
#
#     mirror_labels(sample)       # {"left effusion": 1, "right_rib": 0} becomes {"right
#     effusion": 1, "left_rib": 0}
#
# Names are exchanged as texts are (`medvl.data.reports.cleaning`), with underscores read as
# blanks.

_REGIONS = ("boxes", "masks")


def texts_and_names(sample: Sample) -> Iterator[str]:
    """Yield the texts of a sample, and the names of its labels, boxes and masks, which may name
    a side too.
    """
    yield from sample.sections.values()
    regions = {entry["label"] for entry in _regions(sample)}
    yield from (name.replace("_", " ") for name in (*sample.labels, *sorted(regions)))


def mirror_labels(sample: Sample) -> Sample:
    """Return the sample with the names of its labels, boxes and masks as in the mirrored image;
    texts are kept.
    """
    labels = {_mirror_name(name): value for name, value in sample.labels.items()}
    if not any(_mirror_name(entry["label"]) != entry["label"] for entry in _regions(sample)):
        return dataclasses.replace(sample, labels=labels)
    regions = {
        kind: [
            {**entry, "label": _mirror_name(entry["label"])} if _is_named(entry) else entry
            for entry in entries
        ]
        for kind in _REGIONS
        if isinstance(entries := sample.extra.get(kind), list)
    }
    return dataclasses.replace(sample, labels=labels, extra={**sample.extra, **regions})


def _regions(sample: Sample) -> list[Mapping[str, Any]]:
    """Return the boxes and masks that have a name; malformed ones are reported where targets are
    made of them.
    """
    regions: list[Mapping[str, Any]] = []
    for kind in _REGIONS:
        entries = sample.extra.get(kind)
        regions += (
            [entry for entry in entries if _is_named(entry)] if isinstance(entries, list) else []
        )
    return regions


def _is_named(entry: Any) -> bool:
    return isinstance(entry, Mapping) and isinstance(entry.get("label"), str)


@functools.lru_cache(1 << 12)
def _mirror_name(name: str) -> str:
    plain = name.replace("_", " ")
    other = swap_laterality(plain)
    if other == plain:
        return name
    return other if " " in name else other.replace(" ", "_")
