"""MUMC: ALBEF with contrast within each modality (Li et al., arXiv 2307.05314, MICCAI 2023)."""

import dataclasses
from typing import Unpack

from torch import nn

from medvl.common.config_io import check_within
from medvl.encoders import ImageEncoder, TextEncoder
from medvl.encoders.presets import CLIP_MEAN, CLIP_STD
from medvl.models.base import EncoderArguments, Parts, init_weights
from medvl.models.fusion_encoders.albef import ALBEF, ALBEFConfig
from medvl.models.fusion_encoders.bases.objectives import UnimodalContrast
from medvl.models.registry import register_system


@dataclasses.dataclass(frozen=True, kw_only=True)
class MUMCConfig(ALBEFConfig):
    """Settings of MUMC's released code."""

    image_encoder: str = "mae_vit_b16"
    image_arguments: EncoderArguments = dataclasses.field(
        default_factory=lambda: {"mean": CLIP_MEAN, "std": CLIP_STD}
    )
    unimodal_weight: float = 0.5
    """Weight of contrast within each modality, relative to that of images and texts."""
    mask_ratio: float = 0.15
    negative_floor: float = 1e-4
    ramp_steps: int = 24_000
    """Two epochs of about 390,000 figures (MedICaT, ImageCLEF 2022, ROCO) in batches of 32."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_within(self, "(0, inf)", "unimodal_weight")


@register_system("mumc")
class MUMC(ALBEF):
    """ALBEF's objectives, and contrast of images with images and of texts with texts.

    The teacher moves before it encodes a batch, as ALBEF's; the released MUMC moves it afterwards,
    one step later.

    The published contrastive loss is (i2t + t2i + (i2i + t2t) / 2) / 2: here `itc` is (i2t + t2i) /
    2, and `unimodal`, of weight 1/2, is (i2i + t2t) / 2. The target of a row of the latter is its
    own image or text as the teacher encodes it, against those of the batch and of the queue; the
    teacher's distribution is not used. Model and teacher each read an image without another 15 % of
    its patches.

    The matching head has two layers. Every row of the batch can be a hard negative, however
    dissimilar (`negative_floor`).

    Deviations besides those of ALBEF: images and texts of one study are positives of each other,
    within a modality too; the position embeddings, sines and cosines in MAE's weights, are trained;
    weights of ALBEF initialise both encoders, but not the fusion-encoder.
    """

    Config = MUMCConfig

    def __init__(
        self,
        config: MUMCConfig,
        image_encoder: ImageEncoder,
        text_encoder: TextEncoder,
        **parts: Unpack[Parts],
    ) -> None:
        super().__init__(config, image_encoder, text_encoder, **parts)
        width = 2 * self.pooled_dim
        self.itm_head = nn.Sequential(
            nn.Linear(self.pooled_dim, width), nn.LayerNorm(width), nn.GELU(), nn.Linear(width, 2)
        )
        init_weights(self.itm_head)
        self.unimodal = UnimodalContrast(config.unimodal_weight, self.itc_head.unimodal)
        self.objectives = (self.itc, self.unimodal, self.itm, self.mlm)
