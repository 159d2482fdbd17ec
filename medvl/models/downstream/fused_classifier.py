"""Classification on the fused states of any fusion-encoder, from images with reports, images alone or reports alone."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Self, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medvl import losses
from medvl.common.checks import check_choice, check_labels
from medvl.models.base import mean_count, update_mean
from medvl.models.bert_init import LAYER_NORM_EPS, init_weights
from medvl.models.downstream.classifier import LabelModel
from medvl.models.downstream.fusion_task import FusionTask, FusionTaskConfig, described_fusion, open_fusion
from medvl.models.fusion_encoders.bases.base import FusionModel
from medvl.models.fusion_encoders.bases.config import FusionConfig
from medvl.models.fusion_encoders.bases.joint_bert import text_ends
from medvl.models.fusion_encoders.parts.encoder import Fused
from medvl.models.registry import register_system
from medvl.schema import Batch, Losses

Modalities = Literal["image_text", "image", "text"]
"""Input of the model. Labels of a corpus are often extracted from the report itself, so that "image_text" and "text"
reach high scores by reading it; compare "image" with image classifiers."""
ClassifierHead = Literal["mlp", "meter", "linear"]
"""Head on the pooled vector. "mlp": Linear to twice the width, GELU, LayerNorm, Linear (LXMERT; Li, Wang and Luo, arXiv
2009.01523; BERTHop). "meter": Linear of the same width, LayerNorm, GELU, Linear (METER; M3AE on MELINDA, with
`head_lr_mult` 10; PTUnifier, with 50). "linear": one layer. All are initialised as in BERT."""
Target = Literal["multi_label", "single_label"]
"""Labels of an image: any number of them, or exactly one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FusedClassifierConfig(FusionTaskConfig):
    """A classification head on a fusion-encoder."""

    labels: tuple[str, ...]
    modalities: Modalities = "image_text"
    head: ClassifierHead = "mlp"
    target: Target = "multi_label"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_labels(self.labels, "labels", fewest=2 if self.target == "single_label" else 1)
        check_choice(self.modalities, get_args(Modalities), "modalities")
        check_choice(self.head, get_args(ClassifierHead), "head")
        check_choice(self.target, get_args(Target), "target")


