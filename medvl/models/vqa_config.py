"""The settings of VQA fine-tuning. No torch here, as in `medvl.models.configs`."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from medvl.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class VQAConfig:
    """A classifier over answers on a fusion-encoder."""

    system: ClassVar[str] = "vqa"

    fusion: str
    """Name of the fusion-encoder's system: m3ae, medvill, dual_stream, ..."""
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The fields of its configuration that differ from the published ones."""
    answers: tuple[str, ...]
    """The vocabulary: what the model can answer, normalised."""
    head_rate: float = 50.0
    """Learning rate of the head over the answers, as a multiple of the encoders'."""
    max_tokens: int = 32
    """Of a question."""
    vocab_size: int | None = None
    """Of the text encoder; None is as the fusion-encoder's settings say, or the tokenizer's where one is given."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "answers", tuple(self.answers))  # a list, where it was read from JSON
        if len(self.answers) < 2 or len(set(self.answers)) != len(self.answers):
            raise ConfigError(f"answers must be two or more, each once; there are {len(self.answers)}")
        if self.head_rate <= 0:
            raise ConfigError(f"head_rate must be above 0, got {self.head_rate}")
