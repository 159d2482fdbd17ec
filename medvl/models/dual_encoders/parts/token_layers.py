"""Trained Transformer layers above an image encoder that may be frozen (RadZero)."""

from typing import Any

import torch
from torch import Tensor, nn

from medvl.encoders import ImageEncoder
from medvl.errors import ConfigError
from medvl.schema import ImageFeatures


def token_layers(encoder: ImageEncoder, count: int) -> nn.Sequential:
    """Return pre-norm layers as wide as an encoder's patches, with heads 64 wide.

    Raises ConfigError for an image encoder whose vector is not as wide as its patches.
    """
    from timm.models.vision_transformer import Block

    width = encoder.patch_dim
    if encoder.feature_dim != width:
        message = f"{encoder.name} has {width} dimensions a patch and {encoder.feature_dim} an image"
        raise ConfigError(f"{message}: take one with equal widths", "unsupported", field="image_encoder")
    options: dict[str, Any] = {"dim": width, "num_heads": max(1, width // 64), "qkv_bias": True, "init_values": 1.0}
    return nn.Sequential(*(Block(**options) for _ in range(count)))


def tokens_of(features: ImageFeatures) -> Tensor:
    """Return (B, 1 + P, D): the class token (or the image's vector) and the patches."""
    assert features.patches_BPD is not None, "image encoders of dual-encoders have patches"
    return torch.cat([features.pooled_BD[:, None], features.patches_BPD], dim=1)