@register_system("fused_classifier")
class FusedClassifier(FusionTask, LabelModel):
    """Logits of labels from `Fused.pooled_BD`.

    Without `config.modalities` naming it, an image or a text is absent for every sample, as in a sample that has none:
    it is never encoded, and nothing of it reaches the logits.
    """

    Config = FusedClassifierConfig
    head_name = "label_head"

    def __init__(self, config: FusedClassifierConfig, fusion_model: FusionModel) -> None:
        super().__init__(config, fusion_model)
        width, labels = fusion_model.pooled_dim, len(config.labels)
        self.label_head = nn.Sequential(nn.Linear(width, labels))
        if config.head == "mlp":
            norm = nn.LayerNorm(2 * width, eps=LAYER_NORM_EPS)
            self.label_head = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), norm, nn.Linear(2 * width, labels))
        elif config.head == "meter":
            norm = nn.LayerNorm(width)
            self.label_head = nn.Sequential(nn.Linear(width, width), norm, nn.GELU(), nn.Linear(width, labels))
        init_weights(self.label_head)
        self.reads = {"image_text": "image and text"}.get(config.modalities, config.modalities)
        self.one_label = config.target == "single_label"

    @classmethod
    def on(
        cls,
        fusion_model: FusionModel,
        labels: Sequence[str],
        *,
        modalities: Modalities = "image_text",
        head: ClassifierHead = "mlp",
        target: Target = "multi_label",
        head_lr_mult: float | None = None,
    ) -> Self:
        """Put a new head on a fusion-encoder, which is not copied unless `for_reading` changes it.

        Raises ConfigError for an unknown choice.
        """
        fusion_model = fusion_model.for_reading()
        config = FusedClassifierConfig(
            **described_fusion(fusion_model),
            labels=tuple(labels),
            modalities=modalities,
            head=head,
            target=target,
            head_lr_mult=head_lr_mult,
        )
        return cls(config, fusion_model)

    def forward(self, batch: Batch) -> Losses:
        """Return the loss; `batch.labels_BL` has the columns of `config.labels`: 1, 0, or -1 or NaN
        (ignored).

        Multi-label: binary cross-entropy, averaged over the known labels, times their number as in VQA (Li et al.).
        Single-label: cross-entropy over the samples with exactly one positive label.
        """
        logits_BL = self.label_logits(batch)
        if self.config.target == "multi_label":
            loss = losses.multilabel_bce(logits_BL, batch.labels_BL, mean_count(batch)) * len(self.config.labels)
        else:
            positive_BL = batch.labels_BL == 1
            target_B = positive_BL.int().argmax(dim=1).masked_fill(positive_BL.sum(dim=1) != 1, -100)
            total = F.cross_entropy(logits_BL.float(), target_B, reduction="sum")
            loss = update_mean(batch, total, (target_B >= 0).sum())
        return Losses.sum(labels=loss)

    def loss_counts(self, batch: Batch) -> Tensor:
        """Return (1,) float32: how many known labels, or samples with one label, the loss of a batch is a sum over."""
        known = losses.known_labels(batch.labels_BL)
        if self.config.target != "multi_label":
            known = (batch.labels_BL == 1).sum(dim=1) == 1
        return known.sum().float()[None]

    def features(self, batch: Batch) -> Fused:
        """Fuse each sample of a batch, with the modalities that the model reads."""
        if self.config.modalities == "image":
            ends_B2 = text_ends(batch.ids_BT, batch.mask_BT)
            absent_B = torch.zeros_like(batch.mask_BT[:, 0])
            mask_B2 = torch.ones_like(ends_B2, dtype=torch.bool)
            batch = dataclasses.replace(batch, ids_BT=ends_B2, mask_BT=mask_B2, has_text_B=absent_B)
        elif self.config.modalities == "text":
            absent_B = torch.zeros_like(batch.image_BCHW[:, 0, 0, 0], dtype=torch.bool)
            batch = dataclasses.replace(batch, has_image_B=absent_B)
        return self.fusion_model.features(batch)

    def label_logits(self, batch: Batch) -> Tensor:
        """(B, L), in the order of `config.labels`."""
        logits_BL: Tensor = self.label_head(self.features(batch).pooled_BD)
        return logits_BL

    def probabilities(self, batch: Batch) -> Tensor:
        """See `LabelModel`."""
        logits_BL = self.label_logits(batch).double()
        return logits_BL.softmax(dim=1) if self.one_label else logits_BL.sigmoid()


def create_fused_classifier(
    start: Path | str,
    labels: Sequence[str],
    *,
    fusion: FusionConfig | None = None,
    image_size: int | None = None,
    max_tokens: int | None = None,
    modalities: Modalities = "image_text",
    head: ClassifierHead = "mlp",
    target: Target = "multi_label",
    head_lr_mult: float | None = None,
) -> FusedClassifier:
    """Create a classifier with a new head from a checkpoint of a dual-encoder or fusion-encoder.

    Args:
        start: checkpoint of a fusion-encoder, or of a head on one; or of a dual-encoder, whose towers are used under a
            new fusion-encoder.
        labels: names of the columns.
        fusion: sizes of that new fusion-encoder; its settings of the encoders are replaced by those of `start`.
        image_size: side of the images in pixels, to which learned positions are interpolated; None: as in `start`.
        max_tokens: maximum length of a text, which may be above that of the pretraining; None: as in `start`.
        modalities, head, target, head_lr_mult: see `FusedClassifierConfig`.

    Raises:
        CheckpointError: `start` is not a complete checkpoint.
        ConfigError: a choice is unknown, or the image size or the length of texts does not fit the model.
    """
    model = open_fusion(start, fusion, image_size, max_tokens)
    return FusedClassifier.on(model, labels, modalities=modalities, head=head, target=target, head_lr_mult=head_lr_mult)
