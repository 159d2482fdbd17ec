"""Training targets for detection and segmentation: boxes and masks in the pixels of a model's input.

`Sample.extra` holds boxes and masks in pixels of the published image (`medvl.data.annotations.boxes`,
`medvl.data.annotations.mask_rle`). The model's transform is deterministic, so targets are computed once and added to
each batch by sample key.

Shape letters: N boxes of an image, padded to the largest number in the batch; L labels; h, w cells of the model's
output grid.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from medvl.data.annotations.mask_rle import decode_runs
from medvl.data.annotations.phrases import published_size
from medvl.data.loading.sources import Source
from medvl.data.transforms.image import EvalTransform
from medvl.errors import CorpusError
from medvl.schema import Batch, Sample

Kind = Literal["boxes", "masks"]
_SIDES = ("x", "y", "width", "height")


@dataclasses.dataclass(kw_only=True, slots=True)
class DenseBatch(Batch):
    """A batch with the boxes or the masks of its images."""

    boxes_BN5: Tensor | None = None
    """float32: left, top, right and bottom edge in pixels of `image_BCHW`, and the label index; rows of NaN are
    padding."""
    masks_BLhw: Tensor | None = None
    """uint8: fraction of each output cell that is covered by the label's mask; 255 is all of it."""


def is_annotated(sample: Sample, kind: Kind) -> bool:
    """Return whether the image was annotated with boxes (or masks), including images where none were drawn.

    Boxes count as masks where there are no masks: the "segmentation" of RSNA uses its boxes.
    """
    return "boxes" in sample.extra or (kind == "masks" and "masks" in sample.extra)


def annotated_labels(samples: Sequence[Sample], kind: Kind) -> tuple[str, ...]:
    """Return the labels that have a box (or a mask), sorted."""
    return tuple(sorted({str(entry["label"]) for sample in samples for entry in _entries(sample, kind)}))


