"""CheXzero: CLIP, trained further on radiographs and impressions (Tiu et al., Nature Biomedical
Engineering 2022).
"""

import dataclasses
from typing import Literal

from medvl.models.dual_encoders.clip import CLIP, CLIPConfig
from medvl.models.registry import register_system


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheXzeroConfig(CLIPConfig):
    """Published settings: 320-pixel squares on black, bicubic to 224, mean and deviation of
    MIMIC-CXR's pixels.

    The published code does not bound the scale; OpenAI's weights start at 100, and here it stays
    there unless `max_scale` is None.
    """

    fit: Literal["crop", "pad", "squash"] = "pad"
    stored_size: int | None = 320
    image_mean: tuple[float, ...] | None = (101.48761 / 255,)
    image_std: tuple[float, ...] | None = (83.43944 / 255,)


@register_system("chexzero")
class CheXzero(CLIP):
    """CLIP with other settings.

    Train on `WholeText(sections=("impression",), missing="literal")`; the zero-shot protocol is the
    prompt set `chexzero_template`, averaged over several checkpoints.
    """

    Config = CheXzeroConfig
