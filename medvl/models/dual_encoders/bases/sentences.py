"""Vectors of the sentences of a text, and the base of dual-encoders that have them."""

from collections.abc import Callable, Sequence
from typing import ClassVar, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medvl.common.config_io import check_choice
from medvl.models.dual_encoders.bases.base import DualEncoder
from medvl.models.dual_encoders.bases.local import local_features, most_slots, sum_by_slot
from medvl.models.heatmaps import on_originals
from medvl.schema import Embeddings

# Sentence features from the features of their tokens.
#
# width = most_slots(batch.sentence_BT)                       # waits for the device
# sentences_BSD, mask_BS = pool_sentences(features.tokens_BTD, batch.sentence_BT, width)

SentencePool = Literal["max", "mean"]


def pool_sentences(
    tokens_BTD: Tensor, sentence_BT: Tensor, width: int | None = None, pool: SentencePool = "max"
) -> tuple[Tensor, Tensor]:
    """Return (sentences_BSD, mask_BS): maximum or mean of the tokens of each sentence, in float32;
    S is `width`.

    Args:
        tokens_BTD: features of tokens.
        sentence_BT: `Batch.sentence_BT`: number of each token's sentence, from 0; -1 outside of
            sentences, where tokens are ignored.
        width: at least the number of sentences of the longest text. None: that number, for which it
            waits for the device.
        pool: "max" as in LoVT (arXiv 2112.02889, section 3.3). Tokens that share the maximum share
            its gradient.

    A sentence without tokens, also between others, has zeros and is False in the mask. Raises
    ConfigError on an unknown pool.
    """
    check_choice(pool, get_args(SentencePool), "pool")
    width = most_slots(sentence_BT) if width is None else width
    outside_BT = sentence_BT < 0
    place_BT = sentence_BT.masked_fill(outside_BT, width)
    count_BS = sentence_BT.new_zeros(len(sentence_BT), width + 1)
    count_BS = count_BS.scatter_add(1, place_BT, torch.ones_like(place_BT))[:, :width]
    mask_BS = count_BS > 0
    if pool == "mean":
        sentences_BSD, _ = sum_by_slot(tokens_BTD, sentence_BT, width)
        return sentences_BSD / count_BS.clamp(min=1)[:, :, None], mask_BS
    lowest_BSD = tokens_BTD.new_full(
        (len(tokens_BTD), width + 1, tokens_BTD.shape[2]), -torch.inf, dtype=torch.float32
    )
    tokens_BTD = tokens_BTD.float().masked_fill(outside_BT[:, :, None], 0.0)
    place_BTD = place_BT[:, :, None].expand_as(tokens_BTD)
    sentences_BSD = lowest_BSD.scatter_reduce(1, place_BTD, tokens_BTD, "amax")[:, :width]
    return sentences_BSD.masked_fill(~mask_BS[:, :, None], 0.0), mask_BS


def mean_of_sentences(tokens_BTD: Tensor, sentence_BT: Tensor | None, mask_BT: Tensor) -> Tensor:
    """Return (B, D) float32: the mean of a text's sentences, each the mean of its tokens.

    A text without a sentence, and every text if `sentence_BT` is None, is one sentence.
    """
    sentence_BT = (
        torch.full_like(mask_BT, -1, dtype=torch.long) if sentence_BT is None else sentence_BT
    )
    sentences_BSD, mask_BS = pool_sentences(
        tokens_BTD, whole_if_none(sentence_BT, mask_BT), pool="mean"
    )
    return sentences_BSD.sum(dim=1) / mask_BS.sum(dim=1, keepdim=True).clamp(min=1)


def whole_if_none(sentence_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return the numbers of sentences, 0 on all tokens but the first and the last of a text that
    has no sentence.

    A text of nothing but its first and last token has these as its sentence.
    """
    inner_BT = mask_BT & F.pad(mask_BT[:, 1:], (0, 1))
    inner_BT[:, 0] = False
    whole_BT = (
        torch.where(inner_BT.any(dim=1, keepdim=True), inner_BT, mask_BT).to(sentence_BT.dtype) - 1
    )
    return torch.where((sentence_BT >= 0).any(dim=1, keepdim=True), sentence_BT, whole_BT)


class SentenceDualEncoder(DualEncoder):
    """A dual-encoder whose texts have sentences in `Embeddings.local_NPE`, if it declares
    `Inputs(sentences=True)`. They are pooled from the tokens of the whole text.

    Attributes:
        sentence_pool: pooling of the tokens of a sentence.
        normalized: whether vectors of images, texts and sentences, behind `image_head` or
            `text_head`, are L2-normalised.
        embeds_regions: whether images have the encoder's patches in `Embeddings.local_NPE`, as they
            are.
    """

    sentence_pool: ClassVar[SentencePool] = "mean"
    normalized: ClassVar[bool] = True
    embeds_regions: bool = False

    def embed_images(self, image_BCHW: Tensor) -> Embeddings:
        """Return images as `similarity` takes them."""
        features = self.image_encoder(image_BCHW, self._draw_patches(image_BCHW))
        regions_BPD = features.patches_BPD.float() if self.embeds_regions else None
        return Embeddings(self._project(self.image_head, features.pooled_BD), regions_BPD)

    def embed_ids(
        self, ids_BT: Tensor, mask_BT: Tensor, sentence_BT: Tensor | None = None
    ) -> Embeddings:
        """Return texts as `similarity` takes them; without `sentence_BT`, a whole text is its
        only sentence.
        """
        if not self.inputs.sentences:
            return Embeddings(
                self._project(self.text_head, self.text_encoder(ids_BT, mask_BT).pooled_BD)
            )
        sentence_BT = torch.where(mask_BT, 0, -1) if sentence_BT is None else sentence_BT
        width = max(
            most_slots(sentence_BT), 1
        )  # before the encoder, because it waits for the device
        features = self.text_encoder(ids_BT, mask_BT)
        sentences_BSD, mask_BS = pool_sentences(
            features.tokens_BTD, sentence_BT, width, self.sentence_pool
        )
        text_BE, sentences_BSE = (
            self._project(self.text_head, each) for each in (features.pooled_BD, sentences_BSD)
        )
        return Embeddings(text_BE, sentences_BSE, mask_BS)

    @torch.no_grad()
    def sentence_maps(
        self,
        score: Callable[[Tensor, Tensor], Tensor],
        image_BCHW: Tensor,
        texts: Sequence[str],
        original_sizes: Sequence[tuple[int, int]] | None = None,
    ) -> list[Tensor]:
        """Return one (H, W) map per pair: the softmax over regions of the mean score of the text's
        sentences.

        `score` maps regions (P, D) and sentences (S, E) to (P, S). Other arguments are those of
        `LocalDualEncoder.attention_maps`.
        """
        regions_BPD, _ = local_features(self.embed_images(image_BCHW))
        sides = zip(regions_BPD, *local_features(self.embed_texts(texts)), strict=True)
        scores = [
            score(regions_PD, text_SE[mask_S]).mean(dim=1) for regions_PD, text_SE, mask_S in sides
        ]
        map_Bhw = (
            torch.stack(scores)
            .softmax(dim=1)
            .unflatten(1, self.image_encoder.grid(*image_BCHW.shape[2:]))
        )
        return on_originals(map_Bhw, self.transform, image_BCHW, original_sizes)

    def _project(self, head: nn.Module, features: Tensor) -> Tensor:
        """Return vectors (..., E) in float32, L2-normalised if the system's are."""
        projected: Tensor = head(features).float()
        return F.normalize(projected, dim=-1) if self.normalized else projected
