"""GLoRIA's published settings. No torch here: a recipe reads its command line without it."""

import dataclasses
from typing import ClassVar, Literal

from medvl.errors import ConfigError
from medvl.models.dual_encoders.configs import attention_arguments


@dataclasses.dataclass(frozen=True, kw_only=True)
class GLoRIAConfig:
    """GLoRIA (Huang et al., ICCV 2021), as its authors' configuration for CheXpert has it.

    Theirs strips the punctuation from a text before it is read; here it stays, and every mark is a word.
    """

    system: ClassVar[str] = "gloria"

    image_encoder: str = "resnet50"
    text_encoder: str = "bioclinicalbert"
    image_size: int = 224
    fit: Literal["crop", "pad", "squash"] = "pad"
    """How an image is made square for inference (`medvl.data.transforms.image.EvalTransform`)."""
    margin: int = 16
    """Pixels that are then cut off on every side: the center of a padded square of 256."""
    encoder_size: int | None = 299
    """Side to which the image encoder's input is stretched, bilinearly, on the device; None is `image_size` itself."""
    pixel_mean: float = 0.5
    pixel_std: float = 0.5
    """Of pixels in 0..1, whatever the image encoder was published with."""
    patch_level: int = -2
    """Stage of the image encoder that regions are from: -2 is layer3 of a ResNet-50, 19 x 19 at 299 pixels. Vision
    Transformers have -1 only."""
    projection_dim: int = 768
    """E, of the shared space. A text encoder of this width has no head."""
    text_layers: int = 4
    """So many of the last layers are combined."""
    text_reduce: Literal["sum", "mean"] = "sum"
    frozen_text_layers: int = 0
    """The embedding layer and this many layers above it are not trained; 0 trains everything."""
    attention_dropout: float | None = None
    """As for ConVIRT."""
    local_feature_norm: float | None = None
    """Length that every region and word is brought to before they are compared. None leaves them as they are, as the
    paper does: then their own length says how sharp the attention is, and where it is large from the start, one word
    has every region to itself, no gradient changes that, and all regions are attended alike."""
    text_token: bool = True
    """The text's first token stands among the words that share out the regions, as in the published training. It is
    unlike all of them, and can keep every region for itself."""
    word_pool: Literal["sum", "mean"] = "sum"
    """How the matches of a text's words become one, before the logarithm; under the sum, more words match better."""
    temp1: float = 4.0
    """Of a word's attention over regions."""
    temp2: float = 5.0
    """Of the words in a text."""
    temp3: float = 10.0
    """Of the contrast, local and global."""
    local_weight: float = 1.0
    global_weight: float = 1.0
    max_tokens: int = 97
    vocab_size: int | None = None
    """Of the text encoder; None is the preset's own, or the tokenizer's where one is given."""

    def __post_init__(self) -> None:
        for name in ("temp1", "temp2", "temp3", "pixel_std", "local_feature_norm"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)}")
        if min(self.local_weight, self.global_weight) < 0 or self.local_weight + self.global_weight == 0:
            raise ConfigError("local_weight and global_weight must not be negative, and not both 0")
        if self.frozen_text_layers < 0 or min(self.projection_dim, self.text_layers) < 1:
            raise ConfigError(
                "frozen_text_layers must not be negative; projection_dim and text_layers must be positive"
            )
        for name, known in (("word_pool", ("sum", "mean")), ("text_reduce", ("sum", "mean"))):
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} is {getattr(self, name)!r}: known are {' and '.join(map(repr, known))}")
        attention_arguments(self.attention_dropout)
