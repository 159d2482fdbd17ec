"""The grid of an image encoder as regions: no detector is needed."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from medvl.data.shards.regions import Regions
from medvl.data.transforms.image import EvalTransform
from medvl.encoders import ImageEncoder
from medvl.encoders.pretrained import weights_sha256
from medvl.errors import ConfigError
from medvl.models.downstream.regions.selection import PreparedImage, in_original, prepare, stack

_WHOLE_4 = np.array([0, 0, 1, 1], np.float32)
"""The box of a whole image."""


class GridRegions:
    """The cells of an image encoder's grid, without classes; cells outside of the image are left out.

    A `RegionDetector`. A model that reads pixels computes the same features itself, with gradient and augmentation:
    this caches them.

    Args:
        encoder: set to eval mode, without gradient.
        transform: preparation of the images.
        name: name for messages and the manifest.
        all_tokens: the encoder's vector (a class token) comes before the cells, and cells outside of the image are
            kept: what a model computes from the image, in its order.

    Raises ConfigError with `all_tokens` for an encoder whose vector is not as wide as its patches.
    """

    color: bool | None
    class_names: tuple[str, ...] = ()

    def __init__(self, encoder: ImageEncoder, transform: EvalTransform, name: str, *, all_tokens: bool = False) -> None:
        if all_tokens and encoder.feature_dim != encoder.patch_dim:
            message = f"{encoder.name} has {encoder.patch_dim} dimensions per patch and {encoder.feature_dim} per image"
            raise ConfigError(f"{message}: leave all_tokens unset", "unsupported", field="all_tokens")
        self.name, self.transform, self.all_tokens = name, transform, all_tokens
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
        vector_BD, patches_BPD = (each.float().cpu().numpy() for each in (features.pooled_BD, features.patches_BPD))
        found = []
        for image, vector_D, patches_PD in zip(images, vector_BD, patches_BPD, strict=True):
            boxes_P4 = in_original(self._cells_P4, self.transform, image.size)
            if self.all_tokens:
                found.append(Regions(np.vstack([vector_D, patches_PD]), np.vstack([_WHOLE_4, boxes_P4])))
                continue
            seen_P = (boxes_P4[:, 2:] > boxes_P4[:, :2]).all(axis=1)
            found.append(Regions(patches_PD[seen_P], boxes_P4[seen_P]))
        return found


def grid_settings(encoder: ImageEncoder, transform: EvalTransform, *, all_tokens: bool) -> dict[str, Any]:
    """Return the settings of `GridRegions`, which its hash covers beside the encoder's weights."""
    settings = {"encoder": encoder.config, "transform": transform.settings()}
    return {**settings, "all_tokens": True} if all_tokens else settings
