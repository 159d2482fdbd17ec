"""Masked image modeling (MIM): pixels of removed patches; letters as in `base`."""

import dataclasses
import math
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from medvl import losses
from medvl.encoders import ImageEncoder
from medvl.losses.masked import PatchMask, mask_patches, patchify, standardize
from medvl.models.fusion_encoders.objectives.base import Encoded, Objective
from medvl.models.fusion_encoders.parts.encoder import Tokens
from medvl.models.fusion_encoders.parts.heads import PixelDecoder
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
