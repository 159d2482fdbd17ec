"""Opening a detector for `medvl regions` by name."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from medvl.common.seeding import seeded
from medvl.data.convert.regions import RegionDetector
from medvl.data.shards.regions import Regions
from medvl.data.transforms.image import EvalTransform
from medvl.encoders import ImageEncoder, create_image_encoder, read_tensors
from medvl.encoders.pretrained import Pretrained, split_set, weights_sha256
from medvl.errors import ConfigError, WeightsError
from medvl.models.base import System
from medvl.models.checkpoint import load
from medvl.models.downstream.classifier import image_encoder_of
from medvl.models.downstream.detector import (
    Detector,
    PreparedImage,
    RegionSelection,
    in_original,
    prepare,
    stack,
)
from medvl.models.downstream.regions.faster_rcnn import DetectorRegions, FasterRCNNRegions

# The grid of an image encoder as regions: no detector is needed.

_WHOLE_4 = np.array([0, 0, 1, 1], np.float32)
"""The box of a whole image."""


class GridRegions:
    """The cells of an image encoder's grid, without classes; cells outside of the image are left
    out.

    A `RegionDetector`. A model that reads pixels computes the same features itself, with gradient
    and augmentation: this caches them.

    Args:
        encoder: set to eval mode, without gradient.
        transform: preparation of the images.
        name: name for messages and the manifest.
        all_tokens: the encoder's vector (a class token) comes before the cells, and cells outside
            of the image are kept: what a model computes from the image, in its order.

    Raises ConfigError with `all_tokens` for an encoder whose vector is not as wide as its patches.
    """

    color: bool | None
    class_names: tuple[str, ...] = ()

    def __init__(
        self,
        encoder: ImageEncoder,
        transform: EvalTransform,
        name: str,
        *,
        all_tokens: bool = False,
    ) -> None:
        if all_tokens and encoder.feature_dim != encoder.patch_dim:
            message = (
                f"{encoder.name} has {encoder.patch_dim} dimensions per patch and "
                f"{encoder.feature_dim} per image"
            )
            raise ConfigError(
                f"{message}: leave all_tokens unset", "unsupported", field="all_tokens"
            )
        self.name = name
        self.transform = transform
        self.all_tokens = all_tokens
        self.color = transform.trained_color
        self.encoder = encoder.eval().requires_grad_(False)
        self.width = encoder.patch_dim
        self.trained_on = encoder.trained_on
        self.settings: Mapping[str, Any] = grid_settings(encoder, transform, all_tokens=all_tokens)
        self.sha256 = weights_sha256(encoder, self.settings)
        rows, columns = encoder.grid(transform.size, transform.size)
        y, x = np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij")
        side_4 = np.array([transform.size / columns, transform.size / rows] * 2)
        self._cells_P4 = np.stack([x, y, x + 1, y + 1], axis=2).reshape(-1, 4) * side_4
        self._device = next((tensor.device for tensor in encoder.buffers()), torch.device("cpu"))

    def prepare(self, pixels: np.ndarray) -> PreparedImage:
        """See `RegionDetector`."""
        return prepare(self.transform, pixels)

    @torch.no_grad()
    def __call__(self, images: Sequence[PreparedImage]) -> list[Regions]:
        """See `RegionDetector`."""
        features = self.encoder(stack(list(images), self._device))
        vector_BD, patches_BPD = (
            each.float().cpu().numpy() for each in (features.pooled_BD, features.patches_BPD)
        )
        regions = []
        for image, vector_D, patches_PD in zip(images, vector_BD, patches_BPD, strict=True):
            boxes_P4 = in_original(self._cells_P4, self.transform, image.size)
            if self.all_tokens:
                regions.append(
                    Regions(np.vstack([vector_D, patches_PD]), np.vstack([_WHOLE_4, boxes_P4]))
                )
                continue
            seen_P = (boxes_P4[:, 2:] > boxes_P4[:, :2]).all(axis=1)
            regions.append(Regions(patches_PD[seen_P], boxes_P4[seen_P]))
        return regions


def grid_settings(
    encoder: ImageEncoder, transform: EvalTransform, *, all_tokens: bool
) -> dict[str, Any]:
    """Return the settings of `GridRegions`, which its hash covers beside the encoder's weights."""
    settings = {"encoder": encoder.config, "transform": transform.settings()}
    return {**settings, "all_tokens": True} if all_tokens else settings


