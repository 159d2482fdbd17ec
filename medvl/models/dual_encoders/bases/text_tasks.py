"""Base of dual-encoders whose text encoder keeps its own objectives: section matching and masked words (BioViL).

The objectives compare further sides of `Pairs`, so that they work in parts (GradCache) and over ranks.
"""

import dataclasses
import functools
from typing import Any

from torch import Tensor

from medvl import losses
from medvl.common.checks import check_within
from medvl.data.transforms.mlm_masking import TextMasking
from medvl.encoders import TextEncoder
from medvl.errors import ConfigError
from medvl.models.dual_encoders.bases.bert import BertDualConfig, BertDualEncoder
from medvl.models.dual_encoders.bases.pairs import Pairs, take
from medvl.models.masked_words import WordHead, sample_masked_words, text_masking
from medvl.schema import Batch, Embeddings, Inputs

Terms = dict[str, tuple[Tensor, float]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextTaskConfig(BertDualConfig):
    """Settings of a dual-encoder with objectives of its text encoder."""

    temperature: float = 0.5
    """Temperature of the contrast of two texts; systems use it for images and texts as well."""
    rsm_weight: float = 1.0
    """Weight of radiology section matching: the two texts of a sample (`Inputs.second_text`) against each other."""
    mlm_weight: float = 1.0
    mlm_probability: float = 0.15
    whole_words: bool = True
    """Mask whole words, not single tokens."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_within(self, "(0, inf)", "temperature")
        check_within(self, "[0, inf)", "rsm_weight", "mlm_weight")
        check_within(self, "(0, 1)", "mlm_probability")


class TextTaskEncoder(BertDualEncoder):
    """A contrastive dual-encoder that adds `text_sides` to its pairs and `text_terms` to its losses.

    Attributes:
        word_head: scores of the vocabulary, tied to the table of word embeddings; None where `mlm_weight` is 0.
    """

    def __init__(self, config: Any, *args: Any, word_head: WordHead | None, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.word_head = word_head
        self.inputs = Inputs(second_text=config.rsm_weight > 0)

    @classmethod
    def make_word_head(cls, config: Any, text_encoder: TextEncoder) -> WordHead | None:
        """Return `word_head`. Raises ConfigError for a text encoder without a table of word embeddings."""
        if not config.mlm_weight:
            return None
        if not hasattr(text_encoder.backbone, "get_input_embeddings"):
            message = f"{text_encoder.name} has no table of words to predict: use a BERT, or mlm_weight 0"
            raise ConfigError(message, "unsupported", field="mlm_weight")
        return WordHead(text_encoder.token_dim, text_encoder.vocab_size, tied=True)

    @functools.cached_property
    def masking(self) -> TextMasking:
        """Masking of words in training. Raises ConfigError without a tokenizer, or without a mask token in it."""
        return text_masking(self, rate=self.config.mlm_probability, whole_words=self.config.whole_words)

    def text_sides(self, batch: Batch) -> dict[str, Embeddings]:
        """Return the sides that the objectives of weight above 0 compare.

        Raises ConfigError for a batch without second texts, and as `masking` does.
        """
        sides = {"sections": self._sections(batch)} if self.config.rsm_weight else {}
        return sides if self.word_head is None else {**sides, "masked": self._masked_words(batch, self.word_head)}

    def text_terms(self, every: Pairs) -> Terms:
        """Return the objectives' losses and weights, from the pairs of all ranks.

        "rsm" is the symmetric InfoNCE of samples with two texts, 0 without any; "mlm" is `losses.mlm`.
        """
        terms: Terms = {}
        if self.config.rsm_weight:
            second = every.others["sections"]
            first_KE = every.texts.global_NE[second.pair_N]
            scores = losses.convirt(first_KE, second.global_NE, self.config.temperature, 0.5) if len(second) else None
            terms["rsm"] = second.global_NE.sum() if scores is None else scores, self.config.rsm_weight
        if self.word_head is not None:
            entropy, count = every.others["masked"].global_NE.sum(dim=0)
            terms["mlm"] = entropy / count.clamp(min=1), self.config.mlm_weight
        return terms

    def _sections(self, batch: Batch) -> Embeddings:
        """Return the second texts that exist, with the numbers of their samples."""
        if batch.second_ids_BT is None or batch.second_mask_BT is None:
            message = "section matching needs Batch.second_ids_BT: open the loader with the model's inputs"
            raise ConfigError(message, "missing", field="second_ids_BT")
        has_B = batch.mask_BT.new_ones(len(batch)) if batch.has_second_text_B is None else batch.has_second_text_B
        row_K = has_B.nonzero().squeeze(1)
        side = take(self.embed_ids(batch.second_ids_BT, batch.second_mask_BT), row_K)
        return dataclasses.replace(side, pair_N=row_K)

    def _masked_words(self, batch: Batch, head: WordHead) -> Embeddings:
        """Return the rows of `losses.mlm_by_text`: the texts are masked and encoded again."""
        words = sample_masked_words(batch, self.masking)
        states_BTD = self.text_encoder(words.ids_BT, batch.mask_BT).tokens_BTD
        backbone: Any = self.text_encoder.backbone
        logits_NV = head(states_BTD.flatten(0, 1)[words.position_N], backbone.get_input_embeddings().weight)
        text_N = words.position_N // words.ids_BT.shape[1]
        return Embeddings(losses.mlm_by_text(logits_NV, words.target_N, text_N, len(batch)))