def boxes_of(sample: Sample, labels: Sequence[str], size: tuple[int, int]) -> NDArray[np.float64]:
    """Return the boxes of `labels` (N, 5): edges in pixels of the image at `size` (height, width), and label index.

    Raises CorpusError when the annotations are malformed.
    """
    height, width = published_size(sample)
    down, across = size[0] / height, size[1] / width
    try:
        rows = [
            (*(float(entry[side]) for side in _SIDES), labels.index(entry["label"]))
            for entry in _entries(sample, "boxes")
            if entry["label"] in labels
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise _malformed(sample, "boxes") from error
    x, y, box_width, box_height, label = np.array(rows, np.float64).reshape(-1, 5).T
    return np.stack([x * across, y * down, (x + box_width) * across, (y + box_height) * down, label], axis=1)


def mask_of(sample: Sample, label: str) -> NDArray[np.bool_]:
    """Return the union of the label's masks, or of its boxes where there are no masks: (H, W) of the published image.

    Raises CorpusError when the annotations are malformed.
    """
    height, width = published_size(sample)
    mask_HW = np.zeros((height, width), np.bool_)
    if "masks" not in sample.extra:
        for left, top, right, bottom, _ in boxes_of(sample, [label], (height, width)).round().astype(int).clip(0):
            mask_HW[top:bottom, left:right] = True
        return mask_HW
    for entry in _entries(sample, "masks"):
        if entry["label"] == label:
            mask_HW |= decode_runs(str(entry["runs"]), height, width)
    return mask_HW


def mask_at(sample: Sample, label: str, size: tuple[int, int]) -> NDArray[np.bool_]:
    """Return `mask_of` resized to `size` (height, width): pixels that the mask covers by at least half."""
    mask_HW = mask_of(sample, label).astype(np.float32)
    return np.asarray(cv2.resize(mask_HW, size[::-1], interpolation=cv2.INTER_AREA) >= 0.5)


def _entries(sample: Sample, kind: Kind) -> list[Mapping[str, Any]]:
    entries = sample.extra.get(kind if kind in sample.extra else "boxes", [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) and "label" in entry for entry in entries):
        raise _malformed(sample, kind)
    return entries


def _malformed(sample: Sample, kind: Kind) -> CorpusError:
    return CorpusError(f"sample {sample.key}: malformed {kind}; convert the corpus again", "malformed", field=kind)


class DenseTargets:
    """Boxes or masks in the coordinates of a model's input.

    Args:
        kind: boxes or masks.
        labels: labels to learn, in the order of the model's outputs.
        transform: the model's image transform.
        grid: (h, w) of the model's output, for masks.
    """

    def __init__(self, kind: Kind, labels: Sequence[str], transform: EvalTransform, grid: tuple[int, int]) -> None:
        self.kind, self.labels, self.transform, self.grid = kind, tuple(labels), transform, grid

    def boxes(self, sample: Sample) -> NDArray[np.float32]:
        """Return the boxes (N, 5) in pixels of the transformed image, clipped to it; empty boxes are dropped."""
        height, width = published_size(sample)
        view = self.transform.box(height, width)
        boxes_N5 = boxes_of(sample, self.labels, (height, width))
        scale = self.transform.size / np.array([view.width, view.height] * 2)
        boxes_N5[:, :4] = ((boxes_N5[:, :4] - [view.left, view.top] * 2) * scale).clip(0, self.transform.size)
        left, top, right, bottom = boxes_N5[:, :4].T
        return boxes_N5[(right - left >= 1) & (bottom - top >= 1)].astype(np.float32)

    def masks(self, sample: Sample) -> NDArray[np.uint8]:
        """Return (L, h, w): fraction of each output cell that is covered by the label's mask; 255 is all of it."""
        transform = self.transform.build()
        cells = self.grid[::-1]
        planes = []
        for label in self.labels:
            pixels_HW = mask_of(sample, label).astype(np.uint8) * 255
            square_HWC = transform(pixels_HW, np.random.default_rng(0)).image_HWC
            planes.append(cv2.resize(square_HWC[:, :, 0], cells, interpolation=cv2.INTER_AREA))
        return np.stack(planes)


class DenseTargetTable:
    """Targets of all samples of a source, computed once; calling it adds them to a batch (`open_loader(add_targets=)`).

    Args:
        targets: computes the targets of one sample.
        source: annotated samples (`is_annotated`). Images without a box or mask are not stored.
    """

    def __init__(self, targets: DenseTargets, source: Source) -> None:
        self.targets = targets
        compute: Callable[[Sample], np.ndarray] = targets.boxes if targets.kind == "boxes" else targets.masks
        samples = (source.sample(position) for position in range(len(source)))
        self._by_key = {sample.key: compute(sample) for sample in samples if _entries(sample, targets.kind)}

    def __call__(self, batch: Batch) -> DenseBatch:
        """Return the batch with `boxes_BN5` or `masks_BLhw`."""
        fields = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
        if self.targets.kind == "boxes":
            return DenseBatch(**fields, boxes_BN5=self._boxes(batch.keys))
        return DenseBatch(**fields, masks_BLhw=self._masks(batch.keys))

    def _boxes(self, keys: Sequence[str]) -> Tensor:
        boxes = [self._by_key.get(key, np.zeros((0, 5), np.float32)) for key in keys]
        boxes_BN5 = np.full((len(keys), max(map(len, boxes)), 5), np.nan, np.float32)
        for row, boxes_N5 in zip(boxes_BN5, boxes, strict=True):
            row[: len(boxes_N5)] = boxes_N5
        return torch.from_numpy(boxes_BN5)

    def _masks(self, keys: Sequence[str]) -> Tensor:
        empty = np.zeros((len(self.targets.labels), *self.targets.grid), np.uint8)
        return torch.from_numpy(np.stack([self._by_key.get(key, empty) for key in keys]))
