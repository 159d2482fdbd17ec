"""The grid of an image encoder as regions: no detector is needed."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from medvl.data.shards.regions import Regions
from medvl.data.transforms.image import EvalTransform
from medvl.encoders import ImageEncoder
from medvl.encoders.pretrained import weights_sha256
from medvl.models.downstream.regions.selection import PreparedImage, in_original, prepare, stack


class GridRegions:
    """The cells of an image encoder's grid, without classes; cells outside of the image are left out.

    A `RegionDetector`. A model that reads pixels computes the same features itself, with gradient and augmentation:
    this caches them.
    """

    color = False
    class_names: tuple[str, ...] = ()

    def __init__(self, encoder: ImageEncoder, transform: EvalTransform, name: str) -> None:
        self.name, self.transform = name, transform
        self.encoder = encoder.eval().requires_grad_(False)
        self.width = encoder.patch_dim
        self.trained_on = encoder.trained_on
        self.settings: Mapping[str, Any] = {"encoder": encoder.config, "transform": transform.settings()}
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
        patches_BPD = self.encoder(stack(list(images), self._device)).patches_BPD.float().cpu().numpy()
        found = []
        for image, patches_PD in zip(images, patches_BPD, strict=True):
            boxes_P4 = in_original(self._cells_P4, self.transform, image.size)
            seen_P = (boxes_P4[:, 2:] > boxes_P4[:, :2]).all(axis=1)
            found.append(Regions(patches_PD[seen_P], boxes_P4[seen_P]))
        return found
