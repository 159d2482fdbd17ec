"""Bases of dual-encoders that compare the sentences of a text with an image."""

import abc
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medvl.data.reports.sentences import sentence_spans
from medvl.errors import ConfigError
from medvl.models.base import list_of_texts
from medvl.models.dual_encoders.bases.base import ContrastiveEncoder
from medvl.models.dual_encoders.bases.bert import BertDualEncoder
from medvl.models.dual_encoders.bases.local import local_features
from medvl.models.dual_encoders.bases.pairs import Pairs
from medvl.models.dual_encoders.parts.sentences import SentencePool, mean_of_sentences, pool_sentences
from medvl.models.dual_encoders.parts.words import most_slots
from medvl.models.heatmaps import on_originals
from medvl.schema import Batch, Embeddings


class SentenceTexts(ContrastiveEncoder):
    """A dual-encoder whose texts have sentences in `Embeddings.local_NPE`, if it declares `Inputs(sentences=True)`."""

    @abc.abstractmethod
    def embed_ids(self, ids_BT: Tensor, mask_BT: Tensor, sentence_BT: Tensor | None = None) -> Embeddings:
        """Return texts as `similarity` takes them; without `sentence_BT`, a whole text is its only sentence."""

    def embed_texts(self, texts: Sequence[str]) -> Embeddings:
        """Return texts as `similarity` takes them, with their sentences. Raises ConfigError without a tokenizer."""
        return self.embed_ids(*self.tokenize_sentences(texts))

    def tokenize_sentences(self, texts: Sequence[str]) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return (ids_BT, mask_BT, sentence_BT) of strings; None where the system needs no sentences."""
        texts = list_of_texts(texts)
        ids_BT, mask_BT = self.tokenize(texts)
        if not self.inputs.sentences or self.tokenizer is None:
            return ids_BT, mask_BT, None
        sentence_BT = self.tokenizer.sentence_ids(texts, [sentence_spans(text) for text in texts])
        return ids_BT, mask_BT, sentence_BT.to(ids_BT.device)

    def embed_pairs(self, batch: Batch) -> Pairs:
        """See the base class. Raises ConfigError for a batch without the sentences of its tokens."""
        self._require_sentences(batch)
        texts = self.embed_ids(batch.ids_BT, batch.mask_BT, batch.sentence_BT)
        return Pairs(images=self.embed_images(batch.image_BCHW), texts=texts)

    def _require_sentences(self, batch: Batch) -> None:
        """Raise ConfigError for a batch without the sentences of its tokens, where the system needs them."""
        if self.inputs.sentences and batch.sentence_BT is None:
            message = f"{self.name} needs the sentence of each token: open the loader with inputs=model.inputs"
            raise ConfigError(message, "missing", field="sentence_BT")


class SentenceMeanEncoder(SentenceTexts, BertDualEncoder):
    """A dual-encoder whose texts are the mean of their sentences, if it declares `Inputs(sentences=True)`.

    A sentence is the mean of its tokens in the text. Other systems have the text encoder's pooled vector.
    """

    def map_texts(self, batch: Batch) -> Tensor:
        """Return `map_ids` of a batch. Raises ConfigError for a batch without the sentences of its tokens."""
        self._require_sentences(batch)
        return self.map_ids(batch.ids_BT, batch.mask_BT, batch.sentence_BT)

    def map_ids(self, ids_BT: Tensor, mask_BT: Tensor, sentence_BT: Tensor | None = None) -> Tensor:
        """Return (B, E) float32: texts behind `text_head`, not normalised."""
        features = self.text_encoder(ids_BT, mask_BT)
        vector_BD = features.pooled_BD
        if self.inputs.sentences:
            vector_BD = mean_of_sentences(features.tokens_BTD, sentence_BT, mask_BT)
        projected_BE: Tensor = self.text_head(vector_BD)
        return projected_BE.float()

    def unnormalized_text(self, texts: Sequence[str] | Tensor, mask_BT: Tensor | None = None) -> Tensor:
        """See the base class."""
        if isinstance(texts, Tensor):
            return self.map_ids(*self.tokenize(texts, mask_BT))
        return self.map_ids(*self.tokenize_sentences(texts))

    def embed_ids(self, ids_BT: Tensor, mask_BT: Tensor, sentence_BT: Tensor | None = None) -> Embeddings:
        """See the base class."""
        return Embeddings(F.normalize(self.map_ids(ids_BT, mask_BT, sentence_BT), dim=-1))


class SentenceDualEncoder(SentenceTexts, BertDualEncoder):
    """A dual-encoder whose sentences are pooled from the tokens of the whole text.

    Attributes:
        sentence_pool: pooling of the tokens of a sentence.
        normalized: whether vectors of images, texts and sentences, behind `image_head` or `text_head`, are
            L2-normalised.
        embeds_regions: whether images have the encoder's patches in `Embeddings.local_NPE`, as they are.
    """

    sentence_pool: ClassVar[SentencePool] = "mean"
    normalized: ClassVar[bool] = True
    embeds_regions: bool = False

    def embed_images(self, image_BCHW: Tensor) -> Embeddings:
        """Return images as `similarity` takes them."""
        features = self.image_encoder(image_BCHW, self._draw_patches(image_BCHW))
        regions_BPD = features.patches_BPD.float() if self.embeds_regions else None
        return Embeddings(self._project(self.image_head, features.pooled_BD), regions_BPD)

    def embed_ids(self, ids_BT: Tensor, mask_BT: Tensor, sentence_BT: Tensor | None = None) -> Embeddings:
        """See the base class."""
        if not self.inputs.sentences:
            return Embeddings(self._project(self.text_head, self.text_encoder(ids_BT, mask_BT).pooled_BD))
        sentence_BT = torch.where(mask_BT, 0, -1) if sentence_BT is None else sentence_BT
        width = max(most_slots(sentence_BT), 1)  # before the encoder, because it waits for the device
        features = self.text_encoder(ids_BT, mask_BT)
        sentences_BSD, mask_BS = pool_sentences(features.tokens_BTD, sentence_BT, width, self.sentence_pool)
        text_BE, sentences_BSE = (self._project(self.text_head, each) for each in (features.pooled_BD, sentences_BSD))
        return Embeddings(text_BE, sentences_BSE, mask_BS)

    @torch.no_grad()
    def sentence_maps(
        self,
        score: Callable[[Tensor, Tensor], Tensor],
        image_BCHW: Tensor,
        texts: Sequence[str],
        original_sizes: Sequence[tuple[int, int]] | None = None,
    ) -> list[Tensor]:
        """Return one (H, W) map per pair: the softmax over regions of the mean score of the text's sentences.

        `score` maps regions (P, D) and sentences (S, E) to (P, S). Other arguments are those of
        `LocalDualEncoder.attention_maps`.
        """
        regions_BPD, _ = local_features(self.embed_images(image_BCHW))
        sides = zip(regions_BPD, *local_features(self.embed_texts(texts)), strict=True)
        scores = [score(regions_PD, text_SE[mask_S]).mean(dim=1) for regions_PD, text_SE, mask_S in sides]
        map_Bhw = torch.stack(scores).softmax(dim=1).unflatten(1, self.image_encoder.grid(*image_BCHW.shape[2:]))
        return on_originals(map_Bhw, self.transform, image_BCHW, original_sizes)

    def _project(self, head: nn.Module, features: Tensor) -> Tensor:
        """Return vectors (..., E) in float32, L2-normalised if the system's are."""
        projected: Tensor = head(features).float()
        return F.normalize(projected, dim=-1) if self.normalized else projected
