"""ConVIRT: contrastive learning of a report sentence and its image (Zhang et al., arXiv 2010.00747, MLHC 2022)."""

import dataclasses
from typing import Literal, Self

from medvl import losses
from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.data.transforms.image import EvalTransform
from medvl.encoders import create_image_encoder, create_text_encoder, freeze_layers
from medvl.errors import ConfigError
from medvl.models.base import SystemConfig
from medvl.models.dual_encoders.base import (
    ContrastiveEncoder,
    Pairs,
    Positives,
    attention_arguments,
    check_patch_dropout,
    check_positives,
    gather_global,
    groups_of,
    projection_head,
)
from medvl.models.registry import register_system
from medvl.schema import Batch, Embeddings, Losses


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConVIRTConfig(SystemConfig):
    """ConVIRT (Zhang et al., arXiv 2010.00747).

    The paper's training code was not released: max pooling over tokens, the 512 dimensions and the width of the heads
    are as in LoVT's re-implementation.
    """

    image_encoder: str = "resnet50"
    text_encoder: str = "bioclinicalbert"
    image_size: int = 224
    fit: Literal["crop", "pad", "squash"] = "crop"
    """How an image is made square for inference (`medvl.data.transforms.image.EvalTransform`)."""
    projection_dim: int = 512
    """E, of the shared space."""
    hidden_dim: int | None = None
    """Width of both heads inside; None is that of their input."""
    text_pool: Literal["max", "mean"] = "max"
    """From tokens to one vector; the mean is an unofficial re-implementation's."""
    frozen_text_layers: int = 6
    """The embedding layer and this many layers above it are not trained; 0 trains everything."""
    attention_dropout: float | None = None
    """Of the text encoder's attention, while it trains; None is its own, 0.1 in BERT. At 0 packed text takes the GPU's
    kernel for texts of uneven length."""
    patch_dropout: float = 0.0
    """Share of each image's patches that training leaves out, drawn anew each time: twice the speed at half of them
    (FLIP, Li et al., arXiv 2212.00794). Vision Transformers only; a last epoch without it closes the gap to
    inference."""
    temperature: float = 0.1
    image_weight: float = 0.75
    """Lambda: the share of the image-to-text direction."""
    positives: Positives = "own"
    max_tokens: int = 128
    vocab_size: int | None = None
    """Of the text encoder; None is the preset's own, or the tokenizer's where one is given."""

    def __post_init__(self) -> None:
        if self.temperature <= 0 or not 0 <= self.image_weight <= 1:
            raise ConfigError("temperature must be above 0 and image_weight within [0, 1]")
        if self.frozen_text_layers < 0 or self.projection_dim < 1:
            raise ConfigError("frozen_text_layers must not be negative and projection_dim must be positive")
        if self.hidden_dim is not None and self.hidden_dim < 1:
            raise ConfigError(f"hidden_dim is {self.hidden_dim}: it must be positive")
        if self.text_pool not in ("max", "mean"):
            raise ConfigError(f"text_pool is {self.text_pool!r}: known are 'max' and 'mean'")
        check_positives(self.positives)
        check_patch_dropout(self.patch_dropout)
        attention_arguments(self.attention_dropout)


@register_system("convirt")
class ConVIRT(ContrastiveEncoder):
    """Bidirectional InfoNCE of an image and one sentence of its report (section 2.2, equations 2 to 4)."""

    Config = ConVIRTConfig

    @classmethod
    def build(cls, config: ConVIRTConfig, *, pretrained: bool, tokenizer: Tokenizer | None) -> Self:
        """Raises ConfigError and WeightsError as `create_model` says."""
        image_encoder = create_image_encoder(config.image_encoder, pretrained=pretrained, image_size=config.image_size)
        text_encoder = create_text_encoder(
            config.text_encoder,
            pretrained=pretrained,
            vocab_size=config.vocab_size,
            pool=config.text_pool,
            **attention_arguments(config.attention_dropout),
        )
        freeze_layers(text_encoder, config.frozen_text_layers)
        return cls(
            config,
            image_encoder,
            text_encoder,
            projection_head(image_encoder.feature_dim, config.projection_dim, config.hidden_dim),
            projection_head(text_encoder.feature_dim, config.projection_dim, config.hidden_dim),
            transform=EvalTransform(size=config.image_size, fit=config.fit),
            tokenizer=tokenizer,
        )

    def encode_pairs(self, batch: Batch) -> Pairs:
        """See the base class."""
        texts = Embeddings(self.encode_text(batch.ids_BT, batch.mask_BT))  # first: packed texts wait for the device
        images = Embeddings(self.encode_image(batch.image_BCHW))
        return Pairs(images, texts, groups_of(batch, self.config.positives))

    def compare_pairs(self, pairs: Pairs) -> Losses:
        """See the base class."""
        image_NE, text_NE, groups = gather_global(pairs)
        config = self.config
        return Losses.sum(
            contrastive=losses.convirt(image_NE, text_NE, config.temperature, config.image_weight, groups=groups)
        )
