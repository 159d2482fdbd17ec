"""BERTHop: VisualBERT on BlueBERT and PixelHop++ (Monajatipoor et al., arXiv 2108.04938, MICCAI
2022).
"""

import dataclasses

from medvl.models.fusion_encoders.visualbert import VisualBERT, VisualBERTConfig
from medvl.models.registry import register_system


@dataclasses.dataclass(frozen=True, kw_only=True)
class BERTHopConfig(VisualBERTConfig):
    """Published settings of BERTHop; `medvl.encoders.pixelhop_arguments(FOLDER)` are the
    `image_arguments` of a fitted PixelHop++, whose folder is `image_weights`.
    """

    image_encoder: str = "pixelhop"
    text_encoder: str = "bluebert"


@register_system("berthop")
class BERTHop(VisualBERT):
    """VisualBERT whose words are BlueBERT's and whose regions are PixelHop++'s tokens, which are
    not trained.

    A label head on it is `FusedClassifier`. The released repository lacks PixelHop++ and loads
    Bio_ClinicalBERT instead of BlueBERT. There the Transformer starts from VisualBERT's weights for
    COCO; here all of it is BlueBERT.
    """

    Config = BERTHopConfig
