"""The published settings of every system, side by side. No torch here: a recipe reads its command line without it."""

import dataclasses
from typing import Any, ClassVar, Literal, get_args

from medvl.errors import ConfigError

Positives = Literal["own", "study", "text", "either"]
"""Which texts of a batch are an image's positives, and the other way round: its own, as published; those of its study
as well, or those that read the same, or either. What is no positive is a negative."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConVIRTConfig:
    """ConVIRT (Zhang et al., arXiv 2010.00747).

    The paper's training code was not released: max pooling over tokens, the 512 dimensions and the width of the heads
    are as in LoVT's re-implementation.
    """

    system: ClassVar[str] = "convirt"

    image_encoder: str = "resnet50"
    text_encoder: str = "bioclinicalbert"
    image_size: int = 224
    fit: Literal["crop", "pad", "squash"] = "crop"
    """How an image is made square for inference (`medvl.data.transforms.image.EvalTransform`)."""
    projection_dim: int = 512
    """E, of the shared space."""
    hidden_dim: int | None = None
    """Width of both heads inside; None is that of their input."""
    text_pool: Literal["max", "mean"] = "max"
    """From tokens to one vector; the mean is an unofficial re-implementation's."""
    frozen_text_layers: int = 6
    """The embedding layer and this many layers above it are not trained; 0 trains everything."""
    attention_dropout: float | None = None
    """Of the text encoder's attention, while it trains; None is its own, 0.1 in BERT. At 0 packed text takes the GPU's
    kernel for texts of uneven length."""
    patch_dropout: float = 0.0
    """Share of each image's patches that training leaves out, drawn anew each time: twice the speed at half of them
    (FLIP, Li et al., arXiv 2212.00794). Vision Transformers only; a last epoch without it closes the gap to
    inference."""
    temperature: float = 0.1
    image_weight: float = 0.75
    """Lambda: the share of the image-to-text direction."""
    positives: Positives = "own"
    max_tokens: int = 128
    vocab_size: int | None = None
    """Of the text encoder; None is the preset's own, or the tokenizer's where one is given."""

    def __post_init__(self) -> None:
        if self.temperature <= 0 or not 0 <= self.image_weight <= 1:
            raise ConfigError("temperature must be above 0 and image_weight within [0, 1]")
        if self.frozen_text_layers < 0 or self.projection_dim < 1:
            raise ConfigError("frozen_text_layers must not be negative and projection_dim must be positive")
        if self.hidden_dim is not None and self.hidden_dim < 1:
            raise ConfigError(f"hidden_dim is {self.hidden_dim}: it must be positive")
        if self.text_pool not in ("max", "mean"):
            raise ConfigError(f"text_pool is {self.text_pool!r}: known are 'max' and 'mean'")
        check_positives(self.positives)
        check_patch_dropout(self.patch_dropout)
        attention_arguments(self.attention_dropout)


def attention_arguments(dropout: float | None) -> dict[str, Any]:
    """What `create_text_encoder` is told of `attention_dropout`. Raises ConfigError unless it is a probability."""
    if dropout is None:
        return {}
    if not 0 <= dropout < 1:
        raise ConfigError(f"attention_dropout is {dropout}: it must be 0 or above and below 1")
    return {"attention_probs_dropout_prob": dropout}


def check_patch_dropout(share: float) -> None:
    """Raises ConfigError unless something is left."""
    if not 0 <= share < 1:
        raise ConfigError(f"patch_dropout is {share}: it must be 0 or above and below 1")


def check_positives(positives: str) -> None:
    """Raises ConfigError, naming what there is."""
    if positives not in get_args(Positives):
        raise ConfigError(f"positives is {positives!r}: known are {', '.join(get_args(Positives))}")
