"""Boxes and masks that a data set has for its images, in the pixels of a model's input: what dense heads learn from.

`Sample.extra` has them in pixels of the published image (`medvl.data.annotations.boxes`,
`medvl.data.annotations.mask_rle`). The transform
of a model is without randomness, so that what they become is worked out once and given to every batch by key.

Shape letters: N boxes of an image, padded to the most of any in the batch; L labels; h, w cells of a model's own grid.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from medvl.data.annotations.mask_rle import decode_runs
from medvl.data.annotations.phrases import published_size
from medvl.data.loading.loader import Loader, Source
from medvl.data.transforms.image import EvalTransform
from medvl.errors import CorpusError
from medvl.schema import Batch, Sample

Kind = Literal["boxes", "masks"]
_SIDES = ("x", "y", "width", "height")


@dataclasses.dataclass(kw_only=True, slots=True)
class DenseBatch(Batch):
    """A batch with the boxes or the masks of its images."""

    boxes_BN5: Tensor | None = None
    """float32: left, top, right and bottom edge in pixels of `image_BCHW`, and the number of the label; a row of NaN
    is padding."""
    masks_BLhw: Tensor | None = None
    """uint8: how much of each cell of the model's grid lies in a mask of the label, 255 being all of it."""

    def _map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        mapped = Batch._map(self, function)
        assert isinstance(mapped, DenseBatch)
        mapped.boxes_BN5 = None if self.boxes_BN5 is None else function(self.boxes_BN5)
        mapped.masks_BLhw = None if self.masks_BLhw is None else function(self.masks_BLhw)
        return mapped


def is_marked(sample: Sample, kind: Kind) -> bool:
    """Whether somebody looked for boxes (or masks) in this image, whatever they found.

    Where there are boxes and no masks, boxes are masks: RSNA's "segmentation" is of its boxes.
    """
    return "boxes" in sample.extra or (kind == "masks" and "masks" in sample.extra)


def mark_labels(samples: Sequence[Sample], kind: Kind) -> tuple[str, ...]:
    """Labels that have a box (or a mask), sorted."""
    return tuple(sorted({str(entry["label"]) for sample in samples for entry in _entries(sample, kind)}))


def boxes_of(sample: Sample, labels: Sequence[str], size: tuple[int, int]) -> NDArray[np.float64]:
    """(N, 5): edges in pixels of the image at `size` (height, width), and the number of the label; others are left out.

    Raises CorpusError where the boxes are not as medvl writes them.
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
        raise CorpusError(f"sample {sample.key}: its boxes are not as medvl writes them") from error
    x, y, wide, high, number = np.array(rows, np.float64).reshape(-1, 5).T
    return np.stack([x * across, y * down, (x + wide) * across, (y + high) * down, number], axis=1)


def mask_of(sample: Sample, label: str) -> NDArray[np.bool_]:
    """(H, W) of the published image: the union of the masks of a label, or of its boxes where there are no masks.

    Raises CorpusError where they are not as medvl writes them.
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
    """`mask_of` in an image of `size` (height, width): the pixels of which at least half lies in the mask."""
    mask_HW = mask_of(sample, label).astype(np.float32)
    return np.asarray(cv2.resize(mask_HW, size[::-1], interpolation=cv2.INTER_AREA) >= 0.5)


def _entries(sample: Sample, kind: Kind) -> list[Mapping[str, Any]]:
    found = sample.extra.get(kind if kind in sample.extra else "boxes", [])
    if not isinstance(found, list) or not all(isinstance(entry, dict) and "label" in entry for entry in found):
        raise CorpusError(f"sample {sample.key}: its {kind} are not as medvl writes them: make the shards again")
    return found


