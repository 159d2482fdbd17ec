"""GLoRIA: a report against its image, and its words against the image's regions (Huang et al.,
ICCV 2021).
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from medvl import losses
from medvl.common.config_io import check_within
from medvl.losses.common import gather
from medvl.losses.local.gloria import WordPool, gloria_attention, gloria_similarity
from medvl.models.dual_encoders.bases.local import (
    LocalDualConfig,
    LocalDualEncoder,
    local_contrast,
    local_features,
)
from medvl.models.dual_encoders.bases.pairs import (
    BoxConfig,
    LabelMapConfig,
    Pairs,
    gather_side,
    reads_boxes,
    reads_labels,
)
from medvl.models.registry import register_system
from medvl.schema import Batch, Embeddings, Losses


@dataclasses.dataclass(frozen=True, kw_only=True)
class GLoRIAConfig(LocalDualConfig, BoxConfig, LabelMapConfig):
    """Settings of the authors' configuration for CheXpert.

    The authors remove punctuation from texts; here it is kept, and every mark is a word. Images are
    padded to squares of 256 pixels, cut to their center of 224 and stretched to 299; regions are
    layer3 of a ResNet-50, 19 x 19.

    As published, regions and words keep their norm (`local_feature_norm`), which sets the sharpness
    of the attention: with large norms at the start, every region attends to the same word, the
    softmax is saturated and has no gradient, and all regions get equal attention. The text's first
    token (`text_token`) differs from all words and can be that word.
    """

    fit: Literal["crop", "pad", "squash"] = "pad"
    margin: int = 16
    encoder_size: int | None = 299
    pixel_mean: float | None = 0.5
    pixel_std: float | None = 0.5
    patch_level: int = -2
    projection_dim: int = 768
    text_layers: int = 4
    word_pool: Literal["sum", "mean"] = "sum"
    """Pooling of the words' matches before the logarithm; under the sum, more words match
    better.
    """
    temp1: float = 4.0
    """Temperature of a word's attention over regions."""
    temp2: float = 5.0
    """Temperature of the words of a text."""
    temp3: float = 10.0
    """Temperature of both contrastive losses; all three multiply."""
    local_weight: float = 1.0
    global_weight: float = 1.0
    max_tokens: int = 97

    def __post_init__(self) -> None:
        super().__post_init__()
        check_within(self, "(0, inf)", "temp1", "temp2", "temp3", "label_map_sharpness")
        check_within(self, "[0, inf)", "local_weight", "box_weight", "label_map_weight")
        check_within(self, "[0, inf)" if self.local_weight else "(0, inf)", "global_weight")


