"""SigLIP: a sigmoid loss over all pairs of a batch (Zhai et al., arXiv 2303.15343, ICCV 2023)."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from medvl import encoders, losses
from medvl.common.config_io import check_within
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
    scalar_lr_mult: float = 1.0
    """Ratio of the learning rate of scale and bias to the other parameters'."""
    max_tokens: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        check_within(self, "(0, inf)", "scalar_lr_mult")


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
        """Load scale and bias; neither if the bias is missing, as the scale of a softmax does
        not fit a sigmoid.
        """
        if "logit_bias" in tensors:
            super().load_scalars(tensors, source)
            with torch.no_grad():
                self.logit_bias.copy_(tensors["logit_bias"].reshape(()))

    def parameter_groups(
        self, lr: float, weight_decay: float, layer_decay: float = 1.0
    ) -> list[dict[str, Any]]:
        """Return the groups of an optimiser; scale and bias have no weight decay
        (`SigLIPConfig.scalar_lr_mult`).
        """
        groups = encoders.parameter_groups(self, lr, weight_decay, layer_decay=layer_decay)
        scalars = [each for each in (self.logit_scale, self.logit_bias) if each.requires_grad]
        for group in groups:
            group["params"] = [
                each for each in group["params"] if not any(each is scalar for scalar in scalars)
            ]
        rate = lr * self.config.scalar_lr_mult
        return [
            *groups,
            {"name": "scale and bias", "params": scalars, "lr": rate, "weight_decay": 0.0},
        ]

    def contrast(self, image_NE: Tensor, text_NE: Tensor, groups: Sequence[Tensor] = ()) -> Tensor:
        """Return the loss of pairs of unit vectors, a scalar."""
        return losses.siglip(image_NE, text_NE, self.scale(), self.logit_bias, groups=groups)
