"""Training targets for detection and segmentation: boxes and masks in the pixels of a model's
input.

`Sample.extra` holds boxes and masks in pixels of the published image (`medvl.data.annotations`,
`medvl.data.annotations`). The loader's workers make the targets with the augmentation of the image,
so that both are turned alike (`Transformed.turn_22`).

Shape letters: N boxes of an image, padded to the largest number in the batch; L labels; h, w cells
of the model's output grid.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from medvl.data.annotations import decode_runs, published_size
from medvl.data.transforms.image import EvalTransform, Transformed
from medvl.data.transforms.turning import turn
from medvl.errors import CorpusError
from medvl.schema import Batch, Sample

Kind = Literal["boxes", "masks"]
_SIDES = ("x", "y", "width", "height")


@dataclasses.dataclass(kw_only=True, slots=True)
class DenseBatch(Batch):
    """A batch with the boxes or the masks of its images."""

    boxes_BN5: Tensor | None = None
    """float32: left, top, right and bottom edge in pixels of `image_BCHW`, and the label index;
    rows of NaN are padding.
    """
    masks_BLhw: Tensor | None = None
    """uint8: fraction of each output cell that is covered by the label's mask; 255 is all of it."""
    turn_B22: Tensor | None = None
    """float32: how each image was turned (`Transformed.turn_22`); None where the transform does
    not turn images.
    """
    unlabelled_B: Tensor | None = None
    """int64: number of each image whose annotations are not used, counted over the training images
    from 0; -1 where they are used. None: all are.
    """


@dataclasses.dataclass(frozen=True, slots=True)
class DenseTarget:
    """Boxes or masks of one augmented image."""

    values: NDArray[Any]
    """(N, 5) boxes or (L, h, w) masks."""
    turn_22: NDArray[np.float32] | None
    unlabelled: int


def is_annotated(sample: Sample, kind: Kind) -> bool:
    """Return whether the image was annotated with boxes (or masks), including images where none
    were drawn.

    Boxes count as masks where there are no masks: the "segmentation" of RSNA uses its boxes.
    """
    return "boxes" in sample.extra or (kind == "masks" and "masks" in sample.extra)


def annotated_labels(samples: Sequence[Sample], kind: Kind) -> tuple[str, ...]:
    """Return the labels that have a box (or a mask), sorted."""
    return tuple(
        sorted({str(entry["label"]) for sample in samples for entry in _entries(sample, kind)})
    )


