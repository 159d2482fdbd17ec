"""UNITER: a BERT over words and regions with four pretraining tasks (Chen et al., arXiv
1909.11740, ECCV 2020).
"""

import dataclasses
from typing import Any, Unpack

from torch import Tensor, nn

from medvl.common.seeding import derive
from medvl.models.base import LAYER_NORM_EPS, Parts
from medvl.models.fusion_encoders.bases.bert_stream import JointStream
from medvl.models.fusion_encoders.bases.objectives import (
    WPA_WEIGHT,
    Corruption,
    Encoded,
    Objective,
    WordPatchAlignment,
)
from medvl.models.fusion_encoders.bases.region_model import (
    MaskedRegionClassification,
    MaskedRegionRegression,
    RegionConfig,
    RegionHead,
    RegionInput,
    RegionMask,
    RegionModel,
    TiedRegionHead,
)
from medvl.models.fusion_encoders.parts.encoder import Tokens
from medvl.models.fusion_encoders.parts.inputs import ImageSource
from medvl.models.registry import register_system
from medvl.schema import Batch

_TASKS = ("mlm", "mlm", "itm", "itm", "mrfr", "mrc")


@dataclasses.dataclass(frozen=True, kw_only=True)
class UNITERConfig(RegionConfig):
    """Published settings of UNITER-base."""

    max_tokens: int = 62
    task_mix: bool = True
    """Train one task per step, masked words : matching : region features : region classes as 2 : 2
    : 1 : 1, the same on all ranks; False: all tasks in each step.
    """
    former = (("wpa_weight", WPA_WEIGHT),)


@register_system("uniter")
class UNITER(RegionModel, JointStream):
    """Masked words, matching with word-region alignment, and masked regions, whose box code has
    seven numbers.

    In a step with one task, the terms of the others are 0; in eval mode all tasks are computed.
    """

    Config = UNITERConfig
    image_input: RegionInput

    def __init__(self, config: UNITERConfig, *encoders: Any, **parts: Unpack[Parts]) -> None:
        super().__init__(config, *encoders, **parts)
        width = self.fused_dim
        self.image_norm = nn.LayerNorm(width, eps=LAYER_NORM_EPS)
        self.mrfr_head = TiedRegionHead(width, self.image_input.features)
        features = MaskedRegionRegression(
            config.region_feature_weight, self.sample_mask, self.score_features
        )
        tasks: list[Objective[Any, Any, Any]] = [features]
        if config.region_classes:
            self.mrc_head = RegionHead(width, config.region_classes)
            tasks.append(
                MaskedRegionClassification(
                    config.region_class_weight, self.sample_mask, self.mrc_head
                )
            )
        self.objectives = (
            self.mlm,
            self.itm,
            WordPatchAlignment(WPA_WEIGHT, text_ends=True),
            *tasks,
        )
        self.require_classes()
        self._task: str | None = None

    def make_image_input(
        self, config: UNITERConfig, image_encoder: ImageSource, width: int
    ) -> RegionInput:
        return RegionInput(image_encoder, 7, width)

    def score_features(self, states_ND: Tensor) -> Tensor:
        """(N, F): features of regions, by the transpose of the matrix that reads them."""
        features_NF: Tensor = self.mrfr_head(states_ND, self.image_input.project.weight)
        return features_NF

    def before_step(self, step: int) -> None:
        """Choose the task of the step."""
        super().before_step(step)
        names = [objective.name for objective in self.objectives]
        tasks = [name for name in _TASKS if name in names]
        self._task = tasks[derive(0, "task", step) % len(tasks)] if self.config.task_mix else None

    @property
    def step_objectives(self) -> tuple[Objective[Any, Any, Any], ...]:
        """Alignment belongs to matching."""
        if self._task is None or not self.training:
            return self.objectives
        names = {self._task, "wpa"} if self._task == "itm" else {self._task}
        return tuple(objective for objective in self.objectives if objective.name in names)

    def embed_regions(self, regions: Tokens, mask: RegionMask | None = None) -> Tokens:
        backbone: Any = self.text_encoder.backbone
        states_BPD = (
            self.image_input(regions.states_BND, mask, self.mrfr_head.mask_vector)
            + self.type_of_images
        )
        return Tokens(backbone.embeddings.dropout(self.image_norm(states_BPD)), regions.mask_BN)

    def encode(self, batch: Batch, corruption: Corruption) -> Encoded:
        return self.encode_tasks(batch, corruption)
