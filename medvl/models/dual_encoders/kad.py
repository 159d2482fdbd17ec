"""KAD: queries of entity names, and images against reports (Zhang et al., Nature Communications
2023).
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medvl import losses
from medvl.common.config_io import check_choice, check_within
from medvl.common.label_names import spoken_name
from medvl.data.reports.statements import stated_name
from medvl.encoders import ImageEncoder, TextEncoder
from medvl.encoders.text.adapters import knowledge_head
from medvl.losses.common import gather
from medvl.models.base import complete_rows
from medvl.models.dual_encoders.bases.pairs import mentioned_or_absent
from medvl.models.dual_encoders.bases.queries import QueryConfig, QueryEncoder
from medvl.models.registry import register_system
from medvl.schema import Batch, Embeddings


@dataclasses.dataclass(frozen=True, kw_only=True)
class KADConfig(QueryConfig):
    """Settings of the paper and the released code, with the label columns as entities in place of
    40 from RadGraph.

    The published text encoder is Med-KEBERT, trained on concepts of UMLS and their definitions:
    `init_from` takes a checkpoint of the system `kebert` (encoder and head), and `medvl import kad`
    imports it. PubMedBERT is a start without UMLS.
    """

    text_encoder: str = "pubmedbert"
    image_size: int = 512
    projection_dim: int = 768
    max_tokens: int = 256
    unmentioned: Literal["absent", "ignored"] = "absent"
    """Entities that a report does not mention: absent, as published, or without a loss."""
    temperature: float = 0.07
    """Initial temperature of the contrast; the logarithm of its inverse is learned. The released
    code creates a new scale in each step, 2.66 instead of 14.3, and compares vectors that are not
    normalised, on one GPU only.
    """
    former = (("contrast_weight", 1.0), ("report_weight", 1.0))

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self.unmentioned, ("absent", "ignored"), "unmentioned")
        check_within(self, "(0, inf)", "temperature")


@register_system("kad")
class KAD(QueryEncoder):
    """Cross-entropy of each entity's presence in image and report, and InfoNCE of both
    (knowledge-enhanced stage).

    The text encoder is frozen. The head behind it is trained, because only `kebert` has weights for
    it; the released code freezes both or neither. The frozen encoder reads without dropout; the
    released code leaves its dropout on in training, also where it is frozen. Heat maps are the
    attention of the decoder's last layer, as in the released code.
    """

    Config = KADConfig
    shared_encoders = ("image_encoder", "text_encoder", "text_head")
    shared_norm = True
    last_layer_maps = True

    def __init__(self, config: KADConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.logit_scale = nn.Parameter(torch.tensor(-math.log(config.temperature)))

    @classmethod
    def sentences_of(cls, config: Any) -> list[tuple[str, ...]]:
        """Return the names."""
        return [(config.descriptions.get(name, spoken_name(name)),) for name in config.entities]

    def query_text(self, text: str) -> str:
        """Return the name X of a statement "There is X.": queries are names of entities."""
        return stated_name(text)

    @classmethod
    def make_heads(
        cls, config: Any, image_encoder: ImageEncoder, text_encoder: TextEncoder
    ) -> dict[str, Any]:
        """Make `text_head` of BERT's pooler and the published head behind it."""
        width = config.projection_dim
        middle = text_encoder.feature_dim
        return {
            **super().make_heads(config, image_encoder, text_encoder),
            "text_head": knowledge_head(middle, width),
        }

    def more_terms(
        self, batch: Batch, images: Embeddings, states_BQD: Tensor, labels_BL: Tensor
    ) -> Mapping[str, tuple[Tensor, float]]:
        """Return the contrast of images and reports, and the entity loss computed from the reports;
        both have weight 1, as published. Samples without an image or a text are left out.
        """
        report_BD = self.text_head(self.unnormalized_text(batch.ids_BT, batch.mask_BT))
        complete_K = complete_rows(batch)
        image_NE, report_NE = (
            gather(x[complete_K]) for x in (images.global_NE, F.normalize(report_BD.float(), dim=1))
        )
        scale = self.logit_scale.exp()
        contrast = (images.global_NE.sum() + report_BD.sum() + scale) * 0
        if len(image_NE):
            contrast = losses.clip(image_NE, report_NE, scale)
        vectors_QD = self.text_head(self.book.vectors_QD)
        asked_BQD = self.decoder(vectors_QD.expand(len(report_BD), -1, -1), report_BD[:, None])
        has_text_B1 = batch.mask_BT.any(dim=1) if batch.has_text_B is None else batch.has_text_B
        of_report = self.presence_loss(
            asked_BQD, labels_BL.masked_fill(~has_text_B1[:, None], torch.nan)
        )
        return {"contrast": (contrast, 1.0), "report": (of_report, 1.0)}

    def presence_loss(self, states_BQD: Tensor, labels_BL: Tensor) -> Tensor:
        """Leave rows without any label out also where unmentioned
        entities are absent.
        """
        if self.config.unmentioned == "absent":
            labels_BL = mentioned_or_absent(labels_BL)
        return super().presence_loss(states_BQD, labels_BL)