def boxes_of(sample: Sample, labels: Sequence[str], size: tuple[int, int]) -> NDArray[np.float64]:
    """Return the boxes of `labels` (N, 5): edges in pixels of the image at `size` (height, width),
    and label index.

    Raises CorpusError when the annotations are malformed.
    """
    height, width = published_size(sample)
    down = size[0] / height
    across = size[1] / width
    try:
        rows = [
            (*(float(entry[side]) for side in _SIDES), labels.index(entry["label"]))
            for entry in _entries(sample, "boxes")
            if entry["label"] in labels
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise _malformed(sample, "boxes") from error
    x, y, box_width, box_height, label = np.array(rows, np.float64).reshape(-1, 5).T
    return np.stack(
        [x * across, y * down, (x + box_width) * across, (y + box_height) * down, label], axis=1
    )


def mask_of(sample: Sample, label: str) -> NDArray[np.bool_]:
    """Return the union of the label's masks, or of its boxes where there are no masks: (H, W) of
    the published image.

    Raises CorpusError when the annotations are malformed.
    """
    height, width = published_size(sample)
    mask_HW = np.zeros((height, width), np.bool_)
    if "masks" not in sample.extra:
        for left, top, right, bottom, _ in (
            boxes_of(sample, [label], (height, width)).round().astype(int).clip(0)
        ):
            mask_HW[top:bottom, left:right] = True
        return mask_HW
    for entry in _entries(sample, "masks"):
        if entry["label"] == label:
            mask_HW |= decode_runs(str(entry["runs"]), height, width)
    return mask_HW


def mask_at(sample: Sample, label: str, size: tuple[int, int]) -> NDArray[np.bool_]:
    """Return `mask_of` resized to `size` (height, width): pixels that the mask covers by at
    least half.
    """
    mask_HW = mask_of(sample, label).astype(np.float32)
    return np.asarray(cv2.resize(mask_HW, size[::-1], interpolation=cv2.INTER_AREA) >= 0.5)


def _entries(sample: Sample, kind: Kind) -> list[Mapping[str, Any]]:
    entries = sample.extra.get(kind if kind in sample.extra else "boxes", [])
    if not isinstance(entries, list) or not all(
        isinstance(entry, dict) and "label" in entry for entry in entries
    ):
        raise _malformed(sample, kind)
    return entries


def _malformed(sample: Sample, kind: Kind) -> CorpusError:
    return CorpusError(
        f"sample {sample.key}: malformed {kind}; convert the corpus again", "malformed", field=kind
    )


@dataclasses.dataclass(frozen=True, slots=True)
class DenseTargets:
    """Boxes or masks in the coordinates of a model's input; targets for
    `open_loader(targets=)`.
    """

    kind: Kind
    labels: Sequence[str]
    """Labels to learn, in the order of the model's outputs."""
    transform: EvalTransform
    """The model's image transform."""
    grid: tuple[int, int]
    """(h, w) of the model's output, for masks."""
    unlabelled: Mapping[str, int] | None = None
    """Key of an image whose annotations are ignored -> its number (`DenseBatch.unlabelled_B`)."""

    def __call__(self, sample: Sample, image: Transformed) -> DenseTarget:
        """Return the boxes or masks of a sample in an augmented image."""
        number = -1 if self.unlabelled is None else self.unlabelled.get(sample.key, -1)
        values: NDArray[Any]
        if self.kind == "boxes":
            values = self.boxes(sample, image.turn_22)
        elif number >= 0 or not _entries(sample, "masks"):
            values = np.zeros((len(self.labels), *self.grid), np.uint8)
        else:
            values = self.masks(sample, image.turn_22)
        return DenseTarget(values, image.turn_22, number)

    def add_to(self, batch: Batch, targets: Sequence[DenseTarget]) -> DenseBatch:
        """Return the batch with `boxes_BN5` or `masks_BLhw`, and what the model needs to know of
        the augmentation.
        """
        fields: dict[str, Any] = {
            field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)
        }
        if self.kind == "boxes":
            fields["boxes_BN5"] = _pad_boxes([target.values for target in targets])
        else:
            fields["masks_BLhw"] = torch.from_numpy(np.stack([target.values for target in targets]))
        turns = [target.turn_22 for target in targets if target.turn_22 is not None]
        if len(turns) == len(targets):
            fields["turn_B22"] = torch.from_numpy(np.stack(turns))
        if self.unlabelled is not None:
            fields["unlabelled_B"] = torch.tensor([target.unlabelled for target in targets])
        return DenseBatch(**fields)

    def boxes(
        self, sample: Sample, turn_22: NDArray[np.float32] | None = None
    ) -> NDArray[np.float32]:
        """Return the boxes (N, 5) in pixels of the transformed image, clipped to it; empty boxes
        are dropped.

        A box in a turned image is the smallest one around the turned box.
        """
        height, width = published_size(sample)
        view = self.transform.box(height, width)
        size = self.transform.size
        boxes_N5 = boxes_of(sample, self.labels, (height, width))
        scale = size / np.array([view.width, view.height] * 2)
        boxes_N5[:, :4] = (boxes_N5[:, :4] - [view.left, view.top] * 2) * scale
        if turn_22 is not None:
            boxes_N5[:, :4] = _turn_boxes(boxes_N5[:, :4], turn_22, size)
        boxes_N5[:, :4] = boxes_N5[:, :4].clip(0, size)
        left, top, right, bottom = boxes_N5[:, :4].T
        return boxes_N5[(right - left >= 1) & (bottom - top >= 1)].astype(np.float32)

    def masks(
        self, sample: Sample, turn_22: NDArray[np.float32] | None = None
    ) -> NDArray[np.uint8]:
        """Return (L, h, w): fraction of each output cell that is covered by the label's mask;
        255 is all of it.
        """
        transform = self.transform.build()
        cells = self.grid[::-1]
        planes = []
        for label in self.labels:
            pixels_HW = mask_of(sample, label).astype(np.uint8) * 255
            square_HWC = transform(pixels_HW, np.random.default_rng(0)).image_HWC
            if turn_22 is not None:
                square_HWC = turn(square_HWC, turn_22)
            planes.append(cv2.resize(square_HWC[:, :, 0], cells, interpolation=cv2.INTER_AREA))
        return np.stack(planes)


def _turn_boxes(
    boxes_N4: NDArray[np.float64], turn_22: NDArray[np.float32], size: int
) -> NDArray[np.float64]:
    """Return the smallest boxes around boxes that are turned with the image."""
    corners_N42 = boxes_N4[:, [[0, 1], [2, 1], [2, 3], [0, 3]]] - size / 2
    turned_N42 = (
        corners_N42 @ turn_22 + size / 2
    )  # the inverse of a rotation or reflection is its transpose
    return np.concatenate([turned_N42.min(axis=1), turned_N42.max(axis=1)], axis=1)


def _pad_boxes(boxes: Sequence[NDArray[np.float32]]) -> Tensor:
    boxes_BN5 = np.full((len(boxes), max(map(len, boxes)), 5), np.nan, np.float32)
    for row, boxes_N5 in zip(boxes_BN5, boxes, strict=True):
        row[: len(boxes_N5)] = boxes_N5
    return torch.from_numpy(boxes_BN5)
