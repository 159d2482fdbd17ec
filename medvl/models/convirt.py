"""ConVIRT: contrastive learning of a report sentence and its image (Zhang et al., arXiv 2010.00747, MLHC 2022)."""

import dataclasses
from typing import Literal, Self

from medvl import losses
from medvl.data.tokenize import Tokenizer
from medvl.data.transforms import EvalTransform
from medvl.encoders import create_image_encoder, create_text_encoder, freeze_layers
from medvl.errors import ConfigError
from medvl.losses.distributed import gather
from medvl.models.dual import DualEncoder, projection_head
from medvl.schema import Batch, Losses


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConVIRTConfig:
    """The published settings.

    The paper's training code was not released: max pooling over tokens, the 512 dimensions and the width of the heads
    are as in LoVT's re-implementation.
    """

    image_encoder: str = "resnet50"
    text_encoder: str = "bioclinicalbert"
    image_size: int = 224
    fit: Literal["crop", "pad", "squash"] = "crop"
    """How an image is made square for inference (`medvl.data.transforms.EvalTransform`)."""
    projection_dim: int = 512
    """E, of the shared space."""
    frozen_text_layers: int = 6
    """The embedding layer and this many layers above it are not trained; 0 trains everything."""
    temperature: float = 0.1
    image_weight: float = 0.75
    """Lambda: the share of the image-to-text direction."""
    max_tokens: int = 128
    vocab_size: int | None = None
    """Of the text encoder; None is the preset's own, or the tokenizer's where one is given."""

    def __post_init__(self) -> None:
        if self.temperature <= 0 or not 0 <= self.image_weight <= 1:
            raise ConfigError("temperature must be above 0 and image_weight within [0, 1]")
        if self.frozen_text_layers < 0 or self.projection_dim < 1:
            raise ConfigError("frozen_text_layers must not be negative and projection_dim must be positive")


class ConVIRT(DualEncoder):
    """Bidirectional InfoNCE of an image and one sentence of its report (section 2.2, equations 2 to 4)."""

    name = "convirt"
    Config = ConVIRTConfig

    @classmethod
    def build(cls, config: ConVIRTConfig, *, pretrained: bool, tokenizer: Tokenizer | None) -> Self:
        """Raises ConfigError and WeightsError as `create_model` says."""
        image_encoder = create_image_encoder(config.image_encoder, pretrained=pretrained, image_size=config.image_size)
        text_encoder = create_text_encoder(
            config.text_encoder, pretrained=pretrained, vocab_size=config.vocab_size, pool="max"
        )
        freeze_layers(text_encoder, config.frozen_text_layers)
        return cls(
            config,
            image_encoder,
            text_encoder,
            projection_head(image_encoder.feature_dim, config.projection_dim),
            projection_head(text_encoder.feature_dim, config.projection_dim),
            transform=EvalTransform(size=config.image_size, fit=config.fit),
            tokenizer=tokenizer,
        )

    def forward(self, batch: Batch) -> Losses:
        """Negatives are all other pairs of the global batch, of every rank, with gradient."""
        image_NE = gather(self.encode_image(batch.image_BCHW))
        text_NE = gather(self.encode_text(batch.ids_BT, batch.mask_BT))
        return Losses.sum(
            contrastive=losses.convirt(image_NE, text_NE, self.config.temperature, self.config.image_weight)
        )
