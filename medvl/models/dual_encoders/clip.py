"""CLIP (Radford et al., arXiv 2103.00020) on any two encoders, among them every dual-encoder of
open_clip.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from medvl import losses
from medvl.common.config_io import check_within
from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.data.transforms.image import CropRounding
from medvl.encoders import ImageEncoder, TextEncoder
from medvl.encoders.image.factory import image_has_projection
from medvl.encoders.presets import IMAGE_PRESETS, TEXT_PRESETS
from medvl.encoders.pretrained import (
    CLIP_SCALARS,
    KeyMap,
    Pretrained,
    check_values,
    fitting_keys,
    load_strictly,
    read_source,
)
from medvl.encoders.text.factory import text_has_projection
from medvl.errors import ConfigError, WeightsError
from medvl.models.dual_encoders.bases.base import (
    AlteredTextConfig,
    DualEncoder,
    Positives,
    ScaleConfig,
    create_encoders,
)
from medvl.models.dual_encoders.bases.pairs import Pairs, gather_global
from medvl.models.registry import register_system
from medvl.schema import Losses


@dataclasses.dataclass(frozen=True, kw_only=True)
class CLIPConfig(ScaleConfig, AlteredTextConfig):
    """Settings on any two encoders; the defaults are OpenAI's ViT-B/32, and `open_clip:NAME` twice
    is another model.

    Encoders of open_clip, and presets published with a projection, keep it; any other encoder gets
    a head.
    """

    image_encoder: str = "clip_vit_b32"
    image_arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """As for other systems, and open_clip's (some nested); `embed_dim` is the width of
    open_clip's projections.
    """
    text_encoder: str = "clip_text"
    text_arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    weights: str | None = None
    """Source of `pretrained`: the file of a whole open_clip model, a folder with one, or
    `OWNER/NAME@COMMIT[:FILE]` on the hub. None takes the published file of each encoder's
    preset.
    """
    stored_size: int | None = None
    """As in `EvalTransform`."""
    margin: int = 0
    """As in `EvalTransform`."""
    crop_rounding: CropRounding = "nearest"
    """As in `EvalTransform`: imported models have that of their image processor."""
    image_mean: tuple[float, ...] | None = None
    """Mean of pixels in 0..1, one value or three; None takes the image encoder's."""
    image_std: tuple[float, ...] | None = None
    text_pool: Literal["cls", "mean", "max", "eos"] | None = None
    """Pooling of tokens; None takes the text encoder's."""
    text_head: Literal["linear", "mlp"] = "linear"
    """Head of a text encoder without a projection, as in open_clip: no biases; `mlp` has a GELU
    at half the width.
    """
    positives: Positives = "own"
    patch_dropout: float = 0.0
    """As for ConVIRT."""
    max_tokens: int = 77

    def __post_init__(self) -> None:
        super().__post_init__()
        check_within(self, "[0, 1)", "patch_dropout")
        if self.weights and (self.image_weights or self.text_weights):
            raise ConfigError(
                "give weights, or image_weights and text_weights", "conflict", field="weights"
            )


@register_system("clip")
class CLIP(DualEncoder):
    """Symmetric InfoNCE with a learned temperature (section 2.3, figure 3).

    Attributes:
        image_head, text_head: Identity where the encoder has a projection of its own.
    """

    Config = CLIPConfig
    learns_scale = True

    @classmethod
    def build(cls, config: CLIPConfig, *, pretrained: bool, tokenizer: Tokenizer | None) -> Self:
        encoders = create_clip_encoders(config, pretrained, tokenizer)
        transform = config.transform(
            stored_size=config.stored_size,
            margin=config.margin,
            crop_rounding=config.crop_rounding,
        )
        heads = create_heads(config, *encoders)
        model = cls(config, *encoders, *heads, transform=transform, tokenizer=tokenizer)
        whole = read_whole_model(config) if pretrained else None
        if whole is not None:
            source, tensors = whole
            load_text_head(model.text_head, tensors, source)
            check_values(tensors, dict(model.named_parameters(recurse=False)), source)
            model.load_scalars(tensors, source)
            model.clamp_scale()
        return model

    def load_scalars(self, tensors: Mapping[str, Tensor], source: str) -> None:
        """Load the scale from an open_clip state dict. Raises WeightsError naming `source` when
        there is none.
        """
        if "logit_scale" not in tensors:
            raise WeightsError(
                f"{source} has no logit_scale: expected the file of a whole open_clip model",
                "missing",
            )
        with torch.no_grad():
            self.logit_scale.copy_(tensors["logit_scale"].reshape(()))

    def compare_pairs(self, pairs: Pairs) -> Losses:
        return Losses.sum(contrastive=self.contrast(*gather_global(pairs)))

    def contrast(self, image_NE: Tensor, text_NE: Tensor, groups: Sequence[Tensor] = ()) -> Tensor:
        """Return the loss of pairs of unit vectors, a scalar."""
        return losses.clip(image_NE, text_NE, self.scale(), groups=groups)


