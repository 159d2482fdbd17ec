"""The settings of VQA fine-tuning."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from medvl.errors import ConfigError
from medvl.models.base import SystemConfig

Head = Literal["classifier", "product", "ranking", "generation"]
"""How an answer is given. "classifier": two layers over the vocabulary on what the fusion-encoder pools (METER, M3AE,
ARL, PTUnifier). "product": MedViLL's own, on its CLS times its first SEP. Or by a decoder that has learnt to write
answers: "ranking" takes the likeliest answer of the vocabulary (ALBEF, M2I2, MUMC, BLIP), "generation" what the decoder
itself writes, in the vocabulary or not (MISS)."""
HEADS: tuple[Head, ...] = ("classifier", "product", "ranking", "generation")
FirstWord = Literal["once", "twice"]
"""How often an answer's first word counts in its log-likelihood."""
FIRST_WORD: tuple[FirstWord, ...] = ("once", "twice")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A causal Transformer that writes answers, as wide as the fusion-encoder; the sizes are ALBEF's."""

    layers: int = 6
    heads: int = 12
    intermediate: int = 3072
    dropout: float = 0.1
    """Of hidden states and of attention."""
    max_tokens: int = 32
    """Of an answer, with its first and its last token; a longer one is cut, and known by what is left of it."""
    shortlist: int = 128
    """Of "ranking": so many answers, those whose first word is likeliest, are scored whole. Exact where the vocabulary
    has no more."""
    first_word: FirstWord = "once"
    """Of "ranking". "once" is the likelihood, as BLIP has it. "twice" is as ALBEF, M2I2 and MUMC published it: the
    probability that made the shortlist multiplies that of the whole answer, of which it is a factor already."""
    beams: int = 3
    """Of "generation": hypotheses that are kept; 1 is greedy."""

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "intermediate", "shortlist", "beams"):
            if getattr(self, name) < 1:
                raise ConfigError(f"decoder.{name} must be positive, got {getattr(self, name)}")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"decoder.dropout must be within [0, 1), got {self.dropout}")
        if self.max_tokens < 3:
            raise ConfigError(f"decoder.max_tokens is {self.max_tokens}: an answer has a word between its two ends")
        if self.first_word not in FIRST_WORD:
            raise ConfigError(f"decoder.first_word is {self.first_word!r}: known are {', '.join(FIRST_WORD)}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class VQAConfig(SystemConfig):
    """A head that answers, on a fusion-encoder."""

    system: ClassVar[str] = "vqa"

    fusion: str
    """Name of the fusion-encoder's system: m3ae, medvill, dual_stream, ..."""
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The fields of its configuration that differ from the published ones."""
    answers: tuple[str, ...]
    """The vocabulary, normalised: what the model learns to answer, and all that it can answer unless it writes."""
    head: Head = "classifier"
    decoder: DecoderConfig = dataclasses.field(default_factory=DecoderConfig)
    """Of the heads "ranking" and "generation"."""
    head_lr_mult: float | None = None
    """Learning rate of the head, as a multiple of the encoders'. None is the published one: 50 of a classifier (M3AE),
    1 of MedViLL's product and of a decoder, which starts from the fusion-encoder (ALBEF)."""
    max_tokens: int = 32
    """Of a question."""
    vocab_size: int | None = None
    """Of the text encoder; None is as the fusion-encoder's settings say, or the tokenizer's where one is given."""

    def __post_init__(self) -> None:
        if len(self.answers) < 2 or len(set(self.answers)) != len(self.answers):
            raise ConfigError(f"answers must be two or more, each once; there are {len(self.answers)}")
        if self.head not in HEADS:
            raise ConfigError(f"head is {self.head!r}: known are {', '.join(HEADS)}")
        if self.head_lr_mult is not None and self.head_lr_mult <= 0:
            raise ConfigError(
                f"head_lr_mult must be above 0, got {self.head_lr_mult}", "out_of_range", field="head_lr_mult"
            )

    @property
    def effective_head_lr_mult(self) -> float:
        """`head_lr_mult`, or the published value of the head where that is None."""
        if self.head_lr_mult is not None:
            return self.head_lr_mult
        return 50.0 if self.head == "classifier" else 1.0
