"""Masked language modelling of text alone as in BERT and PubMedBERT (Gu et al., arXiv
2007.15779, HEALTH 2021).
"""

import dataclasses

from medvl.data.transforms.text_sequences import PairTask
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
