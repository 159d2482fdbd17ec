"""Classification on the fused states of any fusion-encoder, from images with reports, images
alone or reports alone.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medvl import losses
from medvl.common.config_io import check_choice, check_labels, check_within, from_dict
from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.encoders import parameter_groups
from medvl.errors import ConfigError
from medvl.models.base import (
    LAYER_NORM_EPS,
    System,
    SystemConfig,
    init_weights,
    mean_count,
    update_mean,
)
from medvl.models.checkpoint import load, load_towers
from medvl.models.downstream.classifier import LabelModel, image_encoder_of
from medvl.models.downstream.dense import at_image_size
from medvl.models.factory import create_model
from medvl.models.fusion_encoders.bases.base import FusionConfig, FusionModel
from medvl.models.fusion_encoders.medvill import text_ends
from medvl.models.fusion_encoders.parts.encoder import Fused, Pooler
from medvl.models.fusion_encoders.parts.inputs import PromptPool
from medvl.models.registry import register_system, system
from medvl.schema import Batch, Inputs, Losses

# Base of task heads on any fusion-encoder.


@dataclasses.dataclass(frozen=True, kw_only=True)
class FusionTaskConfig(SystemConfig):
    """Base of the settings of a task head on a fusion-encoder."""

    fusion: str
    """Name of the fusion-encoder's system: m3ae, medvill, dual_stream, ..."""
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of its configuration that differ from the published ones."""
    published_head_lr_mult: ClassVar[float] = 1.0
    """Published value of `head_lr_mult`."""
    head_lr_mult: float | None = None
    """Learning rate of the head, as a multiple of the encoders'; None is the published one of
    the head.
    """
    max_tokens: int
    """Maximum length of a text."""
    vocab_size: int | None = None
    """Vocabulary size of the text encoder; None: as in `settings`, or the tokenizer's if one is
    given.
    """

    def __post_init__(self) -> None:
        check_within(self, "(0, inf)", "head_lr_mult")

    @property
    def effective_head_lr_mult(self) -> float:
        """`head_lr_mult`, or the published value of the head if it is None."""
        return self.published_head_lr_mult if self.head_lr_mult is None else self.head_lr_mult


class FusionTask(System):
    """A fusion-encoder and a head, whose attribute name is `head_name`.

    Pretraining heads are kept and frozen, so that a checkpoint of this model can initialise another
    pretraining; so are prompts, as published, and layers that the head does not read.
    """

    head_name: ClassVar[str]

    def __init__(self, config: FusionTaskConfig, fusion_model: FusionModel) -> None:
        super().__init__(config, transform=fusion_model.transform, tokenizer=fusion_model.tokenizer)
        self.fusion_model = fusion_model
        self.inputs = Inputs(regions=fusion_model.inputs.regions)
        for name, child in fusion_model.named_children():
            if name.endswith("head"):
                child.requires_grad_(False)
        for module in fusion_model.modules():
            if isinstance(module, PromptPool):
                module.requires_grad_(False)
        self.freeze_unread(reads_pooled=True)

    @classmethod
    def build(
        cls, config: FusionTaskConfig, *, pretrained: bool, tokenizer: Tokenizer | None
    ) -> Self:
        settings = dict(config.settings)
        if config.vocab_size is not None:
            settings["vocab_size"] = config.vocab_size
        # a checkpoint must not name further files to read
        settings |= {"image_weights": None, "text_weights": None}
        fusion = from_dict(system(config.fusion).Config, settings)
        model = create_model(fusion, pretrained=pretrained, tokenizer=tokenizer)
        if not isinstance(model, FusionModel):
            message = (
                f"fusion must name a fusion-encoder such as dual_stream or m3ae, got "
                f"{config.fusion!r}"
            )
            raise ConfigError(message, "wrong_type", field="fusion")
        return cls(config, model)

    def freeze_unread(self, *, reads_pooled: bool) -> None:
        """Freeze the layers that the head does not read, and train those that it reads.

        Args:
            reads_pooled: the head reads `Fused.pooled_BD` alone; False: the states, and no pooler.
        """
        for module in self.fusion_model.modules():
            if isinstance(module, Pooler):  # frozen in a MedViLL that was trained for reports
                module.requires_grad_(reads_pooled)
        for module in self.fusion_model.unread_by_pooled():
            module.requires_grad_(not reads_pooled)

    def parameter_groups(self, lr: float, weight_decay: float) -> list[dict[str, Any]]:
        """Return the fusion model's groups, and the head at `head_lr_mult` times `lr`."""
        groups = self.fusion_model.parameter_groups(lr, weight_decay)
        head = parameter_groups(
            self.get_submodule(self.head_name),
            lr * self.config.effective_head_lr_mult,
            weight_decay,
        )
        return [
            *groups,
            *({**group, "name": f"{self.head_name}: {group['name']}"} for group in head),
        ]


