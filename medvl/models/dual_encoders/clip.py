"""CLIP (Radford et al., arXiv 2103.00020) on any two towers, and as any dual-encoder that open_clip has."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from medvl import losses
from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.data.transforms.image import EvalTransform
from medvl.encoders import ImageEncoder, TextEncoder, create_image_encoder, create_text_encoder
from medvl.encoders.image.factory import image_has_projection
from medvl.encoders.presets import IMAGE_PRESETS, TEXT_PRESETS
from medvl.encoders.pretrained import KeyMap, Pretrained, load_strictly, locate_weights, read_tensors
from medvl.encoders.text.factory import text_has_projection
from medvl.errors import ConfigError, WeightsError
from medvl.models.base import SystemConfig
from medvl.models.dual_encoders.base import (
    ContrastiveEncoder,
    Pairs,
    Positives,
    check_patch_dropout,
    check_positives,
    gather_global,
    groups_of,
)
from medvl.models.fusion_encoders.corruption import complete_rows
from medvl.models.registry import register_system
from medvl.schema import Batch, Embeddings, Losses

_TEXT_HEAD = "text.proj."
"""Beginning of the keys of what open_clip has over a Hugging Face tower."""


Statistics = tuple[float, ...]
"""One value for grey, or three."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CLIPConfig(SystemConfig):
    """CLIP (Radford et al., arXiv 2103.00020), on any two towers.

    A tower of open_clip brings its projection along, and so does a preset that was published with one; any other
    tower gets a head. `open_clip:NAME` twice is a model of open_clip; the defaults are OpenAI's ViT-B/32.
    """

    image_encoder: str = "clip_vit_b32"
    image_arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Sizes for its constructor, by its library's names; `embed_dim` is that of open_clip's projections."""
    text_encoder: str = "clip_text"
    text_arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    weights: str | None = None
    """What `pretrained` starts from: the file of a whole open_clip model, a folder with one, or
    `OWNER/NAME@COMMIT[:FILE]` on the hub. None takes the published file of each encoder's preset."""
    image_size: int = 224
    fit: Literal["crop", "pad", "squash"] = "crop"
    """How an image is made square for inference (`medvl.data.transforms.image.EvalTransform`)."""
    stored_size: int | None = None
    """As in `EvalTransform`."""
    image_mean: Statistics | None = None
    """Of pixels in 0..1; None is the image encoder's own."""
    image_std: Statistics | None = None
    text_pool: Literal["cls", "mean", "max", "eos"] | None = None
    """From tokens to one vector; None is the text encoder's own way."""
    text_head: Literal["linear", "mlp"] = "linear"
    """Of a text encoder without a projection of its own, as open_clip makes it: no biases; `mlp` is halfway as wide
    inside, with a GELU."""
    projection_dim: int = 512
    """E, of the shared space, where neither tower decides it."""
    temperature: float = 0.07
    """At the start; what is learned is the logarithm of its inverse, the scale."""
    max_scale: float | None = 100.0
    """The scale is brought back to this before each step of the training (section 2.5). None lets it grow."""
    positives: Positives = "own"
    """As for ConVIRT."""
    patch_dropout: float = 0.0
    """As for ConVIRT."""
    max_tokens: int = 77
    vocab_size: int | None = None
    """Of the text encoder; None is the preset's own, or the tokenizer's where one is given."""

    def __post_init__(self) -> None:
        if self.temperature <= 0 or self.projection_dim < 1:
            raise ConfigError("temperature must be above 0 and projection_dim positive")
        if self.max_scale is not None and self.max_scale < 1 / self.temperature:
            raise ConfigError(
                f"max_scale {self.max_scale} is below the scale at the start, 1 / {self.temperature}: raise it, or None"
            )
        check_positives(self.positives)
        check_patch_dropout(self.patch_dropout)


