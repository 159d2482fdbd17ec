"""PixelBERT: a BERT over words and the cells of a CNN that is trained with it (Huang et al.,
arXiv 2004.00849).
"""

import dataclasses

from torch import Tensor

from medvl.common.config_io import check_within
from medvl.models.fusion_encoders.bases.base import FusionConfig
from medvl.models.fusion_encoders.bases.bert_stream import JointStream
from medvl.models.fusion_encoders.parts.inputs import sample_tokens
from medvl.models.registry import register_system
from medvl.schema import ImageFeatures


@dataclasses.dataclass(frozen=True, kw_only=True)
class PixelBERTConfig(FusionConfig):
    """Published settings of PixelBERT, except for the image's size and the length of texts."""

    image_encoder: str = "resnet50"
    text_encoder: str = "bert"
    image_size: int = 448
    whole_words: bool = False
    fusion_lr_mult: float = 1.0
    head_lr_mult: float = 1.0
    image_tokens: int | None = 100
    """Cells ("pixels") that are sampled for each image in training (section 3.3); all are used if
    there are no more, and in eval mode.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        check_within(self, "(0, inf)", "image_tokens")


@register_system("pixelbert")
class PixelBERT(JointStream):
    """Masked words with their own image, and matching of whole texts with images.

    Cells have a projection and BERT's second token type, no position. The paper max-pools the grid
    of images with a shorter side of 800 pixels to a 64th of their size; here the grid is a 32nd of
    smaller, square images. A text has at most 64 tokens, as in M3AE: a length that is not taken
    from the paper.
    """

    Config = PixelBERTConfig

    def embed_image(self, features: ImageFeatures) -> Tensor:
        """Sample `config.image_tokens` cells of each image in training."""
        assert features.patches_BPD is not None
        cells_BPD = sample_tokens(
            features.patches_BPD, self.config.image_tokens if self.training else None
        )
        return super().embed_image(dataclasses.replace(features, patches_BPD=cells_BPD))
