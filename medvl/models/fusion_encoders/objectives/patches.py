"""Masked image modeling (MIM): pixels of removed patches, or of masked blocks of cells.

Q blocks of a scale; the other letters as in `base`.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from medvl import losses
from medvl.encoders import ImageEncoder
from medvl.errors import ConfigError
from medvl.losses.masked import PatchMask, mask_blocks, mask_patches, patchify, standardize
from medvl.models.fusion_encoders.objectives.base import Encoded, Objective
from medvl.models.fusion_encoders.parts.encoder import Tokens
from medvl.models.fusion_encoders.parts.heads import BlockHead, Patches, PixelDecoder
from medvl.schema import Batch


class PatchPredictions(NamedTuple):
    """Predicted and true pixels of all patches, for the samples that have an image."""

    pixels_BPC: Tensor
    """Each patch in units of its own mean and deviation where `MaskedImageModeling`
    standardises, else as the truth.
    """
    true_BPC: Tensor
    """The encoder's input: normalised, not standardised per patch."""
    masked_BP: Tensor
    """bool: the removed patches."""


class PatchModel(Protocol):
    """A model that reconstructs masked patches; `image_encoder` normalises the pixels that are
    their truth.
    """

    image_encoder: ImageEncoder
    mim_head: PixelDecoder

    def reconstruct(
        self, image_BCHW: Tensor, image: Tokens, text: Tokens, patches: PatchMask
    ) -> Tensor:
        """(B, P, C): pixels of all patches from the kept ones and the texts; `image`, `text` as
        in `Encoded`.
        """


class MaskedImageModeling(Objective[Encoded, PatchMask, PatchPredictions]):
    """Pixels of removed patches from the kept ones, and from the text in models that use it (MIM).

    Args:
        weight: factor of the term.
        model: reconstructs the patches.
        ratio: share of patches that are removed.
        standardized: whether the truth is in units of each patch's own mean and deviation, else
            normalised pixels.
    """

    name = "mim"

    def __init__(
        self, weight: float, model: PatchModel, ratio: float, *, standardized: bool = True
    ) -> None:
        super().__init__(weight)
        self.model = model
        self.ratio = ratio
        self.standardized = standardized

    def corrupt(self, batch: Batch) -> PatchMask:
        """Sample the removed patches of every image."""
        patches = math.prod(self.model.mim_head.patches.grid)
        return mask_patches(
            len(batch), patches, self.ratio, torch.default_generator, batch.image_BCHW.device
        )

    def predict(self, encoded: Encoded, corruption: PatchMask) -> PatchPredictions:
        """Reconstruct the patches of the samples that have an image."""
        return self.predict_patches(encoded.batch, encoded.image, encoded.text, corruption)

    def predict_patches(
        self, batch: Batch, image: Tokens, text: Tokens, patches: PatchMask
    ) -> PatchPredictions:
        """See `predict`; `image` and `text` are the batch before fusion."""
        image_BCHW = batch.image_BCHW
        if batch.has_image_B is not None:
            index_K = batch.has_image_B.nonzero().squeeze(1)
            patches = PatchMask(
                *(getattr(patches, field.name)[index_K] for field in dataclasses.fields(patches))
            )
            image = image.rows(index_K)
            text = text.rows(index_K)
            image_BCHW = image_BCHW[index_K]
        true_BPC = patchify(
            self.model.image_encoder.normalize(image_BCHW), self.model.mim_head.patches.side
        )
        if len(image_BCHW) == 0:  # a vision Transformer cannot encode an empty batch
            blank_BPC = true_BPC.new_zeros(1, *true_BPC.shape[1:])
            return PatchPredictions(
                blank_BPC, blank_BPC, patches.masked_BP.new_zeros(blank_BPC.shape[:2])
            )
        return PatchPredictions(
            self.model.reconstruct(image_BCHW, image, text, patches), true_BPC, patches.masked_BP
        )

    def loss(self, predictions: PatchPredictions, corruption: PatchMask) -> Tensor:
        """Mean squared error of the removed patches' pixels."""
        true_BPC = standardize(predictions.true_BPC) if self.standardized else predictions.true_BPC
        return losses.mim(predictions.pixels_BPC, true_BPC, predictions.masked_BP)


class MultiScaleModel(Protocol):
    """A model that regenerates blocks of masked cells; `mim_head` has a head for each scale."""

    image_encoder: ImageEncoder
    patches: Patches
    mim_head: BlockHead


class MultiScaleMaskedImageModeling(Objective[Encoded, Tensor, list[PatchPredictions]]):
    """Pixels of masked blocks of cells, at several scales (Wang et al., arXiv 2103.16022; see
    `MixedModel`).

    Args:
        weight: factor of the term.
        model: has the heads.
        ratio: share of the cells that are masked.
        scales: sides of the blocks in cells.

    Raises ConfigError unless every scale divides the model's grid.
    """

    name = "mim"

    def __init__(
        self, weight: float, model: MultiScaleModel, ratio: float, scales: Sequence[int]
    ) -> None:
        super().__init__(weight)
        self.model = model
        self.ratio = ratio
        self.scales = tuple(scales)
        grid = model.patches.grid
        if not self.scales or any(
            scale < 1 or grid[0] % scale or grid[1] % scale for scale in self.scales
        ):
            message = f"scales must divide the image encoder's grid {grid}, got {self.scales}"
            raise ConfigError(message, "conflict", field="scales")

    def corrupt(self, batch: Batch) -> Tensor:
        """(B, P) bool: sample a scale for each image, and mask blocks of it."""
        generator = torch.default_generator
        device = batch.image_BCHW.device
        return mask_blocks(
            len(batch), self.model.patches.grid, self.scales, self.ratio, generator
        ).to(device)

    def predict(self, encoded: Encoded, corruption: Tensor) -> list[PatchPredictions]:
        """Regenerate all blocks of each scale, for the samples that have an image."""
        assert encoded.own is not None
        batch = encoded.batch
        image = encoded.own.image
        masked_BP = corruption
        image_BCHW = batch.image_BCHW
        grid = self.model.patches.grid
        side = self.model.patches.side
        if batch.has_image_B is not None:
            index_K = batch.has_image_B.nonzero().squeeze(1)
            image = image.rows(index_K)
            image_BCHW = image_BCHW[index_K]
            masked_BP = masked_BP[index_K]
        pixels_BCHW = self.model.image_encoder.normalize(image_BCHW)
        if len(image_BCHW) == 0:
            blank_BPC = pixels_BCHW.new_zeros(0, 0, self.model.patches.values)
            return [PatchPredictions(blank_BPC, blank_BPC, masked_BP[:, :0]) for _ in self.scales]
        states_BDhw = image.states_BND[:, 1:].transpose(1, 2).unflatten(2, grid)
        visible_B1hw = (~masked_BP).float().unflatten(1, grid)[:, None]
        predictions = []
        for scale, head in zip(self.scales, self.model.mim_head.scales, strict=True):
            blocks_BQD = F.avg_pool2d(states_BDhw, scale).flatten(2).transpose(1, 2)
            true_BQC = patchify(F.avg_pool2d(pixels_BCHW, scale), side)
            masked_BQ = F.max_pool2d(visible_B1hw, scale).flatten(1) == 0
            predictions.append(PatchPredictions(head(blocks_BQD), true_BQC, masked_BQ))
        return predictions

    def loss(self, predictions: list[PatchPredictions], corruption: Tensor) -> Tensor:
        """Mean squared error over the masked blocks of each scale, then the mean over scales."""
        return torch.stack([losses.mim(*prediction) for prediction in predictions]).mean()
