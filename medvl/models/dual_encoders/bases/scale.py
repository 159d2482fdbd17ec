"""The learned temperature that CLIP and its successors share."""

import math
from typing import Any

import torch
from torch import nn

from medvl.models.dual_encoders.bases.base import ContrastiveEncoder


class LearnedScale(ContrastiveEncoder):
    """A contrastive system whose temperature is learned, from `config.temperature` up to `config.max_scale`.

    Attributes:
        logit_scale: logarithm of the inverse temperature.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.logit_scale = nn.Parameter(torch.tensor(-math.log(config.temperature)))

    def clamp_scale(self) -> None:
        """Limit the scale to `max_scale` in place: beyond a clamp in the loss, the scale would have no gradient."""
        if self.config.max_scale is not None:
            with torch.no_grad():
                self.logit_scale.clamp_(max=math.log(self.config.max_scale))
