"""CheXzero: CLIP, trained on with radiographs and the impressions of their reports (Tiu et al., 2022)."""

from typing import ClassVar

from medvl.models.dual_encoders.clip import CLIP
from medvl.models.dual_encoders.clip_configs import CheXzeroConfig


class CheXzero(CLIP):
    """CLIP's loss, towers and vocabulary. What is its own are the settings: pixels, text and optimiser.

    Its text is `WholeText(sections=("impression",), missing="literal")`; its zero-shot protocol the prompt set
    `chexzero_template`, averaged over several checkpoints.
    """

    name = CheXzeroConfig.system
    Config: ClassVar[type] = CheXzeroConfig
