"""CheXzero: CLIP, trained on with radiographs and the impressions of their reports (Tiu et al., 2022)."""

import dataclasses
from typing import ClassVar, Literal

from medvl.models.dual_encoders.clip import CLIP, CLIPConfig, Statistics
from medvl.models.registry import register_system


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheXzeroConfig(CLIPConfig):
    """CheXzero (Tiu et al., Nature Biomedical Engineering 2022): CLIP ViT-B/32, trained on with radiographs.

    As published: squares of 320 pixels on black, brought to 224 by bicubic interpolation, normalised by the mean and
    the standard deviation of MIMIC-CXR's pixels. Its code lets the scale grow; OpenAI's weights start at 100, and here
    it stays below that unless `max_scale` is None.
    """

    fit: Literal["crop", "pad", "squash"] = "pad"
    stored_size: int | None = 320
    image_mean: Statistics | None = (101.48761 / 255,)
    image_std: Statistics | None = (83.43944 / 255,)


@register_system("chexzero")
class CheXzero(CLIP):
    """CLIP's loss, towers and vocabulary. What is its own are the settings: pixels, text and optimiser.

    Its text is `WholeText(sections=("impression",), missing="literal")`; its zero-shot protocol the prompt set
    `chexzero_template`, averaged over several checkpoints.
    """

    Config: ClassVar[type] = CheXzeroConfig
