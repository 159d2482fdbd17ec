"""ConVIRT: contrastive learning of a report sentence and its image (Zhang et al., arXiv 2010.00747, MLHC 2022)."""

import dataclasses
from typing import Literal, Self

from medvl import losses
from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.data.transforms.image import EvalTransform
from medvl.encoders import freeze_layers
from medvl.models.config_checks import check_within
from medvl.models.dual_encoders.base import (
    ContrastiveEncoder,
    DualEncoderConfig,
    Positives,
    attention_arguments,
    projection_head,
)
from medvl.models.dual_encoders.build import create_encoders
from medvl.models.dual_encoders.pairs import Pairs, gather_global
from medvl.models.registry import register_system
from medvl.schema import Losses


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConVIRTConfig(DualEncoderConfig):
    """Settings of the paper.

    Its training code was not released: max pooling over tokens, the 512 dimensions and the width of the heads are as
    in LoVT's re-implementation.
    """

    hidden_dim: int | None = None
    """Hidden width of both heads; None takes that of their input."""
    text_pool: Literal["max", "mean"] = "max"
    """Pooling of tokens; the mean is an unofficial re-implementation's."""
    frozen_text_layers: int = 6
    """Layers of the text encoder that are frozen, with the embeddings, from the bottom; 0 trains everything."""
    attention_dropout: float | None = None
    """Dropout of the text encoder's attention in training; None is its default, 0.1 in BERT. At 0, packed text uses the
    GPU's kernel for sequences of unequal length."""
    patch_dropout: float = 0.0
    """Share of each image's patches that training drops at random: twice the speed at one half (FLIP, Li et al., arXiv
    2212.00794). Vision Transformers only; a last epoch without it closes the gap to inference."""
    temperature: float = 0.1
    image_weight: float = 0.75
    """Lambda: weight of the image-to-text direction."""
    positives: Positives = "own"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_within(self, "(0, inf)", "temperature", "hidden_dim")
        check_within(self, "[0, inf)", "frozen_text_layers")
        check_within(self, "[0, 1]", "image_weight")
        check_within(self, "[0, 1)", "patch_dropout")
        attention_arguments(self)


@register_system("convirt")
class ConVIRT(ContrastiveEncoder):
    """Bidirectional InfoNCE of an image and one sentence of its report (section 2.2, equations 2 to 4)."""

    Config = ConVIRTConfig

    @classmethod
    def build(cls, config: ConVIRTConfig, *, pretrained: bool, tokenizer: Tokenizer | None) -> Self:
        """See the base class."""
        image = {"pretrained": pretrained, "image_size": config.image_size}
        text = {"pretrained": pretrained, "vocab_size": config.vocab_size, "pool": config.text_pool}
        image_encoder, text_encoder = create_encoders(config, image, text | attention_arguments(config))
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

    def compare_pairs(self, pairs: Pairs) -> Losses:
        """See the base class."""
        image_NE, text_NE, groups = gather_global(pairs)
        temperature, weight = self.config.temperature, self.config.image_weight
        return Losses.sum(contrastive=losses.convirt(image_NE, text_NE, temperature, weight, groups=groups))