_GRID = "grid:"
_TORCHVISION = "fasterrcnn_"


def create_region_detector(
    name: str,
    *,
    weights: str | None = None,
    random_weights: bool = False,
    selection: RegionSelection | None = None,
    image_size: int | None = None,
    fit: Literal["crop", "pad", "squash"] | None = None,
    all_tokens: bool = False,
    class_names: Sequence[str] | None = None,
    device: str = "cpu",
) -> RegionDetector:
    """Create a frozen detector for `medvl.data.write_regions`.

    Args:
        name: `fasterrcnn_resnet50_fpn` or another Faster R-CNN of torchvision; `grid:ENCODER` for
            the grid of an image encoder; or the folder of a checkpoint: the boxes of a `detector`,
            or the grid of another system's encoder.
        weights: for a Faster R-CNN, a local file, which also decides the number of classes; for a
            grid, `published`, or a source as in `create_image_encoder`.
        random_weights: use random weights, for tests.
        selection: number of regions of an image; a grid always has all of its cells.
        image_size: side of the input of `grid:ENCODER`; None is the encoder's own.
        fit: how `grid:ENCODER` makes images square (`EvalTransform`); None pads them. A checkpoint
            has its own.
        all_tokens: of a grid, store the encoder's vector and all cells, for training in place of
            images (`medvl.train.DataConfig.image_features`).
        class_names: names of the classes of a Faster R-CNN, the background first; None: COCO's for
            91 classes, else numbers.
        device: device of the detector.

    Raises:
        ConfigError: the name is unknown, neither weights nor `random_weights` are given, or options
            conflict.
        CheckpointError, WeightsError: the weights cannot be read, or do not fit.
    """
    folder = Path(name)
    selection = selection or RegionSelection()
    if fit is not None and not name.startswith(_GRID):
        raise ConfigError(
            f"fit is a setting of {_GRID}ENCODER; leave it out", "conflict", field="fit"
        )
    if not name.startswith((_GRID, _TORCHVISION)):
        model = _load_checkpoint(folder, device, has_weights=weights is not None or random_weights)
        if not isinstance(model, Detector):
            name = f"{_GRID}{model.name}"
            return GridRegions(
                image_encoder_of(model), model.transform, name, all_tokens=all_tokens
            )
        _refuse_tokens(model.name, all_tokens)
        return DetectorRegions(model, selection, model.name)
    if (weights is None) != random_weights:
        message = (
            f"{name} needs weights: give a source of them, or ask for random weights in a "
            f"test; not both"
        )
        raise ConfigError(message, "missing" if weights is None else "conflict", field="weights")
    if name.startswith(_TORCHVISION):
        _refuse_tokens(name, all_tokens)
        file, name_of_set = (None, None) if weights is None else split_set(weights)
        if file is not None and not Path(file).is_file():
            raise WeightsError(
                f"{file} does not exist: give a local file", "not_found", field="weights"
            )
        tensors = None if file is None else read_tensors(Path(file), name_of_set)
        return FasterRCNNRegions(name, tensors, selection, class_names, device)
    source: Pretrained = False if weights is None else weights == "published" or weights
    with seeded(0):
        encoder = create_image_encoder(
            name.removeprefix(_GRID), pretrained=source, image_size=image_size
        )
    transform = EvalTransform(size=encoder.image_size[0], fit=fit or "pad")
    return GridRegions(encoder.to(device), transform, name, all_tokens=all_tokens)


def _refuse_tokens(name: str, all_tokens: bool) -> None:
    if all_tokens:
        message = f"{name} has boxes of its own and no grid; leave all_tokens unset"
        raise ConfigError(message, "unsupported", field="all_tokens")


def _load_checkpoint(folder: Path, device: str, *, has_weights: bool) -> System:
    if not folder.is_dir():
        message = (
            f"unknown detector {str(folder)!r}: expected {_TORCHVISION}..., "
            f"{_GRID}ENCODER, or a checkpoint's folder"
        )
        raise ConfigError(message, "unknown_name", field="detector")
    if has_weights:
        raise ConfigError(
            "a checkpoint has weights of its own; leave weights out", "conflict", field="weights"
        )
    return load(folder).to(device)