class DenseTargets:
    """Boxes or masks as a model with this transform sees them.

    Args:
        kind: what the model learns.
        labels: its columns.
        transform: how it makes an image square.
        grid: (h, w) of its output, for masks.
    """

    def __init__(self, kind: Kind, labels: Sequence[str], transform: EvalTransform, grid: tuple[int, int]) -> None:
        self.kind, self.labels, self.transform, self.grid = kind, tuple(labels), transform, grid

    def boxes(self, sample: Sample) -> NDArray[np.float32]:
        """(N, 5) in pixels of the square. A box is cut where the transform cuts, and gone where it is cut off whole."""
        height, width = published_size(sample)
        seen = self.transform.box(height, width)
        found_N5 = boxes_of(sample, self.labels, (height, width))
        scale = self.transform.size / np.array([seen.width, seen.height] * 2)
        found_N5[:, :4] = ((found_N5[:, :4] - [seen.left, seen.top] * 2) * scale).clip(0, self.transform.size)
        left, top, right, bottom = found_N5[:, :4].T
        return found_N5[(right - left >= 1) & (bottom - top >= 1)].astype(np.float32)

    def masks(self, sample: Sample) -> NDArray[np.uint8]:
        """(L, h, w): how much of each cell lies in the mask, 255 being all of it."""
        made = self.transform.build()
        cells = self.grid[::-1]
        planes = []
        for label in self.labels:
            pixels_HW = mask_of(sample, label).astype(np.uint8) * 255
            square_HWC = made(pixels_HW, np.random.default_rng(0)).image_HWC
            planes.append(cv2.resize(square_HWC[:, :, 0], cells, interpolation=cv2.INTER_AREA))
        return np.stack(planes)


class DenseLoader:
    """The batches of a loader with the boxes or masks of their images; everything else is the loader's.

    Args:
        loader: over samples that `is_marked` says are.
        marker: what becomes of their marks. Those of every image are worked out here, once; images without one cost
            nothing.
    """

    def __init__(self, loader: Loader, marker: DenseTargets) -> None:
        self.loader, self.marker = loader, marker
        samples = (loader.source.sample(position) for position in range(len(loader.source)))
        make: Callable[[Sample], np.ndarray] = marker.boxes if marker.kind == "boxes" else marker.masks
        self._marks = {sample.key: make(sample) for sample in samples if _entries(sample, marker.kind)}

    @property
    def source(self) -> Source:
        """Where the samples come from."""
        return self.loader.source

    @property
    def skipped(self) -> Counter[str]:
        """Samples that could not be read so far, by reason."""
        return self.loader.skipped

    @property
    def global_batch(self) -> int:
        """Images of one batch over all ranks."""
        return self.loader.global_batch

    @property
    def steps_per_epoch(self) -> int:
        """Batches of an epoch on this rank."""
        return self.loader.steps_per_epoch

    def __iter__(self) -> Iterator[DenseBatch]:
        for batch in self.loader:
            fields = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
            if self.marker.kind == "boxes":
                yield DenseBatch(**fields, boxes_BN5=self._boxes(batch.keys))
            else:
                yield DenseBatch(**fields, masks_BLhw=self._masks(batch.keys))

    def state_dict(self) -> dict[str, Any]:
        """As the loader's: what the marks are follows from the model and the data."""
        return self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position. Raises ConfigError as the loader does."""
        self.loader.load_state_dict(state)

    def _boxes(self, keys: Sequence[str]) -> Tensor:
        found = [self._marks.get(key, np.zeros((0, 5), np.float32)) for key in keys]
        boxes_BN5 = np.full((len(keys), max(map(len, found)), 5), np.nan, np.float32)
        for row, boxes_N5 in zip(boxes_BN5, found, strict=True):
            row[: len(boxes_N5)] = boxes_N5
        return torch.from_numpy(boxes_BN5)

    def _masks(self, keys: Sequence[str]) -> Tensor:
        empty = np.zeros((len(self.marker.labels), *self.marker.grid), np.uint8)
        return torch.from_numpy(np.stack([self._marks.get(key, empty) for key in keys]))
