"""BioViL: radiographs and reports with CXR-BERT, text contrast and masked words (Boecking et al., ECCV 2022)."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from medvl import losses
from medvl.common.checks import check_within
from medvl.data.transforms.image import EvalTransform
from medvl.encoders import ImageEncoder, TextEncoder
from medvl.encoders.text.factory import text_has_projection
from medvl.encoders.text.projections import CxrBertHead
from medvl.models.dual_encoders.bases.local import local_contrast
from medvl.models.dual_encoders.bases.pairs import Pairs, gather_side
from medvl.models.dual_encoders.bases.text_tasks import TextTaskConfig, TextTaskEncoder
from medvl.models.dual_encoders.parts.heads import BatchNormHead, in_full_precision
from medvl.models.registry import register_system
from medvl.schema import Batch, Embeddings, Losses


@dataclasses.dataclass(frozen=True, kw_only=True)
class BioViLConfig(TextTaskConfig):
    """Settings of the paper. BioViL-L is `BioViLConfig(local_weight=1.0)`.

    Encoders, heads and sizes match the released model. The training code was not released: temperatures, weights
    of the losses, masking and `max_tokens` are not confirmed. The released loader stretches the pixels of each image to
    0..255 first; here they are taken as they are stored.
    """

    text_encoder: str = "cxrbert"
    image_size: int = 480
    margin: int = 16
    """Pixels cut off on every side after the image was made square, from 512."""
    projection_dim: int = 128
    """E; a text encoder with a projection of its own, such as CXR-BERT's 128, sets it."""
    max_tokens: int = 256
    global_weight: float = 1.0
    local_weight: float = 0.0
    """Weight of GLoRIA's local loss, with tokens for words: above 0 in BioViL-L."""
    temp1: float = 4.0
    temp2: float = 5.0
    temp3: float = 10.0
    """Temperatures of the local loss, as in `GLoRIAConfig`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_within(self, "(0, inf)", "temp1", "temp2", "temp3", "global_weight")
        check_within(self, "[0, inf)", "local_weight")


@register_system("biovil")
class BioViL(TextTaskEncoder):
    """Symmetric InfoNCE of image and text and of two texts, and masked words (section 3).

    An image is the mean of its projected regions, which are in the space of texts (`embed_regions`).
    """

    Config = BioViLConfig

    @classmethod
    def encoder_arguments(cls, config: Any) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """See the base class. Pixels stay in 0..1."""
        return {"mean": 0.0, "std": 1.0}, {"pool": "cls", "projection": text_has_projection(config.text_encoder)}

    @classmethod
    def make_heads(cls, config: Any, image_encoder: ImageEncoder, text_encoder: TextEncoder) -> dict[str, Any]:
        """See the base class. A text encoder without a projection gets one as CXR-BERT's."""
        own = text_encoder.projection is not None
        size = text_encoder.feature_dim if own else config.projection_dim
        return {
            "image_head": BatchNormHead(image_encoder.patch_dim, size, size, inner_bias=False),
            "text_head": nn.Identity() if own else CxrBertHead(text_encoder.token_dim, size),
            "word_head": cls.make_word_head(config, text_encoder),
        }

    @classmethod
    def make_transform(cls, config: Any) -> EvalTransform:
        """See the base class."""
        transform: EvalTransform = config.transform(margin=config.margin)
        return transform

    def unnormalized_image(self, image_BCHW: Tensor) -> Tensor:
        """See the base class."""
        return self.embed_regions(image_BCHW).mean(dim=1)

    def embed_regions(self, image_BCHW: Tensor) -> Tensor:
        """Return (B, P, E) float32: the projected cells of the image encoder's last grid in row-major order."""
        return in_full_precision(self.image_head, self.image_encoder(image_BCHW).patches_BPD)

    def batch_regions(self, batch: Batch) -> Tensor:
        """Return the regions of a training batch."""
        return self.embed_regions(batch.image_BCHW)

    def embed_pairs(self, batch: Batch) -> Pairs:
        """See the base class."""
        features = self.text_encoder(batch.ids_BT, batch.mask_BT)
        regions_BPE = self.batch_regions(batch)
        images = Embeddings(F.normalize(regions_BPE.mean(dim=1), dim=-1))
        texts = Embeddings(F.normalize(self.text_head(features.pooled_BD).float(), dim=-1))
        if self.config.local_weight:
            head = self.text_head if self.text_encoder.projection is None else self.text_encoder.projection
            tokens_BTE = in_full_precision(head, features.tokens_BTD)
            inner_BT = F.pad(batch.mask_BT[:, 2:], (1, 1))  # without the first and the last token
            images = Embeddings(images.global_NE, regions_BPE)
            texts = Embeddings(texts.global_NE, tokens_BTE, inner_BT)
        return Pairs(images=images, texts=texts, others=self.text_sides(batch))

    def compare_pairs(self, pairs: Pairs) -> Losses:
        """See the base class."""
        every, config = pairs.gather(local=False), self.config
        whole = losses.convirt(every.images.global_NE, every.texts.global_NE, config.temperature, 0.5)
        terms = {"global": (whole, config.global_weight)}
        if config.local_weight:
            local = local_contrast(pairs.images, gather_side(pairs.texts), config.temp1, config.temp2, config.temp3)
            terms["local"] = local, config.local_weight
        return Losses.weighted(**terms, **self.text_terms(every))
