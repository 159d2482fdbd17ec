"""MRM: masked records, pixels from a few patches and words from both (Zhou et al., ICLR 2023, arXiv 2301.13155)."""

import dataclasses
import math
from typing import Literal, Self, Unpack

import torch

from medvl.common.checks import check_within
from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.data.transforms.image import EvalTransform
from medvl.data.transforms.resizing import Kernel
from medvl.encoders import ImageEncoder, TextEncoder
from medvl.errors import ConfigError
from medvl.models.base import EncoderArguments, Parts, complete_rows
from medvl.models.dual_encoders.bases.build import create_encoders
from medvl.models.fusion_encoders.bases.masked_pixels import MaskedPixels, MaskedPixelsConfig
from medvl.models.fusion_encoders.bases.record_words import RecordWordModel
from medvl.models.fusion_encoders.parts.record_contrast import RecordContrastConfig, WeightedContrast
from medvl.models.fusion_encoders.parts.record_words import RecordWordsConfig
from medvl.models.registry import register_system
from medvl.schema import Batch, Losses

_BERT = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 6, "intermediate_size": 1536}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MRMConfig(MaskedPixelsConfig, RecordWordsConfig, RecordContrastConfig):
    """Settings of the paper and the released code; options are ECAMP's (arXiv 2312.13316) and MaCo's (2309.05904).

    ECAMP: `entities_first`, `negation_weight` 0.05, `text_fusion` "attention". MaCo: `mask_ratio` 0.5, `mlm_weight` 0
    and `contrast_weight` 1. Not built: ECAMP's super-resolution head and its summaries by a language model.
    """

    image_encoder: str = "mae_vit_b16"
    text_encoder: str = "bert"
    text_arguments: EncoderArguments = dataclasses.field(default_factory=lambda: dict(_BERT))
    fit: Literal["crop", "pad", "squash"] = "crop"
    """How an image is made square for inference (`medvl.data.transforms.image.EvalTransform`)."""
    resize: Kernel = "area"
    """Kernel of the resize for inference; imported models have that of their released code."""
    pixel_mean: float = 0.4978
    pixel_std: float = 0.2449
    max_tokens: int = 100
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_words()
        self.check_contrast()
        check_within(self, "[1, inf)", "max_tokens")
        if not self.mlm_weight and not self.contrast_weight:
            raise ConfigError("mlm_weight or contrast_weight must be above 0", "conflict", field="mlm_weight")


@register_system("mrm")
class MRM(MaskedPixels, RecordWordModel):
    """Pixels of removed patches, at twice the encoder's resolution, and masked words of the report.

    The loss of words is over masked words alone: the released code counts padding and visible words as well, 36 to 42 %
    and about 30 % of its terms. New weights start as BERT's or torch's, where the released code draws those of all
    linear layers as MAE (Xavier, uniform). The image encoder's positions, which stay sines and cosines in MAE and MRM,
    are trained. Samples without a report have pixels only. Encoders start other systems with `init_from` or
    `load_towers`.
    """

    Config = MRMConfig

    def __init__(
        self, config: MRMConfig, image_encoder: ImageEncoder, text_encoder: TextEncoder, **parts: Unpack[Parts]
    ) -> None:
        super().__init__(config, image_encoder, text_encoder, **parts)
        self.contrast: WeightedContrast | None = None
        if config.contrast_weight:
            cells = math.prod(self.mim_head.patches.grid)
            self.contrast = WeightedContrast(image_encoder.patch_dim, text_encoder.feature_dim, cells, config)

    @classmethod
    def build(cls, config: MRMConfig, *, pretrained: bool, tokenizer: Tokenizer | None) -> Self:
        """See the base class. `pretrained` loads weights of the image encoder only."""
        statistics = {"mean": config.pixel_mean, "std": config.pixel_std}
        encoders = create_encoders(
            config,
            {"pretrained": pretrained, "image_size": config.image_size, **statistics},
            {"pretrained": False, "vocab_size": config.vocab_size},
        )
        transform = EvalTransform(size=config.image_size, fit=config.fit, resize=config.resize)
        return cls(config, *encoders, transform=transform, tokenizer=tokenizer)

    def forward(self, batch: Batch) -> Losses:
        """Return the losses "mim", "mlm" and "contrast" (those with a weight).

        Raises ConfigError for images of another size than `image_size * target_scale`.
        """
        pixels_BCHW, patches = self.mask_images(batch)
        features = self.encode_visible(pixels_BCHW, patches)
        visible_BKD = features.patches_BPD
        assert visible_BKD is not None, "a vision Transformer has patches"
        states_BND = torch.cat([features.pooled_BD[:, None], visible_BKD], dim=1)
        terms = {"mim": (self.pixel_loss(pixels_BCHW, states_BND, patches, batch), self.config.mim_weight)}
        if self.config.mlm_weight:
            terms["mlm"] = self.word_loss(visible_BKD, batch), self.config.mlm_weight
        if self.contrast is not None:
            text = self.text_encoder(batch.ids_BT, batch.mask_BT)
            row_K = complete_rows(batch)
            contrast = self.contrast(visible_BKD, text.pooled_BD, ~patches.masked_BP, row_K)
            terms["contrast"] = contrast, self.config.contrast_weight
        return Losses.weighted(**terms)
