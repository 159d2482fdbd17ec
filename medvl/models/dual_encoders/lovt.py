"""LoVT: reports and images, and their sentences and regions (Mueller et al., arXiv 2112.02889,
ECCV 2022).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medvl import losses
from medvl.common.config_io import check_within
from medvl.encoders import ImageEncoder, TextEncoder
from medvl.losses.common import gather
from medvl.models.dual_encoders.bases.local import (
    LocalDualConfig,
    LocalDualEncoder,
    local_features,
    most_slots,
    pool_sentences,
    whole_if_none,
)
from medvl.models.dual_encoders.bases.pairs import Pairs
from medvl.models.dual_encoders.parts.layers import (
    AttentionPool,
    BatchNormHead,
    CrossAttention,
    attention_weights,
)
from medvl.models.registry import register_system
from medvl.schema import Embeddings, ImageFeatures, Inputs, Losses


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoVTConfig(LocalDualConfig):
    """Settings of the authors' configuration LoVT_100. Images are normalised as the encoder's
    weights expect, where the released code takes mean and deviation of its data set.
    """

    fit: Literal["crop", "pad", "squash"] = "pad"
    hidden_dim: int = 2048
    """Hidden width of the four projection heads."""
    pool_heads: int = 8
    """Heads of the attention over regions and over sentences; both widths are multiples of it."""
    temperature: float = 0.1
    image_weight: float = 0.75
    """Lambda of the global loss: weight of the image-to-text direction."""
    local_weight: float = 0.375
    """Weight of the local losses of regions and of sentences."""
    local_temperature: float | None = 0.3
    """Temperature of local InfoNCE, the sum of both directions; None takes squared distances,
    without negatives.
    """
    uniformity_weight: float = 0.0
    """Weight of the uniformity of regions and of sentences within their sample."""
    frozen_text_layers: int = 6
    max_tokens: int = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        check_within(
            self, "(0, inf)", "hidden_dim", "pool_heads", "temperature", "local_temperature"
        )
        check_within(self, "[0, inf)", "local_weight", "uniformity_weight")
        check_within(self, "[0, 1]", "image_weight")


@register_system("lovt")
class LoVT(LocalDualEncoder):
    """Local contrast of each region or sentence with its attended vector of the other side
    (sections 3.2 to 3.5).

    A sentence takes the place of a word: the maximum over its tokens, without the first and the
    last token of the text. Images and reports are pooled from their regions and sentences, whose
    weights are `Embeddings.weight_NP`, without gradient. Token ids without the numbers of their
    sentences, and texts without a sentence, are one sentence: a prompt needs no full stop.
    `text_pool` and `text_token` of the configuration have no meaning.

    Attributes:
        region_pool, sentence_pool: map (B, N, D) and its mask to (B, D) and weights (B, N).
        word_head: maps sentences to the shared space.
    """

    Config = LoVTConfig
    inputs = Inputs(sentences=True)
    near_PP: Tensor  # shares of all regions among the positives of each

    def __init__(
        self,
        config: Any,
        *args: Any,
        region_pool: nn.Module,
        sentence_pool: nn.Module,
        cross_attention: CrossAttention,
        **kwargs: Any,
    ) -> None:
        super().__init__(config, *args, **kwargs)
        self.region_pool = region_pool
        self.sentence_pool = sentence_pool
        self.cross_attention = cross_attention
        grid = self.image_encoder.grid(config.image_size, config.image_size)
        self.register_buffer("near_PP", losses.grid_positives(*grid), persistent=False)

    @classmethod
    def make_heads(
        cls, config: Any, image_encoder: ImageEncoder, text_encoder: TextEncoder
    ) -> dict[str, nn.Module]:
        image = image_encoder.patch_dim
        text = text_encoder.token_dim
        sizes = (config.projection_dim, config.hidden_dim)
        heads = {"image_head": image, "region_head": image, "text_head": text, "word_head": text}
        return {
            **{
                name: BatchNormHead(width, *sizes, fan_out_init=True)
                for name, width in heads.items()
            },
            "region_pool": AttentionPool(image, config.pool_heads),
            "sentence_pool": AttentionPool(text, config.pool_heads),
            "cross_attention": CrossAttention(config.projection_dim),
        }

    def pool_regions(self, features: ImageFeatures) -> tuple[Tensor, Tensor | None]:
        pooled_BD, weight_BP = self.region_pool(features.patches_BPD)
        return pooled_BD, weight_BP.detach()

    def unnormalized_text(
        self, texts: Sequence[str] | Tensor, mask_BT: Tensor | None = None
    ) -> Tensor:
        if isinstance(texts, Tensor):
            tokens: tuple[Tensor, ...] = self.tokenize(texts, mask_BT)
        else:
            tokens = self.tokenize_inputs(texts)
        return self._pooled_texts(*tokens)[0]

    def embed_ids(
        self, ids_BT: Tensor, mask_BT: Tensor, sentence_BT: Tensor | None = None
    ) -> Embeddings:
        report_BE, sentences_BSD, mask_BS, weight_BS = self._pooled_texts(
            ids_BT, mask_BT, sentence_BT
        )
        local_BSE = self._project(self.word_head, sentences_BSD, mask_BS)
        return Embeddings(F.normalize(report_BE, dim=-1), local_BSE, mask_BS, weight_BS.detach())

    def embed_slots(self, ids_BT: Tensor, mask_BT: Tensor, slot_BT: Tensor) -> Embeddings:
        """Embed sentences; `slot_BT` has the number of each token's."""
        return self.embed_ids(ids_BT, mask_BT, slot_BT)

    def _pooled_texts(
        self, ids_BT: Tensor, mask_BT: Tensor, sentence_BT: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return (B, E) float32, not normalised, and sentences_BSD, mask_BS and weight_BS."""
        sentence_BT = torch.full_like(ids_BT, -1) if sentence_BT is None else sentence_BT
        sentence_BT = whole_if_none(sentence_BT, mask_BT)
        width = most_slots(sentence_BT)  # before the encoder, because it waits for the device
        sentences_BSD, mask_BS = pool_sentences(
            self.text_encoder(ids_BT, mask_BT).tokens_BTD, sentence_BT, width
        )
        report_BD, weight_BS = self.sentence_pool(sentences_BSD, mask_BS)
        return self.text_head(report_BD).float(), sentences_BSD, mask_BS, weight_BS

    def without_first_token(self, texts: Embeddings) -> Embeddings:
        """Return the texts as they are: sentences do not include the text's first token."""
        return texts

    def weigh_words(self, match_BW: Tensor, mask_BW: Tensor) -> Tensor:
        """Return equal shares of all sentences."""
        return mask_BW / mask_BW.sum(dim=1, keepdim=True).clamp(min=1)

    def compare_pairs(self, pairs: Pairs) -> Losses:
        """Keep regions and sentences on their rank: they are not compared with other samples."""
        config = self.config
        images = pairs.images
        texts = pairs.texts
        (regions_BPE, _), (sentences_BSE, mask_BS) = local_features(images), local_features(texts)
        for_sentences_BSE, for_regions_BPE = self.cross_attention(
            sentences_BSE, regions_BPE, mask_BS
        )
        image_NE = gather(images.global_NE)
        text_NE = gather(texts.global_NE)
        terms = {
            "global": (
                losses.convirt(image_NE, text_NE, config.temperature, config.image_weight),
                1.0,
            ),
            "regions": (
                self.compare_items(images, for_regions_BPE, self.near_PP),
                config.local_weight,
            ),
            "sentences": (self.compare_items(texts, for_sentences_BSE), config.local_weight),
        }
        if config.uniformity_weight:
            spread = losses.local_uniformity(regions_BPE) + losses.local_uniformity(
                sentences_BSE, mask_BS
            )
            terms["uniformity"] = spread, config.uniformity_weight
        return Losses.weighted(**terms)

    def compare_items(
        self, side: Embeddings, attended_BNE: Tensor, positives_NN: Tensor | None = None
    ) -> Tensor:
        """Return the local loss of the regions or sentences of one side and their attended
        vectors.
        """
        items_BNE, mask_BN = local_features(side)
        if self.config.local_temperature is None:
            return losses.local_alignment(items_BNE, attended_BNE, mask_BN, side.weight_NP)
        nce = losses.within_sample_nce
        rest = (mask_BN, side.weight_NP, positives_NN, self.config.local_temperature)
        return nce(items_BNE, attended_BNE, *rest) + nce(attended_BNE, items_BNE, *rest)

    def attend(self, regions_BPE: Tensor, words_BWE: Tensor, mask_BW: Tensor) -> Tensor:
        """Attend with sentences as words."""
        key = self.cross_attention.key
        scale = self.cross_attention.scale
        return (
            attention_weights(key(words_BWE), key(regions_BPE), scale=scale) * mask_BW[:, :, None]
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalAnalysisConfig(LoVTConfig):
    """Settings with weights of LoVT's InfoNCE, 2 x .375 / (2 x .3) and 2 x .375: those of the paper
    (Mueller, Kaissis and Rueckert 2022) were not available.
    """

    local_temperature: float | None = None
    local_weight: float = 1.25
    uniformity_weight: float = 0.75


@register_system("local_analysis")
class LocalAnalysis(LoVT):
    """LoVT with local uniformity and no local negatives, after arXiv 2211.07254, whose equations
    are not confirmed.
    """

    Config = LocalAnalysisConfig