def described_fusion(fusion_model: FusionModel) -> dict[str, Any]:
    """Return the fields of a `FusionTaskConfig` that describe a fusion-encoder."""
    settings = dataclasses.asdict(fusion_model.config) | {
        "image_weights": None,
        "text_weights": None,
    }
    return {
        "fusion": fusion_model.name,
        "settings": settings,
        "max_tokens": settings["max_tokens"],
        "vocab_size": settings["vocab_size"],
    }


def open_fusion(
    start: Path | str,
    fusion: FusionConfig | None = None,
    image_size: int | None = None,
    max_tokens: int | None = None,
) -> FusionModel:
    """Load the fusion-encoder of a checkpoint for a new head.

    Args:
        start: checkpoint of a fusion-encoder or of a head on one; or of a dual-encoder, whose
            towers are used under a new fusion-encoder.
        fusion: sizes of that new fusion-encoder; its settings of the encoders are replaced by those
            of `start`.
        image_size: side of the images in pixels, to which learned positions are interpolated; None:
            as in `start`.
        max_tokens: maximum length of a text; None: as in `start`.

    Raises:
        CheckpointError: `start` is not a complete checkpoint.
        ConfigError: `start` is a dual-encoder and `fusion` is None, or the image size or the length
            of texts does not fit the model.
    """
    model = load(start)
    if isinstance(model, FusionTask):
        model = model.fusion_model
        model.image_times = None  # of a task
    if not isinstance(model, FusionModel):
        if fusion is None:
            message = f"{start} is a {model.name} without a fusion-encoder; give the sizes of one"
            raise ConfigError(message, "missing", field="fusion")
        model = _on_towers(model, fusion, start)
    model = model if image_size is None else at_image_size(model, image_size)
    return model if max_tokens is None else _at_max_tokens(model, max_tokens)


def _at_max_tokens(model: FusionModel, max_tokens: int) -> FusionModel:
    """Make the model read texts of that length, also longer ones than its pretraining did. It is
    not copied.
    """
    longest = model.text_encoder.max_tokens
    if max_tokens > longest:
        message = (
            f"max_tokens must be at most {longest} (positions of "
            f"{model.config.text_encoder}), got {max_tokens}"
        )
        raise ConfigError(message, "too_large", field="max_tokens")
    model.config = dataclasses.replace(model.config, max_tokens=max_tokens)
    if model.tokenizer is not None:
        model.tokenizer = model.tokenizer.with_max_tokens(max_tokens)
    return model


def _on_towers(model: System, fusion: FusionConfig, start: Path | str) -> FusionModel:
    """Put a new fusion-encoder on the towers of a dual-encoder's checkpoint, with pixels as in
    its pretraining.
    """
    own: Any = model.config
    names = ("image_encoder", "text_encoder", "image_size", "fit", "max_tokens", "vocab_size")
    encoder = image_encoder_of(model).config
    pixels = {name: encoder[name] for name in ("mean", "std") if encoder[name] is not None}
    if encoder.get("stretch"):
        pixels |= {name: encoder[name] for name in ("image_size", "stretch")}
    language: Any = model.get_submodule("text_encoder")
    projection = {"projection": True} if language.config["projection"] else {}
    config = dataclasses.replace(
        fusion,
        **{name: getattr(own, name) for name in names},
        image_arguments={**own.image_arguments, **pixels},
        text_arguments={**fusion.text_arguments, **own.text_arguments, **projection},
    )
    fusion_model = create_model(config, tokenizer=model.tokenizer)
    assert isinstance(fusion_model, FusionModel)
    load_towers(fusion_model, start)
    return fusion_model


