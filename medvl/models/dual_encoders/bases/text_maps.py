"""Base of dual-encoders with a heat map of their own for a text in an image."""

import abc
from collections.abc import Sequence

import torch
from torch import Tensor

from medvl.models.dual_encoders.bases.base import DualEncoder
from medvl.models.heatmaps import on_originals


class TextMaps(DualEncoder):
    """A dual-encoder that implements `cell_maps`, and `map_grid` where its cells are not the image encoder's."""

    @abc.abstractmethod
    def cell_maps(self, image_BCHW: Tensor, texts: Sequence[str]) -> Tensor:
        """Return (B, P): the value of each cell of image i for text i."""

    def map_grid(self, image_BCHW: Tensor) -> tuple[int, int]:
        """Return (h, w) of the cells."""
        height, width = image_BCHW.shape[2:]
        return self.image_encoder.grid(height, width)

    @torch.no_grad()
    def attention_maps(
        self, image_BCHW: Tensor, texts: Sequence[str], original_sizes: Sequence[tuple[int, int]] | None = None
    ) -> list[Tensor]:
        """Return the heat map of each text in its image (`cell_maps`): one (H, W) float32 per pair, in original pixels.

        Pixels that `transform` cut off are NaN. Call it in eval mode.

        Args:
            image_BCHW: images from `transform`.
            texts: one text for each image.
            original_sizes: (height, width) of the images before `transform`; None gives maps over the model's input.
        """
        map_Bhw = self.cell_maps(image_BCHW, texts).float().unflatten(1, self.map_grid(image_BCHW))
        return on_originals(map_Bhw, self.transform, image_BCHW, original_sizes)
