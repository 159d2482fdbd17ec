"""Settings of VQA fine-tuning."""

import dataclasses
from typing import Literal

from medvl.common.config_io import check_choice, check_labels, check_within
from medvl.models.downstream.fused_classifier import FusionTaskConfig

Head = Literal["classifier", "product", "ranking", "generation"]
"""Kind of answer head. "classifier": two layers over the vocabulary on the pooled vector (METER,
M3AE, ARL, PTUnifier). "product": MedViLL's, on the product of CLS and its first SEP. "ranking": the
vocabulary's likeliest answer by a trained decoder (ALBEF, M2I2, MUMC, BLIP). "generation": the text
that the decoder writes, in the vocabulary or not (MISS).
"""
HEADS: tuple[Head, ...] = ("classifier", "product", "ranking", "generation")
FirstWord = Literal["once", "twice"]
"""Number of times that an answer's first word counts in its log-likelihood."""
FIRST_WORD: tuple[FirstWord, ...] = ("once", "twice")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A causal Transformer that writes answers, as wide as the fusion-encoder; the sizes are
    ALBEF's.
    """

    layers: int = 6
    heads: int = 12
    intermediate: int = 3072
    dropout: float = 0.1
    """Dropout of hidden states and of attention."""
    max_tokens: int = 32
    """Maximum length of an answer, including its first and its last token; longer ones are cut."""
    shortlist: int = 128
    """For "ranking": number of answers, those with the likeliest first words, that are scored
    completely. Exact if the vocabulary has no more.
    """
    first_word: FirstWord = "once"
    """For "ranking". "once" is the likelihood, as in BLIP. "twice" is as published for ALBEF, M2I2
    and MUMC: the probability of the first word multiplies that of the whole answer, which contains
    it already.
    """
    beams: int = 3
    """For "generation": number of hypotheses; 1 is greedy."""
    alpha: float = 0.0
    """Weight of the soft targets of a moving average of the model (momentum distillation); 0: there
    is none. ALBEF, M2I2 and MUMC fine-tune with 0.4. Takes the memory of a second model, in a
    checkpoint too.
    """
    momentum: float = 0.995
    """Decay of that moving average, updated before every optimiser step."""
    ramp_steps: int = 0
    """Optimiser steps in which alpha grows from 0; as published, those of the first epoch."""

    def __post_init__(self) -> None:
        check_within(self, "(0, inf)", "layers", "heads", "intermediate", "shortlist", "beams")
        check_within(self, "[0, 1)", "dropout", "alpha", "momentum")
        check_within(self, "[0, inf)", "ramp_steps")
        check_within(self, "[3, inf)", "max_tokens")  # a word between two special tokens
        check_choice(self.first_word, FIRST_WORD, "first_word")


@dataclasses.dataclass(frozen=True, kw_only=True)
class VQAConfig(FusionTaskConfig):
    """An answer head on a fusion-encoder."""

    answers: tuple[str, ...]
    """Normalised vocabulary of answers to learn; heads other than "generation" give no other
    answers.
    """
    head: Head = "classifier"
    decoder: DecoderConfig = dataclasses.field(default_factory=DecoderConfig)
    """For the heads "ranking" and "generation"."""
    head_lr_mult: float | None = None
    """Learning rate of the head, as a multiple of the encoders'. None is the published one: 50 for
    "classifier" (M3AE), 1 for "product" (MedViLL) and for a decoder, which starts from the
    fusion-encoder (ALBEF).
    """
    max_tokens: int = 32
    """Maximum length of a question."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_labels(self.answers, "answers", fewest=2)
        check_choice(self.head, HEADS, "head")

    @property
    def effective_head_lr_mult(self) -> float:
        if self.head_lr_mult is not None:
            return self.head_lr_mult
        return 50.0 if self.head == "classifier" else 1.0
