"""The learned temperature that CLIP and its successors share."""

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor, nn

from medvl.common.checks import check_within
from medvl.models.dual_encoders.bases.base import ContrastiveEncoder, DualEncoderConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaleConfig(DualEncoderConfig):
    """Settings of a dual-encoder whose temperature is learned; CLIP's by default."""

    temperature: float = 0.07
    """Initial temperature; the logarithm of its inverse, the scale, is learned."""
    max_scale: float | None = 100.0
    """Upper bound of the scale, applied before each training step (CLIP, section 2.5); None has no bound."""
    min_scale: float | None = None
    """Lower bound of the scale, likewise; MedCLIP's is 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_within(self, "(0, inf)", "temperature")
        check_within(self, f"(0, {1 / self.temperature}]", "min_scale")
        check_within(self, f"[{1 / self.temperature}, inf)", "max_scale")


class LearnedScale(ContrastiveEncoder):
    """A contrastive system whose temperature is learned, from `config.temperature` up to `config.max_scale`.

    Attributes:
        logit_scale: logarithm of the inverse temperature.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.logit_scale = nn.Parameter(torch.tensor(-math.log(config.temperature)))

    def scale(self) -> Tensor:
        """Return the factor of cosines, a scalar; in training, limit the parameter first."""
        if self.training:
            self.clamp_scale()
        return self.logit_scale.exp()

    def clamp_scale(self) -> None:
        """Limit the scale to its bounds in place: beyond a clamp in the loss, the scale would have no gradient."""
        least, most = (
            None if bound is None else math.log(bound) for bound in (self.config.min_scale, self.config.max_scale)
        )
        if least is not None or most is not None:
            with torch.no_grad():
                self.logit_scale.clamp_(min=least, max=most)
