"""SigLIP: every pair of a batch judged for itself (Zhai et al., arXiv 2303.15343, ICCV 2023)."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from medvl import losses
from medvl.models.dual_encoders.clip import CLIP
from medvl.models.dual_encoders.clip_configs import SigLIPConfig


class SigLIP(CLIP):
    """CLIP's towers under a pairwise sigmoid loss with a learned scale and bias (section 3.2).

    Attributes:
        logit_bias: added to all logits.
    """

    name = SigLIPConfig.system
    Config: ClassVar[type] = SigLIPConfig

    def __init__(self, config: SigLIPConfig, *parts: Any, **prepares: Any) -> None:
        super().__init__(config, *parts, **prepares)
        self.logit_bias = nn.Parameter(torch.tensor(config.bias))

    def load_scalars(self, tensors: Mapping[str, Tensor], source: str) -> None:
        """Take scale and bias. A file without a bias was trained with a softmax, whose scale says nothing here."""
        if "logit_bias" in tensors:
            super().load_scalars(tensors, source)
            with torch.no_grad():
                self.logit_bias.copy_(tensors["logit_bias"].reshape(()))

    def contrast(self, image_NE: Tensor, text_NE: Tensor, groups: Sequence[Tensor] = ()) -> Tensor:
        """The loss of pairs of unit vectors, a scalar."""
        return losses.siglip(image_NE, text_NE, self.logit_scale.exp(), self.logit_bias, groups=groups)
