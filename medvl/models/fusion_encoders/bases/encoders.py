"""The image encoder and the text encoder below a fusion-encoder."""

import re
from typing import Any, cast

from medvl.encoders import ImageEncoder, TextEncoder, create_image_encoder, create_text_encoder
from medvl.encoders.box_codes import BoxCode
from medvl.encoders.regions import RegionEncoder
from medvl.errors import ConfigError
from medvl.models.fusion_encoders.bases.config import FusionConfig
from medvl.models.fusion_encoders.parts.inputs import ImageSource

_REGIONS = re.compile(r"regions:([1-9][0-9]*)(?:\+([47]))?")


def create_encoders(config: FusionConfig, *, pretrained: bool) -> tuple[ImageSource, TextEncoder]:
    """Create the encoders that a configuration names; a `RegionEncoder` for `regions:WIDTH` and `regions:WIDTH+CODE`.

    Raises ConfigError and WeightsError as `create_image_encoder` and `create_text_encoder` do.
    """
    text_arguments: dict[str, Any] = dict(config.text_arguments)
    text_encoder = create_text_encoder(
        config.text_encoder, pretrained=pretrained, vocab_size=config.vocab_size, **text_arguments
    )
    if config.image_encoder.startswith("regions:"):
        match = _REGIONS.fullmatch(config.image_encoder)
        if match is None or config.image_arguments:
            message = (
                "expected regions:WIDTH or regions:WIDTH+CODE as in regions:1024+7 (CODE 4 or 7 numbers of a box), "
                f"without image_arguments; got {config.image_encoder!r}"
            )
            raise ConfigError(message, "wrong_type", field="image_encoder")
        code = match[2] and cast(BoxCode, int(match[2]))
        return RegionEncoder(int(match[1]), code or None), text_encoder
    image_arguments: dict[str, Any] = {"image_size": config.image_size, **config.image_arguments}
    image_encoder = create_image_encoder(config.image_encoder, pretrained=pretrained, **image_arguments)
    return image_encoder, text_encoder


def create_pixel_encoders(config: FusionConfig, name: str, *, pretrained: bool) -> tuple[ImageEncoder, TextEncoder]:
    """Create the encoders of a system that does not support precomputed regions.

    Raises ConfigError if the configuration sets regions, and otherwise as `create_encoders`.
    """
    image_encoder, text_encoder = create_encoders(config, pretrained=pretrained)
    return check_pixels(image_encoder, name), text_encoder


def check_pixels(image_encoder: ImageSource, name: str) -> ImageEncoder:
    """Return the encoder. Raises ConfigError unless it reads pixels."""
    if not isinstance(image_encoder, ImageEncoder):
        message = f"{name} takes no precomputed regions; choose an image encoder"
        raise ConfigError(message, "unsupported", field="image_encoder")
    return image_encoder
