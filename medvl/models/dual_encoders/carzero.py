"""CARZero: similarity of an image and a statement by cross-attention (Lai et al., CVPR 2024,
arXiv 2402.17417).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medvl.encoders import ImageEncoder, TextEncoder
from medvl.losses.common import gather
from medvl.losses.local.within_sample import statement_contrast
from medvl.losses.pairs.blockwise import same_pairs
from medvl.models.dual_encoders.bases.base import Positives
from medvl.models.dual_encoders.bases.local import (
    LocalDualConfig,
    LocalDualEncoder,
    local_features,
    pair_scores,
    score_head,
    unnormalized,
    with_global,
)
from medvl.models.dual_encoders.bases.pairs import Pairs
from medvl.models.dual_encoders.bases.queries import QueryDecoder, QueryDecoderConfig
from medvl.models.registry import register_system
from medvl.schema import Embeddings, Losses


@dataclasses.dataclass(frozen=True, kw_only=True)
class CARZeroConfig(QueryDecoderConfig, LocalDualConfig):
    """Settings of the paper and the released code.

    The published text encoder is BioBERT, trained further on reports, and the image encoder is a
    ViT-B/16 of a masked record model (`image_weights`). The released code, like imported models,
    removes case and punctuation of texts, and attends to [SEP] and padding (`padded_memory`), which
    moves scores by a tenth to a third of their spread.
    """

    image_encoder: str = "vit_b16"
    text_encoder: str = "biobert"
    fit: Any = "pad"
    margin: int = 16
    pixel_mean: float | None = 0.4978
    pixel_std: float | None = 0.2449
    projection_dim: int = 768
    text_layers: int = 4
    max_tokens: int = 97
    head_dims: tuple[int, ...] = (1024, 512, 256)
    """Hidden widths of the head that makes a score of a query; none: one linear layer, the
    paper's variant.
    """
    padded_memory: bool = False
    """Let images read [SEP] and the padding of texts up to `max_tokens`, as the released code does:
    set for imported models, whose scores depend on it.
    """
    positives: Positives = "text"
    """"own", as published, makes "There is no pleural effusion." of one study a negative of
    another one.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_decoder()


@register_system("carzero")
class CARZero(LocalDualEncoder):
    """A decoder reads the regions of an image for a statement, and the words of a statement for an
    image (section 3).

    Both directions have a score, without a temperature; each is compared over images and over
    statements, and the loss is the sum over directions of the mean of both. A row with equal
    statements counts as the mean over its positives.
    """

    Config = CARZeroConfig
    zero_shot_prompts = "statements"

    def __init__(
        self, config: Any, *args: Any, decoder: QueryDecoder, score: nn.Module, **kwargs: Any
    ) -> None:
        super().__init__(config, *args, **kwargs)
        self.decoder = decoder
        self.score = score

    @classmethod
    def make_heads(
        cls, config: LocalDualConfig, image_encoder: ImageEncoder, text_encoder: TextEncoder
    ) -> dict[str, nn.Module]:
        """Make no heads for encoders as wide as the shared space, as published."""
        assert isinstance(config, CARZeroConfig)
        heads = super().make_heads(config, image_encoder, text_encoder)
        for name, width in (
            ("image_head", image_encoder.feature_dim),
            ("region_head", image_encoder.patch_dim),
        ):
            heads[name] = nn.Identity() if width == config.projection_dim else heads[name]
        decoder = QueryDecoder(
            config.projection_dim, config, self_attention=False, shared_norm=True
        )
        config.init_modules(
            score := score_head(config.projection_dim, config.head_dims, config.dropout)
        )
        return {**heads, "decoder": decoder, "score": score}

    def embed_ids(self, ids_BT: Tensor, mask_BT: Tensor) -> Embeddings:
        if not self.config.padded_memory:
            return super().embed_ids(ids_BT, mask_BT)
        texts = self.embed_slots(ids_BT, mask_BT, self.word_slots(ids_BT, mask_BT, last_token=True))
        words_NWE, _ = local_features(texts)
        padded_NWE = F.pad(words_NWE, (0, 0, 0, self.config.max_tokens - words_NWE.shape[1]))
        return Embeddings(
            texts.global_NE, padded_NWE, torch.ones_like(padded_NWE[..., 0], dtype=torch.bool)
        )

    def score_pairs(self, memory: Embeddings, query_ME: Tensor, chunk: int | None = None) -> Tensor:
        """Return (N, M) float32: the score of each query with the vector and the local features of
        each row.

        `chunk` is the number of queries at a time, by default as many as fit in 512 MiB; exact.
        """
        memory_NKE, mask_NK = with_global(memory.global_NE, *local_features(memory))
        width = max(query_ME.shape[1], self.config.decoder_hidden)
        return pair_scores(
            lambda *inputs: self.score(self.decoder(*inputs)),
            memory_NKE,
            mask_NK,
            query_ME,
            width=width,
            chunk=chunk,
        )

    def similarity(self, images: Embeddings | Tensor, texts: Embeddings | Sequence[str]) -> Tensor:
        """Return (N, M): the mean of both directions' scores; no cosine."""
        image, text = self.embedded(images, texts)
        return (
            self.score_pairs(image, text.global_NE) + self.score_pairs(text, image.global_NE).T
        ) / 2

    def compare_pairs(self, pairs: Pairs) -> Losses:
        """Keep the regions and words of a rank's own pairs, and gather scores."""
        every = pairs.gather(local=False)
        positive_NN = same_pairs(
            torch.arange(len(every), device=every.images.global_NE.device), *every.groups
        )
        terms = {}
        for name, side, other in (
            ("image", pairs.images, every.texts),
            ("text", pairs.texts, every.images),
        ):
            scores_NN = gather(self.score_pairs(side, other.global_NE))
            terms[f"{name}_memory"] = torch.stack(
                statement_contrast(scores_NN, positive_NN, equal_rows=True)
            ).mean()
        return Losses.sum(**terms)

    def attend(self, regions_BPE: Tensor, words_BWE: Tensor, mask_BW: Tensor) -> Tensor:
        """Return the decoder's attention with words as queries, averaged over heads
        and layers.
        """
        _, attention_BWP = self.decoder.with_attention(words_BWE, regions_BPE)
        return attention_BWP.float().masked_fill(~mask_BW[:, :, None], 0.0)

    def weigh_words(self, match_BW: Tensor, mask_BW: Tensor) -> Tensor:
        """Return equal shares."""
        return mask_BW / mask_BW.sum(dim=1, keepdim=True).clamp(min=1)

    def cell_maps(self, image_BCHW: Tensor, texts: Sequence[str]) -> Tensor:
        """Return the decoder's attention of each text's vector."""
        images = self.embed_images(image_BCHW)
        texts_BE = self.embed_texts(texts).global_NE
        memory_BKE, mask_BK = with_global(images.global_NE, *local_features(images))
        return self.decoder.with_attention(unnormalized(texts_BE)[:, None], memory_BKE, mask_BK)[1][
            :, 0, 1:
        ]
