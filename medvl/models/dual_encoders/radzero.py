"""RadZero: statements compared with the patches of an image (Park et al., arXiv 2504.07416, NeurIPS 2025)."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from medvl.encoders import ImageEncoder, TextEncoder
from medvl.losses.gather import gather
from medvl.losses.local.statements import patch_cosine, statement_contrast
from medvl.models.dual_encoders.bases.local import local_features
from medvl.models.dual_encoders.bases.pairs import Pairs
from medvl.models.dual_encoders.bases.scale import LearnedScale, ScaleConfig
from medvl.models.dual_encoders.bases.text_maps import TextMaps
from medvl.models.dual_encoders.bases.token_layers import TokenLayers, TokenLayersConfig, token_layers
from medvl.models.dual_encoders.parts.statements import distinct_statements, embed_statements
from medvl.models.registry import register_system
from medvl.schema import Batch, Embeddings, Inputs, Losses


@dataclasses.dataclass(frozen=True, kw_only=True)
class RadZeroConfig(TokenLayersConfig, ScaleConfig):
    """Settings of the paper and the released code, with RAD-DINO, which the paper reports as its best start.

    The shared space has the image encoder's width; `projection_dim` has no meaning. A text encoder of another width
    gets a linear layer, which the published one of 768 does not need.
    """

    image_encoder: str = "rad_dino"
    text_encoder: str = "mpnet"
    image_size: int = 518
    max_scale: float | None = None
    equal_are_positives: bool = True
    """An image's statement is a positive of all images that have it. False, as published, makes "There is no pleural
    effusion." of one study a negative of another one, although canonical sentences repeat."""


@register_system("radzero")
class RadZero(TextMaps, TokenLayers, LearnedScale):
    """Each statement against the mean of an image's tokens that it attends to (VL-CABS, section 3.2).

    The loss is the mean of the contrast of a statement over images and of an image over statements, as in the released
    code; the paper has their sum. The released code takes exponentials without a log-sum-exp, so that hard pairs have
    no gradient and a scale above 88 overflows; here they do not.
    """

    Config = RadZeroConfig
    inputs = Inputs(statements=True)
    zero_shot_prompts = "statements"

    @classmethod
    def encoder_arguments(cls, config: RadZeroConfig) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """See the base class."""
        return {}, {"pool": "mean"}

    @classmethod
    def make_heads(
        cls, config: RadZeroConfig, image_encoder: ImageEncoder, text_encoder: TextEncoder
    ) -> dict[str, nn.Module]:
        """See the base class. Raises ConfigError for an image encoder whose vector is not as wide as its patches."""
        width, text_width = image_encoder.patch_dim, text_encoder.feature_dim
        return {
            "image_head": nn.Identity(),
            "text_head": nn.Identity() if text_width == width else nn.Linear(text_width, width),
            "layers": token_layers(image_encoder, config.trained_layers, config.layer_norm_eps),
            "norm": nn.LayerNorm(width),
        }

    def unnormalized_text(self, texts: Sequence[str] | Tensor, mask_BT: Tensor | None = None) -> Tensor:
        """See the base class. The norm is the one of the image's tokens."""
        normed_BE: Tensor = self.norm(super().unnormalized_text(texts, mask_BT))
        return normed_BE.float()

    def similarity(self, images: Embeddings | Tensor, texts: Embeddings | Sequence[str]) -> Tensor:
        """Return (N, M): the cosine of each text with its attended patches of each image."""
        image, text = self.embedded(images, texts)
        return patch_cosine(local_features(image)[0], text.global_NE, self.logit_scale.exp())

    def embed_pairs(self, batch: Batch) -> Pairs:
        """See the base class."""
        images = self.embed_features(self.image_features(batch))
        return Pairs(texts=embed_statements(batch, self.embed_ids), images=images)

    def compare_pairs(self, pairs: Pairs) -> Losses:
        """See the base class. A rank compares its own images with the statements of all ranks."""
        every, scale = pairs.gather(local=False), self.scale()
        texts_UE, positive_NU = distinct_statements(every.texts, len(every), merge=self.config.equal_are_positives)
        logits_NU = scale * gather(patch_cosine(local_features(pairs.images)[0], texts_UE, scale))
        to_image, to_statement = statement_contrast(logits_NU, positive_NU)
        return Losses.weighted(statement_to_image=(to_image, 0.5), image_to_statement=(to_statement, 0.5))

    def cell_maps(self, image_BCHW: Tensor, texts: Sequence[str]) -> Tensor:
        """See the base class: the scaled cosine of every patch, the log-odds of published masks.

        Published code takes the sigmoid behind the interpolation, and for masks alone (`medvl.eval.zero_shot_masks`
        with scale "sigmoid"): high log-odds have a sigmoid of 1, in which the maximum is lost.
        """
        patches_BPE, text_BE = self.embed_regions(image_BCHW), self.embed_texts(texts).global_NE
        return self.logit_scale.exp() * (patches_BPE @ text_BE[:, :, None]).squeeze(2)
