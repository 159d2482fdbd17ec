"""PTUnifier: prompts in place of a missing image or text (Chen et al., arXiv 2302.08958, ICCV
2023).
"""

import dataclasses
from typing import Any, Unpack

import torch
from torch import Tensor

from medvl import losses
from medvl.common.config_io import check_within
from medvl.encoders import TextEncoder
from medvl.encoders.regions import RegionEncoder
from medvl.errors import ConfigError
from medvl.losses.common import gather
from medvl.models.base import Parts, complete_rows
from medvl.models.fusion_encoders.bases.objectives import (
    AlignedEncoded,
    Corruption,
    ImageTextContrast,
)
from medvl.models.fusion_encoders.parts.encoder import Fused, Tokens
from medvl.models.fusion_encoders.parts.heads import ContrastHead
from medvl.models.fusion_encoders.parts.inputs import (
    ImageSource,
    PromptPool,
    encode_between,
    fill,
    lacking,
    mean_of_tokens,
    mean_words,
    with_mean_patches,
)
from medvl.models.fusion_encoders.streams import DualStreamConfig, StreamModel
from medvl.models.registry import register_system
from medvl.schema import Batch

# K complete samples, M samples that lack one side; the other letters as in `medvl.schema`.

ITC_WEIGHT = 0.1
"""Weight of the contrast; medvl's own, because the released code never computes it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PTUnifierConfig(DualStreamConfig):
    """Published settings of PTUnifier; its text encoder is BiomedRoBERTa, RoBERTa with weights
    of its own.
    """

    max_tokens: int = 48
    itm_weight: float = 0.5
    temperature: float = 0.1
    prompts: int = 2048
    """Vectors in each of the two pools."""
    image_prompts: int = 49
    """Vectors in place of a missing image."""
    text_prompts: int = 32
    """Vectors in place of a missing text."""
    former = (("itc_weight", ITC_WEIGHT),)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_within(self, "(0, inf)", "temperature", "prompts")
        check_within(self, f"[1, {self.prompts}]", "image_prompts", "text_prompts")


@register_system("ptunifier")
class PTUnifier(StreamModel):
    """Masked words, matching, and contrast of images alone with texts alone, which prompts complete
    to pairs.

    A sample without an image gets those 49 vectors of a pool that are most similar to the mean of
    its embedded words, behind the real class token, as patches of the image encoder; one without a
    text likewise, between the real first and closing token (section 3.2). So do both halves of a
    pair for the contrastive loss, and rows of downstream batches that lack one side. An image alone
    has no objective, as published.

    The released code takes no gradient through the selected prompts, and never computes its
    contrastive loss; here both are trained. The pools learn at the fusion-encoder's rate. Every
    input is encoded once for all objectives; negatives of ITM are other images of the batch, those
    of contrast also images with an equal text. Not in the paper: with a CNN, prompts enter at the
    fusion-encoder, behind their mean, and the query is the mean of the cells there; a query that is
    not as wide as its pool is mapped by a fixed random matrix. Layer norms of the fusion layers
    have the epsilon of M3AE's, 1e-12, not RoBERTa's 1e-5.
    """

    Config = PTUnifierConfig

    def __init__(
        self,
        config: PTUnifierConfig,
        image_encoder: ImageSource,
        text_encoder: TextEncoder,
        **parts: Unpack[Parts],
    ) -> None:
        super().__init__(config, image_encoder, text_encoder, **parts)
        self.has_patch_tokens = (
            not isinstance(image_encoder, RegionEncoder) and image_encoder.can_drop_patches
        )
        if self.has_patch_tokens and config.image_positions:
            message = (
                "patches of a vision Transformer have positions already; leave image_positions off"
            )
            raise ConfigError(message, "conflict", field="image_positions")
        image_width = image_encoder.patch_dim if self.has_patch_tokens else config.width
        self.image_prompts = PromptPool(
            config.prompts, image_width, config.image_prompts, text_encoder.token_dim
        )
        self.text_prompts = PromptPool(
            config.prompts, text_encoder.token_dim, config.text_prompts, image_width
        )
        self.itc_head = ContrastHead(self.pooled_dim, config.width)
        self.objectives = (*self.objectives, ImageTextContrast(ITC_WEIGHT, self.contrast))

    def encode(self, batch: Batch, corruption: Corruption) -> AlignedEncoded:
        """Complete masked texts without an image with prompts, from which they are predicted."""
        words = corruption.of(self.mlm)
        row_K = complete_rows(batch)
        image, image_query_BD = self.images_with_queries(batch)
        masked_query_BD = mean_words(self.text_encoder, words.ids_BT, batch.mask_BT)
        prompts = fill(
            image,
            lacking(batch.has_image_B, batch.has_text_B),
            self.prompted_images,
            masked_query_BD,
        )
        encoded = self.encode_apart(batch, corruption, image, prompts)
        alone = (encoded.pooled_MD[:0],) * 2  # with a gradient: other ranks may have pairs
        if len(row_K):
            query_KD = mean_words(self.text_encoder, batch.ids_BT, batch.mask_BT)[row_K]
            alone = (
                self.fuse(self.prompted_texts(image_query_BD[row_K]), image.rows(row_K)).pooled_BD,
                self.fuse(encoded.text.rows(row_K), self.prompted_images(query_KD)).pooled_BD,
            )
        image_KE, text_KE = self.itc_head(*alone)
        shared = {field.name: getattr(encoded, field.name) for field in dataclasses.fields(encoded)}
        return AlignedEncoded(**shared, image_KE=image_KE, text_KE=text_KE)

    def contrast(self, encoded: AlignedEncoded) -> Tensor:
        """Contrast the complete samples of all ranks with each other."""
        image_GE = gather(encoded.image_KE)
        text_GE = gather(encoded.text_KE)
        return (
            losses.clip(image_GE, text_GE, 1 / self.config.temperature)
            if len(image_GE)
            else image_GE.sum()
        )

    def features(self, batch: Batch) -> Fused:
        """Replace a missing image or text by prompts."""
        image, image_query_BD = self.images_with_queries(batch)
        image = self.with_earlier_images(image, batch)
        has_image_B = batch.has_image_B
        has_text_B = batch.has_text_B
        if batch.image_of_B is not None:
            image = image.rows(batch.image_of_B)
            image_query_BD = image_query_BD[batch.image_of_B]
            has_image_B = None if has_image_B is None else has_image_B[batch.image_of_B]
        text = self.text_tokens(batch.ids_BT, batch.mask_BT, has_text_B)
        text_query_BD = mean_words(self.text_encoder, batch.ids_BT, batch.mask_BT)
        return self.fuse(
            fill(text, lacking(has_text_B, has_image_B), self.prompted_texts, image_query_BD),
            fill(image, lacking(has_image_B, has_text_B), self.prompted_images, text_query_BD),
        )

    def images_with_queries(self, batch: Batch) -> tuple[Tokens, Tensor]:
        """Encode the images; return also the mean of their embedded patches (B, D), zeros where
        there is none.
        """
        pixels = self.image_input_of(batch)
        if self.has_patch_tokens:
            encoder: Any = self.image_encoder
            return with_mean_patches(
                encoder, batch.has_image_B, lambda: self.image_tokens(pixels, batch.has_image_B)
            )
        image = self.image_tokens(pixels, batch.has_image_B)
        return image, mean_of_tokens(image.states_BND[:, 1:], image.real_BN()[:, 1:])

    def prompted_images(self, text_query_MD: Tensor) -> Tokens:
        """Encode the prompts in place of the images of texts."""
        prompts_MKD = self.image_prompts(text_query_MD)
        if not self.has_patch_tokens:
            return Tokens(
                torch.cat([prompts_MKD.mean(dim=1, keepdim=True), prompts_MKD], dim=1), None
            )
        encoder: Any = self.image_encoder
        return self.image_input(encoder.encode_patches(prompts_MKD))

    def prompted_texts(self, image_query_MD: Tensor) -> Tokens:
        """Encode the prompts in place of the texts of images. Raises ConfigError without a
        tokenizer.
        """
        tokenizer = self.require_tokenizer("an image without a text")
        prompts_MKD = self.text_prompts(image_query_MD)
        ends = (tokenizer.cls_id, tokenizer.sep_id)
        return Tokens(self.text_input(encode_between(self.text_encoder, prompts_MKD, *ends)), None)
