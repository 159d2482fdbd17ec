"""The published settings of CLIP and its kin, side by side. No torch here, as in
`medvl.models.dual_encoders.configs`."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from medvl.errors import ConfigError
from medvl.models.dual_encoders.configs import Positives, check_patch_dropout, check_positives

Statistics = tuple[float, ...]
"""One value for grey, or three."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CLIPConfig:
    """CLIP (Radford et al., arXiv 2103.00020), on any two towers.

    A tower of open_clip brings its projection along, and so does a preset that was published with one; any other
    tower gets a head. `open_clip:NAME` twice is a model of open_clip; the defaults are OpenAI's ViT-B/32.
    """

    system: ClassVar[str] = "clip"

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
        for name in ("image_mean", "image_std"):  # lists, where they were read from JSON
            if getattr(self, name) is not None:
                object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.temperature <= 0 or self.projection_dim < 1:
            raise ConfigError("temperature must be above 0 and projection_dim positive")
        if self.max_scale is not None and self.max_scale < 1 / self.temperature:
            raise ConfigError(
                f"max_scale {self.max_scale} is below the scale at the start, 1 / {self.temperature}: raise it, or None"
            )
        check_positives(self.positives)
        check_patch_dropout(self.patch_dropout)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheXzeroConfig(CLIPConfig):
    """CheXzero (Tiu et al., Nature Biomedical Engineering 2022): CLIP ViT-B/32, trained on with radiographs.

    As published: squares of 320 pixels on black, brought to 224 by bicubic interpolation, normalised by the mean and
    the standard deviation of MIMIC-CXR's pixels. Its code lets the scale grow; OpenAI's weights start at 100, and here
    it stays below that unless `max_scale` is None.
    """

    system: ClassVar[str] = "chexzero"

    fit: Literal["crop", "pad", "squash"] = "pad"
    stored_size: int | None = 320
    image_mean: Statistics | None = (101.48761 / 255,)
    image_std: Statistics | None = (83.43944 / 255,)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SigLIPConfig(CLIPConfig):
    """SigLIP (Zhai et al., arXiv 2303.15343), on any two towers; the defaults are open_clip's ViT-B/16."""

    system: ClassVar[str] = "siglip"

    image_encoder: str = "open_clip:ViT-B-16-SigLIP"
    text_encoder: str = "open_clip:ViT-B-16-SigLIP"
    fit: Literal["crop", "pad", "squash"] = "squash"
    temperature: float = 0.1
    """Of t' = log 10 (section 3.2)."""
    bias: float = -10.0
    """Added to all logits, at the start: nearly all pairs of a batch do not belong together."""
    max_scale: float | None = None
    max_tokens: int = 64