Modalities = Literal["image_text", "image", "text"]
"""Input of the model. Labels of a corpus are often extracted from the report itself, so that
"image_text" and "text" reach high scores by reading it; compare "image" with image classifiers.
"""
ClassifierHead = Literal["mlp", "meter", "linear"]
"""Head on the pooled vector. "mlp": Linear to twice the width, GELU, LayerNorm, Linear (LXMERT; Li,
Wang and Luo, arXiv 2009.01523; BERTHop). "meter": Linear of the same width, LayerNorm, GELU, Linear
(METER; M3AE on MELINDA, with `head_lr_mult` 10; PTUnifier, with 50). "linear": one layer. All are
initialised as in BERT.
"""
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

    Without `config.modalities` naming it, an image or a text is absent for every sample, as in a
    sample that has none: it is never encoded, and nothing of it reaches the logits.
    """

    Config = FusedClassifierConfig
    head_name = "label_head"

    def __init__(self, config: FusedClassifierConfig, fusion_model: FusionModel) -> None:
        super().__init__(config, fusion_model)
        width = fusion_model.pooled_dim
        labels = len(config.labels)
        self.label_head = nn.Sequential(nn.Linear(width, labels))
        if config.head == "mlp":
            norm = nn.LayerNorm(2 * width, eps=LAYER_NORM_EPS)
            self.label_head = nn.Sequential(
                nn.Linear(width, 2 * width), nn.GELU(), norm, nn.Linear(2 * width, labels)
            )
        elif config.head == "meter":
            norm = nn.LayerNorm(width)
            self.label_head = nn.Sequential(
                nn.Linear(width, width), norm, nn.GELU(), nn.Linear(width, labels)
            )
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

        Multi-label: binary cross-entropy, averaged over the known labels, times their number as in
        VQA (Li et al.).
        Single-label: cross-entropy over the samples with exactly one positive label.
        """
        logits_BL = self.label_logits(batch)
        if self.config.target == "multi_label":
            loss = losses.multilabel_bce(logits_BL, batch.labels_BL, mean_count(batch)) * len(
                self.config.labels
            )
        else:
            positive_BL = batch.labels_BL == 1
            target_B = (
                positive_BL.int().argmax(dim=1).masked_fill(positive_BL.sum(dim=1) != 1, -100)
            )
            total = F.cross_entropy(logits_BL.float(), target_B, reduction="sum")
            loss = update_mean(batch, total, (target_B >= 0).sum())
        return Losses.sum(labels=loss)

    def loss_counts(self, batch: Batch) -> Tensor:
        """Return (1,) float32: how many known labels, or samples with one label, the loss of a
        batch is a sum over.
        """
        is_known = losses.known_labels(batch.labels_BL)
        if self.config.target != "multi_label":
            is_known = (batch.labels_BL == 1).sum(dim=1) == 1
        return is_known.sum().float()[None]

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
        start: checkpoint of a fusion-encoder, or of a head on one; or of a dual-encoder, whose
            towers are used under a new fusion-encoder.
        labels: names of the columns.
        fusion: sizes of that new fusion-encoder; its settings of the encoders are replaced by those
            of `start`.
        image_size: side of the images in pixels, to which learned positions are interpolated; None:
            as in `start`.
        max_tokens: maximum length of a text, which may be above that of the pretraining; None: as
            in `start`.
        modalities, head, target, head_lr_mult: see `FusedClassifierConfig`.

    Raises:
        CheckpointError: `start` is not a complete checkpoint.
        ConfigError: a choice is unknown, or the image size or the length of texts does not fit the
            model.
    """
    model = open_fusion(start, fusion, image_size, max_tokens)
    return FusedClassifier.on(
        model, labels, modalities=modalities, head=head, target=target, head_lr_mult=head_lr_mult
    )
