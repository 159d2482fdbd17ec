"""Base of dual-encoders that compare the sentences of a report with the regions of an image."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medvl.models.dual_encoders.bases.local import LocalDualEncoder
from medvl.models.dual_encoders.bases.sentences import SentenceTexts
from medvl.models.dual_encoders.parts.sentences import pool_sentences, whole_if_none
from medvl.models.dual_encoders.parts.words import most_slots
from medvl.schema import Embeddings, ImageFeatures, Inputs


class LocalSentenceEncoder(SentenceTexts, LocalDualEncoder):
    """A local dual-encoder whose texts have sentences in place of words.

    A sentence is the maximum over its tokens, without the first and the last token of the text. Images and reports are
    pooled from their regions and sentences, whose weights are `Embeddings.weight_NP`, without gradient. Token ids
    without the numbers of their sentences, and texts without a sentence, are one sentence: a prompt needs no full stop.
    `text_pool` and `text_token` of the configuration have no meaning.

    Attributes:
        region_pool, sentence_pool: modules such as `AttentionPool`: map (B, N, D) and its mask to (B, D) and weights
            (B, N).
        word_head: maps sentences to the shared space.
    """

    inputs = Inputs(sentences=True)

    def __init__(
        self, config: Any, *args: Any, region_pool: nn.Module, sentence_pool: nn.Module, **kwargs: Any
    ) -> None:
        super().__init__(config, *args, **kwargs)
        self.region_pool, self.sentence_pool = region_pool, sentence_pool

    def pool_regions(self, features: ImageFeatures) -> tuple[Tensor, Tensor | None]:
        """See the base class."""
        pooled_BD, weight_BP = self.region_pool(features.patches_BPD)
        return pooled_BD, weight_BP.detach()

    def unnormalized_text(self, texts: Sequence[str] | Tensor, mask_BT: Tensor | None = None) -> Tensor:
        """See the base class."""
        if not isinstance(texts, Tensor):
            return self._pooled_texts(*self.tokenize_sentences(texts))[0]
        ids_BT, mask_BT = self.tokenize(texts, mask_BT)
        return self._pooled_texts(ids_BT, mask_BT, None)[0]

    def embed_ids(self, ids_BT: Tensor, mask_BT: Tensor, sentence_BT: Tensor | None = None) -> Embeddings:
        """See the base class."""
        report_BE, sentences_BSD, mask_BS, weight_BS = self._pooled_texts(ids_BT, mask_BT, sentence_BT)
        local_BSE = self._project(self.word_head, sentences_BSD, mask_BS)
        return Embeddings(F.normalize(report_BE, dim=-1), local_BSE, mask_BS, weight_BS.detach())

    def embed_slots(self, ids_BT: Tensor, mask_BT: Tensor, slot_BT: Tensor) -> Embeddings:
        """See the base class; `slot_BT` has the number of each token's sentence."""
        return self.embed_ids(ids_BT, mask_BT, slot_BT)

    def _pooled_texts(
        self, ids_BT: Tensor, mask_BT: Tensor, sentence_BT: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return (B, E) float32, not normalised, and sentences_BSD, mask_BS and weight_BS."""
        sentence_BT = torch.full_like(ids_BT, -1) if sentence_BT is None else sentence_BT
        sentence_BT = whole_if_none(sentence_BT, mask_BT)
        width = most_slots(sentence_BT)  # before the encoder, because it waits for the device
        sentences_BSD, mask_BS = pool_sentences(self.text_encoder(ids_BT, mask_BT).tokens_BTD, sentence_BT, width)
        report_BD, weight_BS = self.sentence_pool(sentences_BSD, mask_BS)
        return self.text_head(report_BD).float(), sentences_BSD, mask_BS, weight_BS

    def without_first_token(self, texts: Embeddings) -> Embeddings:
        """Return the texts as they are: sentences do not include the text's first token."""
        return texts

    def weigh_words(self, match_BW: Tensor, mask_BW: Tensor) -> Tensor:
        """Return equal shares of all sentences."""
        return mask_BW / mask_BW.sum(dim=1, keepdim=True).clamp(min=1)
