"""Masked language modelling of text alone as in BERT and PubMedBERT (Gu et al., arXiv
2007.15779, HEALTH 2021).
"""

import dataclasses
from typing import Any

from medvl.data.transforms.masked_text import PairTask
from medvl.encoders import TextEncoder
from medvl.errors import ConfigError
from medvl.models.base import WordHead
from medvl.models.language.base import LanguageConfig, LanguageModel
from medvl.models.registry import register_system


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskedTextConfig(LanguageConfig):
    """Published settings of PubMedBERT: whole words, 15 %, and next sentence prediction (sections
    3.1 and 3.2).

    The ablations of the paper are options: sub-words (`whole_words`), start from a general encoder
    with its own vocabulary or with a new one (`new_vocabulary`), adversarial pretraining
    (`adversarial_weight`), and the rising rate that it cites (`rate_ramp`).
    """

    text_encoder: str = "pubmedbert"
    pairs: PairTask = "next"


@register_system("masked_text")
class MaskedText(LanguageModel):
    """A BERT (or RoBERTa, without pairs) pretrained from scratch or further, on any text.

    Differences from BERT's released code: each word is selected with the probability of the rate,
    so that the number of masked tokens of a sequence varies; masks, windows and pairs are drawn
    anew in each epoch; a sequence is a window of one block of a document and is not filled up from
    the next one.
    """

    Config = MaskedTextConfig


# ALBERT on text alone (Lan et al., arXiv 1909.11942) as in BioALBERT (Naseem et al., arXiv
# 2107.04374, 2022).


@dataclasses.dataclass(frozen=True, kw_only=True)
class AlbertTextConfig(LanguageConfig):
    """ALBERT's settings: spans of up to three words, and sentence order prediction.

    BioALBERT's paper does not say whether it masked spans. It predicts at most 20 tokens of a
    sequence of 512, which leaves most of each sequence unused; that limit is not kept.
    """

    text_encoder: str = "bioalbert"
    longest_span: int = 3
    pairs: PairTask = "order"


@register_system("albert_text")
class AlbertText(LanguageModel):
    """Layers that share their parameters, narrow word embeddings, masked words and sentence
    order prediction.
    """

    Config = AlbertTextConfig
    pair_dropout = 0.1

    @classmethod
    def make_word_head(cls, text_encoder: TextEncoder) -> WordHead:
        """Return ALBERT's head, which maps to the width of the word embeddings. Raises
        ConfigError for other models.
        """
        config: Any = getattr(text_encoder.backbone, "config", None)
        if getattr(config, "model_type", None) != "albert":
            message = f"expected an ALBERT, got {text_encoder.name}; use the system masked_text"
            raise ConfigError(message, "unsupported", field="text_encoder")
        return super().make_word_head(text_encoder)
