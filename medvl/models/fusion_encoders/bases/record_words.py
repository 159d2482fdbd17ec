"""Base of systems that predict masked words of a report from its other words and a few patches of its image (MRM)."""

import functools
from typing import Any, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medvl.encoders import ImageEncoder, TextEncoder
from medvl.models.base import Parts, TwoTowers
from medvl.models.fusion_encoders.parts.record_words import RecordWords
from medvl.models.masked_words import WordHead
from medvl.schema import Batch


class RecordWordModel(TwoTowers):
    """An image encoder and a text encoder whose masked words read the image; settings are a `RecordWordsConfig`.

    The mean of the visible patches is added to the words, so that words that the text does not determine are read from
    the image. Without `mlm_weight`, what only words need is frozen.

    Attributes:
        word_head: maps states of the text encoder to its vocabulary, with its table of word embeddings.
        image_to_words: maps patches to the width of words.
        fusion: attention of words to patches, with `text_fusion` "attention".
    """

    image_encoder: ImageEncoder

    def __init__(
        self, config: Any, image_encoder: ImageEncoder, text_encoder: TextEncoder, **parts: Unpack[Parts]
    ) -> None:
        super().__init__(config, image_encoder, text_encoder, **parts)
        width, table_width = text_encoder.token_dim, self._word_table().shape[1]
        self.word_head = WordHead(width, text_encoder.vocab_size, tied=True, table_width=table_width)
        self.image_to_words = nn.Linear(image_encoder.patch_dim, width)
        self.fusion: nn.MultiheadAttention | None = None
        if config.text_fusion == "attention":
            self.fusion = nn.MultiheadAttention(width, max(1, width // 64), batch_first=True)
        if not config.mlm_weight:
            for part in filter(None, (self.word_head, self.image_to_words, self.fusion)):
                part.requires_grad_(False)

    @functools.cached_property
    def words(self) -> RecordWords:
        """Masking of reports. Raises ConfigError without a tokenizer or a mask token."""
        return RecordWords(self, self.config)

    def word_loss(self, visible_BKD: Tensor, batch: Batch) -> Tensor:
        """Return the cross-entropy of the masked words of samples with an image and a report, weighted by word."""
        masked = self.words(batch)
        image_BKD = self.image_to_words(visible_BKD)
        hidden_BTD = self.text_encoder.embed(masked.ids_BT, batch.mask_BT)
        if self.fusion is not None:
            hidden_BTD = hidden_BTD + self.fusion(hidden_BTD, image_BKD, image_BKD, need_weights=False)[0]
        hidden_BTD = hidden_BTD + image_BKD.mean(dim=1, keepdim=True)
        states_BTD = self.text_encoder.features(hidden_BTD, batch.mask_BT).tokens_BTD
        states_ND = states_BTD.flatten(0, 1)[masked.position_N]
        logits_NV = self.word_head(states_ND, self._word_table())
        entropy_N = F.cross_entropy(logits_NV.float(), masked.target_N, reduction="none")
        return (entropy_N * masked.weight_N).sum() / masked.weight_N.sum().clamp(min=torch.finfo(torch.float32).tiny)

    def _word_table(self) -> Tensor:
        backbone: Any = self.text_encoder.backbone
        table_VD: Tensor = backbone.get_input_embeddings().weight
        return table_VD
