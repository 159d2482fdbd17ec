"""Base of systems that see a few patches of an image and reconstruct the others, of a larger image (MRM)."""

import dataclasses
import math
from typing import Any, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from medvl import losses
from medvl.common.checks import check_within
from medvl.encoders import ImageEncoder, TextEncoder
from medvl.errors import ConfigError
from medvl.losses.masked.mim import PatchMask, mask_patches, patchify, standardize
from medvl.models.base import Parts, TowersConfig, TwoTowers
from medvl.models.fusion_encoders.parts.heads import Patches, PixelDecoder, PixelDecoderConfig
from medvl.schema import Batch, ImageFeatures


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskedPixelsConfig(PixelDecoderConfig, TowersConfig):
    """Settings of images without most of their patches; MRM's by default."""

    image_size: int = 224
    """Pixels of the encoder's images."""
    target_scale: int = 2
    """The loader's images have this many times `image_size`; patches of them are reconstructed."""
    shrink_antialias: bool = True
    """Shrink these images to `image_size` with antialiasing; MRM's released code does not, nor do imported models."""
    mask_ratio: float = 0.75
    decoder_width: int = 768

    def __post_init__(self) -> None:
        self.check_decoder()
        check_within(self, "(0, 1)", "mask_ratio")
        check_within(self, "[1, inf)", "target_scale")


class MaskedPixels(TwoTowers):
    """An image encoder of a few visible patches, and a decoder of the pixels of the others.

    Attributes:
        mim_head: pixels of all patches at `target_scale` times the encoder's resolution.
    """

    image_encoder: ImageEncoder

    def __init__(
        self, config: Any, image_encoder: ImageEncoder, text_encoder: TextEncoder, **parts: Unpack[Parts]
    ) -> None:
        super().__init__(config, image_encoder, text_encoder, **parts)
        if not image_encoder.can_drop_patches:
            message = f"{image_encoder.name} cannot drop patches: take a vision Transformer"
            raise ConfigError(message, "unsupported", field="image_encoder")
        patches, scale = Patches.of(image_encoder), config.target_scale
        targets = dataclasses.replace(patches, side=patches.side * scale, values=patches.values * scale**2)
        self.mim_head = PixelDecoder(image_encoder.patch_dim, targets, config, "gelu")

    def mask_images(self, batch: Batch) -> tuple[Tensor, PatchMask]:
        """Return the normalised pixels (B, C, H, W) of a batch, and the visible patches of each image.

        Raises ConfigError for images of another size than `image_size * target_scale`.
        """
        side = self.config.image_size * self.config.target_scale
        if batch.image_BCHW.shape[2:] != (side, side):
            message = f"expected images of {side} x {side}, got {tuple(batch.image_BCHW.shape[2:])}"
            raise ConfigError(f"{message}: set the size of data.image", "mismatch", field="image_size")
        pixels_BCHW = self.image_encoder.normalize(batch.image_BCHW)
        count, ratio = math.prod(self.mim_head.patches.grid), self.config.mask_ratio
        return pixels_BCHW, mask_patches(len(batch), count, ratio, torch.default_generator, batch.image_BCHW.device)

    def encode_visible(self, pixels_BCHW: Tensor, patches: PatchMask) -> ImageFeatures:
        """Return the features of the kept patches of normalised pixels, at the encoder's resolution."""
        size = (self.config.image_size, self.config.image_size)
        if self.config.target_scale > 1:
            pixels_BCHW = F.interpolate(pixels_BCHW, size=size, mode="bicubic", antialias=self.config.shrink_antialias)
        features: ImageFeatures = self.image_encoder(pixels_BCHW, patches.kept_BK, normalized=True)
        return features

    def pixel_loss(self, pixels_BCHW: Tensor, states_BND: Tensor, patches: PatchMask, batch: Batch) -> Tensor:
        """Return the mean squared error of the removed patches, in units of each patch's own deviation."""
        target_BPC = standardize(patchify(pixels_BCHW, self.mim_head.patches.side))
        masked_BP = patches.masked_BP
        if batch.has_image_B is not None:
            masked_BP = masked_BP & batch.has_image_B[:, None]
        return losses.mim(self.mim_head(states_BND, patches), target_BPC, masked_BP)
