"""The image encoder and the text encoder below a fusion-encoder."""

from typing import Any

from medvl.encoders import ImageEncoder, TextEncoder, create_image_encoder, create_text_encoder
from medvl.errors import ConfigError
from medvl.models.fusion_encoders.config import FusionConfig
from medvl.models.fusion_encoders.layers.inputs import ImageSource, RegionEncoder

_REGIONS = "regions:"


def create_encoders(config: FusionConfig, *, pretrained: bool) -> tuple[ImageSource, TextEncoder]:
    """Create the encoders that a configuration names; a `RegionEncoder` for `regions:WIDTH`.

    Raises ConfigError and WeightsError as `create_image_encoder` and `create_text_encoder` do.
    """
    text_arguments: dict[str, Any] = dict(config.text_arguments)
    text_encoder = create_text_encoder(
        config.text_encoder, pretrained=pretrained, vocab_size=config.vocab_size, **text_arguments
    )
    if config.image_encoder.startswith(_REGIONS):
        width = config.image_encoder.removeprefix(_REGIONS)
        if not width.isdigit() or int(width) < 1 or config.image_arguments:
            message = f"expected regions:WIDTH as in regions:2055, no image_arguments; got {config.image_encoder!r}"
            raise ConfigError(message, "wrong_type", field="image_encoder")
        return RegionEncoder(int(width)), text_encoder
    image_arguments: dict[str, Any] = dict(config.image_arguments)
    image_encoder = create_image_encoder(
        config.image_encoder, pretrained=pretrained, image_size=config.image_size, **image_arguments
    )
    return image_encoder, text_encoder


def create_pixel_encoders(config: FusionConfig, name: str, *, pretrained: bool) -> tuple[ImageEncoder, TextEncoder]:
    """Create the encoders of a system that does not support precomputed regions.

    Raises ConfigError if the configuration asks for regions, and otherwise as `create_encoders`.
    """
    image_encoder, text_encoder = create_encoders(config, pretrained=pretrained)
    return check_pixels(image_encoder, name), text_encoder


def check_pixels(image_encoder: ImageSource, name: str) -> ImageEncoder:
    """Return the encoder. Raises ConfigError unless it reads pixels."""
    if not isinstance(image_encoder, ImageEncoder):
        message = f"{name} takes no precomputed regions; choose an image encoder"
        raise ConfigError(message, "unsupported", field="image_encoder")
    return image_encoder
