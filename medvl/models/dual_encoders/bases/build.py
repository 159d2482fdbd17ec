"""Encoders and heads of a CLIP-like model, from any library, with open_clip's rules for projections and weights.

Tensors of an open_clip state dict and their places in the model:

    visual.*                        image_encoder.backbone.*, projection included
    transformer.*, ln_final.* ...   text_encoder.backbone.* (also with the prefix `text.`)
    text_projection                 text_encoder.projection.matrix; of a linear layer .weight and .bias
    text.transformer.* (a BERT)     text_encoder.backbone.*
    text.proj.*                     text_head.*; text_encoder.projection.* where the preset has it (BiomedCLIP)
    logit_scale, logit_bias         the same; the bias is SigLIP's
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.encoders import ImageEncoder, TextEncoder, create_image_encoder, create_text_encoder
from medvl.encoders.image.factory import image_has_projection
from medvl.encoders.presets import IMAGE_PRESETS, TEXT_PRESETS
from medvl.encoders.pretrained import CLIP_SCALARS, KeyMap, Pretrained, fitting_keys, load_strictly, read_source
from medvl.encoders.text.factory import text_has_projection
from medvl.errors import ConfigError


def create_encoders(config: Any, image: Mapping[str, Any], text: Mapping[str, Any]) -> tuple[ImageEncoder, TextEncoder]:
    """Create both encoders of a system from the arguments that it sets and those of the configuration.

    Raises ConfigError where both set the same argument.
    """
    image_encoder = create_image_encoder(config.image_encoder, **_merged("image_arguments", image, config))
    return image_encoder, create_text_encoder(config.text_encoder, **_merged("text_arguments", text, config))


def create_clip_encoders(
    config: Any, pretrained: bool, tokenizer: Tokenizer | None
) -> tuple[ImageEncoder, TextEncoder]:
    """Create both encoders from a `CLIPConfig`, with their own projections where they have one."""
    source: Pretrained = (config.weights or True) if pretrained else False
    image: dict[str, Any] = {
        "pretrained": source,
        "image_size": config.image_size,
        "projection": image_has_projection(config.image_encoder),
        "mean": config.image_mean,
        "std": config.image_std,
    }
    text: dict[str, Any] = {
        "pretrained": source,
        "vocab_size": config.vocab_size,
        "pad_id": None if tokenizer is None else tokenizer.pad_id,  # SigLIP attends to padding
        "pool": config.text_pool,
        "projection": text_has_projection(config.text_encoder),
    }
    return create_encoders(config, image, text)


def create_heads(config: Any, image_encoder: ImageEncoder, text_encoder: TextEncoder) -> tuple[nn.Module, nn.Module]:
    """Create a head for each encoder without a projection, into the space of the other, or of `projection_dim`."""
    image_has, text_has = image_has_projection(config.image_encoder), text_has_projection(config.text_encoder)
    image_dim, text_dim = image_encoder.feature_dim, text_encoder.feature_dim
    if image_has and text_has and image_dim != text_dim:
        message = f"projections of {image_dim} and {text_dim} dimensions: take encoders of one model, or set embed_dim"
        raise ConfigError(message, "mismatch", field="text_encoder")
    shared = image_dim if image_has else text_dim if text_has else config.projection_dim
    image_head = nn.Identity() if image_has else nn.Linear(image_dim, shared, bias=False)
    if text_has:
        return image_head, nn.Identity()
    if config.text_head == "linear":
        return image_head, nn.Linear(text_dim, shared, bias=False)
    middle = (text_dim + shared) // 2
    layers = nn.Linear(text_dim, middle, bias=False), nn.GELU(), nn.Linear(middle, shared, bias=False)
    return image_head, nn.Sequential(*layers)


def load_text_head(head: nn.Module, tensors: Mapping[str, Tensor], source: str) -> None:
    """Load open_clip's head of a Hugging Face encoder. Raises WeightsError naming `source` where it does not fit."""
    if not isinstance(head, nn.Identity):
        own = {key: tensor for key, tensor in tensors.items() if key.startswith("text.proj.")}
        load_strictly(head, own, KeyMap(layouts=[[("text.proj.", "")]]), source)


def read_whole_model(config: Any) -> tuple[str, dict[str, Tensor]] | None:
    """Return the source, for messages, and the tensors of the one file with the pretrained weights of the whole model.

    None where each encoder has its own.
    """
    if config.weights is not None:
        source, tensors = read_source(config.image_encoder, config.weights, None)
    else:
        presets: Any = IMAGE_PRESETS.get(config.image_encoder), TEXT_PRESETS.get(config.text_encoder)
        published = {None if preset is None else preset.weights for preset in presets}
        weights = published.pop()
        if published or weights is None:
            return None
        source, tensors = read_source(config.image_encoder, True, weights)
    return source, fitting_keys(tensors, lambda keys: sum(key in CLIP_SCALARS for key in keys))


def _merged(field: str, settings: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """Return an encoder's arguments with those of the configuration. Raises ConfigError where both set the same one."""
    arguments: Mapping[str, Any] = getattr(config, field)
    twice = sorted(name for name in arguments if settings.get(name) is not None)
    if twice:
        raise ConfigError(f"{field} cannot set {', '.join(twice)}: use the system's settings", "conflict", field=field)
    return {**settings, **arguments}
