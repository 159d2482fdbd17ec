"""Base of dual-encoders with trained Transformer layers above an image encoder that may be frozen (RadZero)."""

import dataclasses
import functools
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medvl.common.checks import check_within
from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.encoders import ImageEncoder, freeze_layers
from medvl.errors import ConfigError
from medvl.models.dual_encoders.bases.bert import BertDualConfig, BertDualEncoder
from medvl.models.dual_encoders.bases.local import local_features
from medvl.schema import Embeddings, ImageFeatures


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenLayersConfig(BertDualConfig):
    """Settings of layers above an image encoder, which are as wide as its patches; so is the shared space."""

    trained_layers: int = 2
    """Transformer layers above the image encoder."""
    layer_norm_eps: float = 1e-5
    """Epsilon of the norms of these layers; DINOv2's, and that of the released RadZero, is 1e-6."""
    frozen_image: bool = True
    """Do not train the image encoder."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_within(self, "[0, inf)", "trained_layers")
        check_within(self, "(0, inf)", "layer_norm_eps")


class TokenLayers(BertDualEncoder):
    """A dual-encoder whose images are their class token (or the encoder's vector) and patches behind trained layers.

    Attributes:
        layers, norm: the layers (`token_layers`), and the norm behind them.
    """

    reads_features = True

    def __init__(self, config: Any, *args: Any, layers: nn.Module, norm: nn.Module, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.layers, self.norm = layers, norm

    @classmethod
    def build(cls, config: Any, *, pretrained: bool, tokenizer: Tokenizer | None) -> Self:
        """See the base class."""
        model = super().build(config, pretrained=pretrained, tokenizer=tokenizer)
        if config.frozen_image:
            freeze_layers(model.image_encoder, "all")
        return model

    def unnormalized_image(self, image_BCHW: Tensor) -> Tensor:
        """See the base class: the class token behind the trained layers."""
        return self._tokens(self.image_encoder(image_BCHW))[:, 0]

    def embed_images(self, image_BCHW: Tensor) -> Embeddings:
        """Return images as `similarity` takes them; `local_NPE` has the class token (or mean) and the patches."""
        return self.embed_features(self.image_encoder(image_BCHW))

    def embed_features(self, features: ImageFeatures) -> Embeddings:
        """Return images as `embed_images` does, from the output of the image encoder."""
        tokens_BKD = F.normalize(self._tokens(features), dim=2)
        return Embeddings(tokens_BKD[:, 0], tokens_BKD)

    def embed_regions(self, image_BCHW: Tensor) -> Tensor:
        """Return (B, P, E): the patches, in the space of texts."""
        return local_features(self.embed_images(image_BCHW))[0][:, 1:]

    def _tokens(self, features: ImageFeatures) -> Tensor:
        """Return (B, 1 + P, D) float32, not normalised."""
        assert features.patches_BPD is not None, "token_layers requires patches"
        tokens_BKD = torch.cat([features.pooled_BD[:, None], features.patches_BPD], dim=1)
        normed_BKD: Tensor = self.norm(self.layers(tokens_BKD))
        return normed_BKD.float()


def token_layers(encoder: ImageEncoder, count: int, eps: float = 1e-5) -> nn.Sequential:
    """Return pre-norm layers as wide as an encoder's patches, with heads 64 wide and norms with this epsilon.

    Raises ConfigError for an image encoder whose vector is not as wide as its patches.
    """
    from timm.models.vision_transformer import Block

    width = encoder.patch_dim
    if encoder.feature_dim != width:
        message = f"{encoder.name} has {width} dimensions per patch and {encoder.feature_dim} per image"
        raise ConfigError(f"{message}: use one with equal widths", "unsupported", field="image_encoder")
    options: dict[str, Any] = {"dim": width, "num_heads": max(1, width // 64), "qkv_bias": True, "init_values": 1.0}
    options["norm_layer"] = functools.partial(nn.LayerNorm, eps=eps)
    return nn.Sequential(*(Block(**options) for _ in range(count)))