# Encoders and heads of a CLIP-like model, from any library, with open_clip's rules for
# projections and weights.
#
# Tensors of an open_clip state dict and their places in the model:
#
#     visual.*                        image_encoder.backbone.*, projection included
#     transformer.*, ln_final.* ...   text_encoder.backbone.* (also with the prefix `text.`)
#     text_projection                 text_encoder.projection.matrix; of a linear layer .weight
#     and .bias
#     text.transformer.* (a BERT)     text_encoder.backbone.*
#     text.proj.*                     text_head.*; text_encoder.projection.* where the preset has
#     it (BiomedCLIP)
#     logit_scale, logit_bias         the same; the bias is SigLIP's


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


def create_heads(
    config: Any, image_encoder: ImageEncoder, text_encoder: TextEncoder
) -> tuple[nn.Module, nn.Module]:
    """Create a head for each encoder without a projection, into the space of the other, or of
    `projection_dim`.
    """
    image_has = image_has_projection(config.image_encoder)
    text_has = text_has_projection(config.text_encoder)
    image_dim = image_encoder.feature_dim
    text_dim = text_encoder.feature_dim
    if image_has and text_has and image_dim != text_dim:
        message = (
            f"projections of {image_dim} and {text_dim} dimensions: take encoders of one "
            f"model, or set embed_dim"
        )
        raise ConfigError(message, "mismatch", field="text_encoder")
    shared = image_dim if image_has else text_dim if text_has else config.projection_dim
    image_head = nn.Identity() if image_has else nn.Linear(image_dim, shared, bias=False)
    if text_has:
        return image_head, nn.Identity()
    if config.text_head == "linear":
        return image_head, nn.Linear(text_dim, shared, bias=False)
    middle = (text_dim + shared) // 2
    layers = (
        nn.Linear(text_dim, middle, bias=False),
        nn.GELU(),
        nn.Linear(middle, shared, bias=False),
    )
    return image_head, nn.Sequential(*layers)


def load_text_head(head: nn.Module, tensors: Mapping[str, Tensor], source: str) -> None:
    """Load open_clip's head of a Hugging Face encoder. Raises WeightsError naming `source` where
    it does not fit.
    """
    if not isinstance(head, nn.Identity):
        own = {key: tensor for key, tensor in tensors.items() if key.startswith("text.proj.")}
        load_strictly(head, own, KeyMap(layouts=[[("text.proj.", "")]]), source)


def read_whole_model(config: Any) -> tuple[str, dict[str, Tensor]] | None:
    """Return the source, for messages, and the tensors of the one file with the pretrained weights
    of the whole model.

    None where each encoder has its own.
    """
    if config.weights is not None:
        source, tensors = read_source(config.image_encoder, config.weights, None)
    else:
        presets: Any = (
            IMAGE_PRESETS.get(config.image_encoder),
            TEXT_PRESETS.get(config.text_encoder),
        )
        published = {None if preset is None else preset.weights for preset in presets}
        weights = published.pop()
        if published or weights is None:
            return None
        source, tensors = read_source(config.image_encoder, True, weights)
    return source, fitting_keys(tensors, lambda keys: sum(key in CLIP_SCALARS for key in keys))
