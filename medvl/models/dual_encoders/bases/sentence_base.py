"""Base of dual-encoders that compare the sentences of a text with an image."""

from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from medvl.data.reports.sentences import sentence_spans
from medvl.models.dual_encoders.bases.bert import BertDualEncoder
from medvl.models.dual_encoders.bases.pairs import Pairs
from medvl.models.dual_encoders.parts.sentences import SentencePool, pool_sentences
from medvl.models.dual_encoders.parts.words import most_slots
from medvl.schema import Batch, Embeddings


class SentenceDualEncoder(BertDualEncoder):
    """A dual-encoder whose texts have sentences in `Embeddings.local_NPE`, pooled from the tokens of the whole text.

    A system declares `inputs = Inputs(sentences=True)`; without it, texts have no sentences. Vectors of texts and
    sentences go through `text_head` and are L2-normalised, unless the system overrides `project_text`.

    Attributes:
        sentence_pool: pooling of the tokens of a sentence.
    """

    sentence_pool: ClassVar[SentencePool] = "mean"

    def project_text(self, text_ND: Tensor) -> Tensor:
        """Map vectors of texts (B, D) or sentences (B, S, D) to the shared space, in float32."""
        return F.normalize(self.text_head(text_ND).float(), dim=-1)

    def embed_ids(self, ids_BT: Tensor, mask_BT: Tensor, sentence_BT: Tensor | None = None) -> Embeddings:
        """Return texts as `similarity` takes them; without `sentence_BT`, a whole text is its only sentence."""
        if not self.inputs.sentences:
            return Embeddings(self.project_text(self.text_encoder(ids_BT, mask_BT).pooled_BD))
        sentence_BT = torch.where(mask_BT, 0, -1) if sentence_BT is None else sentence_BT
        width = max(most_slots(sentence_BT), 1)  # before the encoder, because it waits for the device
        features = self.text_encoder(ids_BT, mask_BT)
        sentences_BSD, mask_BS = pool_sentences(features.tokens_BTD, sentence_BT, width, self.sentence_pool)
        return Embeddings(self.project_text(features.pooled_BD), self.project_text(sentences_BSD), mask_BS)

    def embed_texts(self, texts: Sequence[str]) -> Embeddings:
        """Return texts as `similarity` takes them, with their sentences. Raises ConfigError without a tokenizer."""
        texts = [texts] if isinstance(texts, str) else list(texts)
        ids_BT, mask_BT = self.tokenize(texts)
        if not self.inputs.sentences or self.tokenizer is None:
            return self.embed_ids(ids_BT, mask_BT)
        sentence_BT = self.tokenizer.sentence_ids(texts, [sentence_spans(text) for text in texts])
        return self.embed_ids(ids_BT, mask_BT, sentence_BT.to(ids_BT.device))

    def embed_pairs(self, batch: Batch) -> Pairs:
        """See the base class."""
        texts = self.embed_ids(batch.ids_BT, batch.mask_BT, batch.sentence_BT)
        return Pairs(images=self.embed_images(batch.image_BCHW), texts=texts)
