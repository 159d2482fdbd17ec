"""SigLIP: a sigmoid loss over all pairs of a batch (Zhai et al., arXiv 2303.15343, ICCV 2023)."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from medvl import losses
from medvl.models.dual_encoders.clip import CLIP, CLIPConfig
from medvl.models.registry import register_system


@dataclasses.dataclass(frozen=True, kw_only=True)
class SigLIPConfig(CLIPConfig):
    """Settings on any two encoders; the defaults are open_clip's ViT-B/16."""

    image_encoder: str = "open_clip:ViT-B-16-SigLIP"
    text_encoder: str = "open_clip:ViT-B-16-SigLIP"
    fit: Literal["crop", "pad", "squash"] = "squash"
    temperature: float = 0.1
    """Initial temperature: t' = log 10 (section 3.2)."""
    bias: float = -10.0
    """Initial bias of all logits: nearly all pairs of a batch are negatives."""
    max_scale: float | None = None
    max_tokens: int = 64


@register_system("siglip")
class SigLIP(CLIP):
    """CLIP's encoders under a pairwise sigmoid loss with a learned scale and bias (section 3.2).

    Attributes:
        logit_bias: added to all logits.
    """

    Config = SigLIPConfig

    def __init__(self, config: SigLIPConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.logit_bias = nn.Parameter(torch.tensor(config.bias))

    def load_scalars(self, tensors: Mapping[str, Tensor], source: str) -> None:
        """Load scale and bias; without a bias neither, since the scale of a softmax does not fit a sigmoid."""
        if "logit_bias" in tensors:
            super().load_scalars(tensors, source)
            with torch.no_grad():
                self.logit_bias.copy_(tensors["logit_bias"].reshape(()))

    def contrast(self, image_NE: Tensor, text_NE: Tensor, groups: Sequence[Tensor] = ()) -> Tensor:
        """Return the loss of pairs of unit vectors, a scalar."""
        return losses.siglip(image_NE, text_NE, self.scale(), self.logit_bias, groups=groups)