@register_system("clip")
class CLIP(ContrastiveEncoder):
    """Symmetric InfoNCE with a learned temperature (section 2.3, figure 3).

    Where the tensors of an open_clip state dict are:

        visual.*                        image_encoder.backbone.*, projection included
        transformer.*, ln_final.* ...   text_encoder.backbone.* (also with `text.` before them)
        text_projection                 text_encoder.projection.matrix; a linear layer's are .weight and .bias
        text.transformer.* (a BERT)     text_encoder.backbone.*
        text.proj.*                     text_head.*; text_encoder.projection.* where the preset has it (BiomedCLIP)
        logit_scale, logit_bias         the same; the bias is SigLIP's

    A sample without an image or without a text is left out of the loss.

    Attributes:
        image_head, text_head: Identity where the tower has a projection of its own.
        logit_scale: logarithm of the inverse temperature.
    """

    Config: ClassVar[type] = CLIPConfig

    def __init__(self, config: CLIPConfig, *parts: Any, **prepares: Any) -> None:
        super().__init__(config, *parts, **prepares)
        self.logit_scale = nn.Parameter(torch.tensor(-math.log(config.temperature)))

    @classmethod
    def build(cls, config: CLIPConfig, *, pretrained: bool, tokenizer: Tokenizer | None) -> Self:
        """Raises ConfigError and WeightsError as `create_model` says."""
        image_encoder, text_encoder = _towers(config, pretrained, tokenizer)
        heads = _heads(config, image_encoder, text_encoder)
        transform = EvalTransform(size=config.image_size, fit=config.fit, stored_size=config.stored_size)
        model = cls(config, image_encoder, text_encoder, *heads, transform=transform, tokenizer=tokenizer)
        path = _whole_file(config) if pretrained else None
        if path is not None:
            tensors = {key.removeprefix("module."): tensor for key, tensor in read_tensors(path).items()}
            model.load_rest(tensors, str(path))
        return model

    def load_rest(self, tensors: Mapping[str, Tensor], source: str) -> None:
        """Take what is in neither tower from an open_clip state dict: a head over the text, and the scale.

        Raises WeightsError, which names `source`, when something is missing or of another shape.
        """
        if not isinstance(self.text_head, nn.Identity):
            head = {key: tensor for key, tensor in tensors.items() if key.startswith(_TEXT_HEAD)}
            load_strictly(self.text_head, head, KeyMap(layouts=[[(_TEXT_HEAD, "")]]), source)
        self.load_scalars(tensors, source)
        self.clamp_scale()

    def load_scalars(self, tensors: Mapping[str, Tensor], source: str) -> None:
        """Take the scale. Raises WeightsError when there is none."""
        if "logit_scale" not in tensors:
            raise WeightsError(f"{source} has no logit_scale: it is not the file of a whole model of open_clip")
        with torch.no_grad():
            self.logit_scale.copy_(tensors["logit_scale"].reshape(()))

    def encode_pairs(self, batch: Batch) -> Pairs:
        """See the base class."""
        texts = Embeddings(self.encode_text(batch.ids_BT, batch.mask_BT))  # first: packed texts wait for the device
        images = Embeddings(self.encode_image(batch.image_BCHW))
        pairs = Pairs(images, texts, groups_of(batch, self.config.positives))
        if batch.has_image_B is None and batch.has_text_B is None:
            return pairs
        return pairs.rows(complete_rows(batch))

    def compare_pairs(self, pairs: Pairs) -> Losses:
        """See the base class."""
        if self.training:
            self.clamp_scale()
        image_NE, text_NE, groups = gather_global(pairs)
        if not len(image_NE):  # not one pair on any rank: 0, with gradients of zero, so that no rank waits for one
            nothing = torch.stack([image_NE.sum(), text_NE.sum(), *self.parameters(recurse=False)]).sum() * 0
            return Losses.sum(contrastive=nothing)
        return Losses.sum(contrastive=self.contrast(image_NE, text_NE, groups))

    def contrast(self, image_NE: Tensor, text_NE: Tensor, groups: Sequence[Tensor] = ()) -> Tensor:
        """The loss of pairs of unit vectors, a scalar."""
        return losses.clip(image_NE, text_NE, self.logit_scale.exp(), groups=groups)

    def clamp_scale(self) -> None:
        """Bring the scale back under `max_scale`, in place: a clamp in the loss would have no gradient beyond it."""
        if self.config.max_scale is not None:
            with torch.no_grad():
                self.logit_scale.clamp_(max=math.log(self.config.max_scale))


def _towers(config: CLIPConfig, pretrained: bool, tokenizer: Tokenizer | None) -> tuple[ImageEncoder, TextEncoder]:
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
        "pad_id": None if tokenizer is None else tokenizer.pad_id,  # SigLIP attends to it
        "pool": config.text_pool,
        "projection": text_has_projection(config.text_encoder),
    }
    image_encoder = create_image_encoder(config.image_encoder, **_joined("image_arguments", image, config))
    text_encoder = create_text_encoder(config.text_encoder, **_joined("text_arguments", text, config))
    return image_encoder, text_encoder


def _joined(field: str, ours: Mapping[str, Any], config: CLIPConfig) -> dict[str, Any]:
    """What the system tells an encoder, and what the configuration adds. Raises ConfigError where both say the same."""
    theirs: Mapping[str, Any] = getattr(config, field)
    twice = sorted(set(ours) & set(theirs))
    if twice:
        raise ConfigError(f"{field} has {', '.join(twice)}: that is decided by the system's own settings")
    return {**ours, **theirs}


def _heads(config: CLIPConfig, image_encoder: ImageEncoder, text_encoder: TextEncoder) -> tuple[nn.Module, nn.Module]:
    """Into the space of the tower that has a projection of its own; `projection_dim` where none has."""
    image_has, text_has = image_has_projection(config.image_encoder), text_has_projection(config.text_encoder)
    image_dim, text_dim = image_encoder.feature_dim, text_encoder.feature_dim
    if image_has and text_has and image_dim != text_dim:
        raise ConfigError(
            f"the projection of {config.image_encoder} has {image_dim} dimensions and that of {config.text_encoder} "
            f"{text_dim}: take towers of one model, or set embed_dim in image_arguments and text_arguments"
        )
    shared = image_dim if image_has else text_dim if text_has else config.projection_dim
    image_head = nn.Identity() if image_has else nn.Linear(image_dim, shared, bias=False)
    if text_has:
        return image_head, nn.Identity()
    if config.text_head == "linear":
        return image_head, nn.Linear(text_dim, shared, bias=False)
    middle = (text_dim + shared) // 2
    layers = nn.Linear(text_dim, middle, bias=False), nn.GELU(), nn.Linear(middle, shared, bias=False)
    return image_head, nn.Sequential(*layers)


def _whole_file(config: CLIPConfig) -> Path | None:
    """The one file that both towers start from; None where each has its own."""
    if config.weights is not None:
        return locate_weights(config.image_encoder, config.weights, None)
    presets: Any = IMAGE_PRESETS.get(config.image_encoder), TEXT_PRESETS.get(config.text_encoder)
    published = {None if preset is None else preset.weights for preset in presets}
    weights = published.pop()
    return None if published or weights is None else locate_weights(config.image_encoder, True, weights)