@register_system("gloria")
class GLoRIA(LocalDualEncoder):
    """Global and local contrast (section 3.3, equations 1 to 8).

    The text's first token is one of its words in training and, unlike in the published code,
    everywhere. A text's vector has the direction of GLoRIA's mean over word slots. With
    `box_weight`, the attention of a phrase's words (`text_maps`) is trained on the boxes of the
    phrase. `label_map_weight` trains the other maps, of `medvl eval grounding --maps similarity`:
    the cosine of each region with the best word, times temp3, is the log-odds of a label's text.
    """

    Config = GLoRIAConfig
    reads_features = True

    def embed_pairs(self, batch: Batch) -> Pairs:
        texts = self.embed_ids(*self.text_inputs(batch))  # first: packing waits for the device
        return Pairs(images=self.embed_features(self.image_features(batch)), texts=texts)

    def compare_pairs(self, pairs: Pairs) -> Losses:
        """Compare a rank's own images with the texts of all ranks: regions are not gathered."""
        texts = gather_side(pairs.texts)
        config = self.config
        # The sum of both directions, as in the local loss; `losses.clip` is their mean.
        whole = 2 * losses.clip(gather(pairs.images.global_NE), texts.global_NE, config.temp3)
        terms = {"global": (whole, config.global_weight)}
        # Without a weight, it gives the heads of regions and words their gradients, unless maps do.
        if config.local_weight or not (reads_boxes(config) or reads_labels(config)):
            local = local_contrast(
                pairs.images, texts, config.temp1, config.temp2, config.temp3, config.word_pool
            )
            terms = {"local": (local, config.local_weight), **terms}
        return Losses.weighted(**terms)

    def similarity(self, images: Embeddings | Tensor, texts: Embeddings | Sequence[str]) -> Tensor:
        """Return (N, M): the mean of cosine and word-region similarity: the logits of training over
        2 * temp3.

        A part whose loss has no weight, and so an untrained head, is left out.
        """
        images, texts = self.embedded(images, texts)
        if not self.config.local_weight:
            return super().similarity(images, texts)
        if not self.config.global_weight:
            return self.local_similarity(images, texts)
        return (super().similarity(images, texts) + self.local_similarity(images, texts)) / 2

    def best_word_similarity(
        self, images: Embeddings | Tensor, texts: Embeddings | Sequence[str]
    ) -> Tensor:
        """Return (N, M): the similarity that the published zero-shot code is meant to compute;
        training has another.

        The local part of a text is temp2 times the match of its best word, without the text's first
        token.
        """
        images, texts = self.embedded(images, texts)
        return self.published_similarity(images, self.without_first_token(texts))

    def published_prompts(self, texts: Sequence[str]) -> Embeddings:
        """Return texts with the word slots of the published zero-shot code, for
        `published_similarity`.

        That code takes as many slots after the first token as a text has characters, not words: its
        words, the last token, and zero vectors, which get attention like words and have a match of
        0. It fails on texts with more characters than slots (`max_tokens` - 1); here these get all
        slots.
        """
        ids_BT, mask_BT = self.tokenize(texts)
        slot_BT = self.word_slots(ids_BT, mask_BT, last_token=True)
        embedded = self.without_first_token(self.embed_slots(ids_BT, mask_BT, slot_BT))
        words_NWE, _ = local_features(embedded)
        slots = [min(len(text) - text.count("["), self.config.max_tokens - 1) for text in texts]
        # longer texts are cut
        padded_NWE = F.pad(words_NWE, (0, 0, 0, max(slots) - words_NWE.shape[1]))
        place_W = torch.arange(max(slots), device=words_NWE.device)
        mask_NW = place_W < torch.tensor(slots, device=words_NWE.device)[:, None]
        return Embeddings(embedded.global_NE, padded_NWE, mask_NW)

    def published_similarity(self, images: Embeddings, prompts: Embeddings) -> Tensor:
        """Return (N, M): the mean of the cosine and the best slot's match of
        `published_prompts`, times temp2.
        """
        return (
            super().similarity(images, prompts) + self.local_similarity(images, prompts, "max")
        ) / 2

    def local_similarity(
        self, images: Embeddings, texts: Embeddings, pool: WordPool | None = None
    ) -> Tensor:
        """Return (N, M): the word-region similarity of every image with every text (equations 2
        to 6).
        """
        regions_NPE, _ = local_features(images)
        config = self.config
        pool = pool or config.word_pool
        return gloria_similarity(
            regions_NPE, *local_features(texts), config.temp1, config.temp2, pool=pool
        )

    def text_scores(self, images: Embeddings, texts: Embeddings) -> Tensor:
        """Return (B, M, P): the log-odds of every text in the regions of every image."""
        regions_BPE, _ = local_features(images)
        words_MWE, mask_MW = local_features(texts)
        regions_BPE, words_MWE = (F.normalize(x, dim=-1) for x in (regions_BPE, words_MWE))
        cosine_BMWP = torch.einsum("bpe,mwe->bmwp", regions_BPE, words_MWE)
        hidden_MW1 = ~mask_MW[:, :, None]
        return self.config.temp3 * cosine_BMWP.masked_fill(hidden_MW1, -1.0).amax(dim=2)

    def attend(self, regions_BPE: Tensor, words_BWE: Tensor, mask_BW: Tensor) -> Tensor:
        return gloria_attention(regions_BPE, words_BWE, mask_BW, self.config.temp1)

    def weigh_words(self, match_BW: Tensor, mask_BW: Tensor) -> Tensor:
        """Return each word's share in the local similarity: the softmax of temp2 times its
        match.
        """
        return (
            (self.config.temp2 * match_BW)
            .masked_fill(~mask_BW, -torch.inf)
            .softmax(dim=1)
            .nan_to_num()
        )
