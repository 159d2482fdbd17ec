"""CLIP (Radford et al., arXiv 2103.00020) on any two encoders, among them every dual-encoder of
open_clip.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

import torch
from torch import Tensor

from medvl import losses
from medvl.common.config_io import check_within
from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.encoders.pretrained import check_values
from medvl.errors import ConfigError, WeightsError
from medvl.models.dual_encoders.bases.base import (
    LearnedScale,
    Positives,
    ScaleConfig,
    create_clip_encoders,
    create_heads,
    load_text_head,
    read_whole_model,
)
from medvl.models.dual_encoders.bases.pairs import Pairs, gather_global
from medvl.models.registry import register_system
from medvl.schema import Losses


@dataclasses.dataclass(frozen=True, kw_only=True)
class CLIPConfig(ScaleConfig):
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
class CLIP(LearnedScale):
    """Symmetric InfoNCE with a learned temperature (section 2.3, figure 3).

    Attributes:
        image_head, text_head: Identity where the encoder has a projection of its own.
    """

    Config = CLIPConfig

    @classmethod
    def build(cls, config: CLIPConfig, *, pretrained: bool, tokenizer: Tokenizer | None) -> Self:
        encoders = create_clip_encoders(config, pretrained, tokenizer)
        transform = config.transform(stored_size=config.stored_size)
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
