"""Classification of findings: an image encoder of any system and one linear layer, fine-tuned or
probed. And classification of change between an image and its prior image, on the image side of any
dual-encoder.
"""

import abc
import contextlib
import dataclasses
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medvl import losses
from medvl.common.config_io import check_labels, check_within, from_dict
from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.data.transforms.image import EvalTransform
from medvl.encoders import (
    ImageEncoder,
    VolumeEncoder,
    create_image_encoder,
    freeze_batch_norm_statistics,
    parameter_groups,
)
from medvl.errors import ConfigError
from medvl.models.base import (
    EncoderArguments,
    ImageConfig,
    System,
    SystemConfig,
    evaluating,
    mean_count,
    update_mean,
)
from medvl.models.checkpoint import load
from medvl.models.dual_encoders.bases.base import DualEncoder
from medvl.models.dual_encoders.biovil_t import SupportsPriors
from medvl.models.registry import register_system, system
from medvl.schema import CHANGES, Batch, Inputs, Losses

_log = logging.getLogger(__name__)
FROZEN_NOTE = (
    "its training left the image encoder frozen: what was trained above the encoder "
    "is not part of it"
)
"""Note on the image encoder of a system such as RadZero or UMRL, whose trained layers lie above
it.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassifierConfig(ImageConfig):
    """Settings of an image encoder with one linear layer."""

    encoder: Mapping[str, Any]
    """Arguments of `create_image_encoder`, including its name."""
    transform: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of `EvalTransform`."""
    labels: tuple[str, ...]
    frozen_encoder: bool = False
    """Train the linear layer only, with the encoder in eval mode: a linear probe by gradient
    descent.
    """
    head_lr_mult: float = 1.0
    """Learning rate of the linear layer, as a multiple of the encoder's."""

    def __post_init__(self) -> None:
        check_labels(self.labels, "labels")
        check_within(self, "(0, inf)", "head_lr_mult")
        check_encoder(self.encoder)


def check_encoder(encoder: Mapping[str, Any]) -> None:
    """Raise ConfigError unless the arguments of an image encoder include its name."""
    if "name" not in encoder:
        raise ConfigError(
            "encoder must have a name, as in {'name': 'resnet50'}", "missing", field="encoder"
        )


class LabelModel(System):
    """A system that predicts labels, which `medvl eval classify` evaluates. Its config has
    `labels`.

    Attributes:
        reads: what it predicts from, for results and pages: "image", "text" or "image and text".
        one_label: whether the probabilities of an image add up to 1, because it has exactly one
            label.
    """

    reads: str
    one_label: bool = False

    @abc.abstractmethod
    def probabilities(self, batch: Batch) -> Tensor:
        """(B, L) float64 on the model's device: probabilities of `config.labels`."""


@register_system("classifier")
class Classifier(LabelModel):
    """Logits of labels from the encoder's pooled vector. The loss ignores labels of -1 or NaN.

    With `config.frozen_encoder` the encoder is not trained and stays in eval mode: batch-norm
    statistics are fixed and dropout is off. Without it all of the encoder is trained, also what its
    system's pretraining froze.
    """

    Config = ClassifierConfig
    reads = "image"

    def __init__(
        self, config: ClassifierConfig, image_encoder: ImageEncoder, transform: EvalTransform
    ) -> None:
        super().__init__(config, transform=transform, tokenizer=None)
        self.image_encoder = image_encoder
        self.label_head = nn.Linear(image_encoder.feature_dim, len(config.labels))
        nn.init.zeros_(self.label_head.weight)  # the loss starts at ln 2, without random weights
        nn.init.zeros_(self.label_head.bias)
        if config.frozen_encoder:
            image_encoder.freeze()
        else:
            image_encoder.unfreeze()

    @classmethod
    def build(
        cls, config: ClassifierConfig, *, pretrained: bool, tokenizer: Tokenizer | None
    ) -> Self:
        if tokenizer is not None:
            raise ConfigError(
                "classifier does not read text; leave tokenizer out",
                "unsupported",
                field="tokenizer",
            )
        encoder = create_image_encoder(pretrained=pretrained, **config.encoder)
        return cls(config, encoder, EvalTransform(**config.transform))

    @classmethod
    def on(
        cls,
        image_encoder: ImageEncoder,
        labels: Sequence[str],
        transform: EvalTransform,
        *,
        frozen_encoder: bool = False,
        head_lr_mult: float = 1.0,
    ) -> Self:
        """Put a new head on an encoder, which is not copied."""
        config = ClassifierConfig(
            encoder=image_encoder.config,
            transform=transform.settings(),
            labels=tuple(labels),
            frozen_encoder=frozen_encoder,
            head_lr_mult=head_lr_mult,
        )
        return cls(config, image_encoder, transform)

    def forward(self, batch: Batch) -> Losses:
        """Return the loss; `batch.labels_BL` has the columns of `config.labels`: 1, 0, or -1 or NaN
        (ignored)."""
        logits_BL = self.label_logits(batch.image_BCHW)
        return Losses.sum(
            labels=losses.multilabel_bce(logits_BL, batch.labels_BL, mean_count(batch))
        )

    def loss_counts(self, batch: Batch) -> Tensor:
        """Return (1,) float32: how many known labels the loss of a batch is a sum over."""
        return losses.known_labels(batch.labels_BL).sum().float()[None]

    def label_logits(self, image_BCHW: Tensor) -> Tensor:
        """(B, L), in the order of `config.labels`."""
        logits_BL: Tensor = self.label_head(self.image_encoder(image_BCHW).pooled_BD)
        return logits_BL

    def probabilities(self, batch: Batch) -> Tensor:
        """See `LabelModel`."""
        return self.label_logits(batch.image_BCHW).double().sigmoid()

    @torch.no_grad()
    def predict(self, image_BCHW: Tensor) -> dict[str, Tensor]:
        """Return label -> probabilities (B,) of images prepared by `transform`."""
        probability_BL = torch.sigmoid(self.label_logits(image_BCHW.to(self.device)).float())
        return dict(zip(self.config.labels, probability_BL.T, strict=True))

    def parameter_groups(
        self, lr: float, weight_decay: float, layer_decay: float = 1.0
    ) -> list[dict[str, Any]]:
        """Return optimiser groups: the encoder at `lr`, decreasing by `layer_decay` towards its
        stem, and the head at `head_lr_mult` times `lr`.
        """
        parts = (
            ("encoder", self.image_encoder, lr),
            ("head", self.label_head, lr * self.config.head_lr_mult),
        )
        return [
            {**group, "name": f"{name}: {group['name']}"}
            for name, module, rate in parts
            for group in parameter_groups(module, rate, weight_decay, layer_decay=layer_decay)
        ]


def create_classifier(
    start: Path | str,
    labels: Sequence[str],
    *,
    image_weights: str | None = None,
    image_arguments: EncoderArguments | None = None,
    frozen_encoder: bool = False,
    head_lr_mult: float = 1.0,
) -> Classifier:
    """Put a new head on the image encoder of any system's checkpoint, or on a pretrained encoder by
    name.

    Args:
        start: folder of a checkpoint, or name of an image encoder (`medvl list image-encoders`).
        labels: names of the columns.
        image_weights: weights of an encoder by name, see `ImageConfig`; None takes its published
            ones.
        image_arguments: arguments of an encoder by name: `{"mean": 0.5, "std": 0.5, "pad_type":
            "same"}`.
        frozen_encoder, head_lr_mult: see `ClassifierConfig`.

    Raises:
        CheckpointError: the folder is not a complete checkpoint.
        ConfigError: the checkpoint has no image encoder for pixels, or weights of its own; or the
            name is unknown.
        WeightsError: weights cannot be loaded.
    """
    encoder, transform = encoder_at(start, image_weights, image_arguments)
    return Classifier.on(
        encoder, labels, transform, frozen_encoder=frozen_encoder, head_lr_mult=head_lr_mult
    )


def encoder_at(
    start: Path | str, weights: str | None = None, arguments: EncoderArguments | None = None
) -> tuple[ImageEncoder, EvalTransform]:
    """Return the image encoder and transform of a checkpoint, or of an encoder by name.

    Raises as `create_classifier`.
    """
    if Path(start).is_dir():
        if weights is not None or arguments:
            message = f"{start} is a checkpoint: it has its own weights and arguments, give none"
            raise ConfigError(
                message,
                "conflict",
                field="image_weights" if weights is not None else "image_arguments",
            )
        model = load(start)
        encoder = image_encoder_of(model)
        if encoder.is_frozen:
            _log.warning("%s: %s", start, FROZEN_NOTE)
        return encoder, model.transform
    named: dict[str, Any] = dict(arguments or {})
    encoder = create_image_encoder(str(start), pretrained=weights or True, **named)
    return encoder, EvalTransform(size=encoder.image_size[0])


def image_encoder_of(model: System) -> ImageEncoder:
    """Return the image encoder of a dual-encoder, a fusion-encoder or a head on either.

    Raises ConfigError if none reads pixels, as in a model for precomputed regions.
    """
    encoder = next((module for module in model.modules() if isinstance(module, ImageEncoder)), None)
    if encoder is None:
        raise ConfigError(
            f"{model.name} has no image encoder for pixels", "unsupported", field="image_encoder"
        )
    return encoder


def pooled_encoder_of(model: System) -> ImageEncoder | VolumeEncoder:
    """Return the encoder of images or volumes of a system, whose pooled vector the system trains.

    Raises ConfigError as `image_encoder_of`, and for systems that train patches of volumes alone.
    """
    of_volumes = (module for module in model.modules() if isinstance(module, VolumeEncoder))
    encoder = next(of_volumes, None)
    if encoder is None:
        return image_encoder_of(model)
    if not getattr(model, "trains_pooled", True):
        raise ConfigError(
            f"{model.name} trains the patches of its encoder, not the encoder's vector of a "
            "volume; give another checkpoint",
            "unsupported",
            field="checkpoint",
        )
    return encoder


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChangeClassifierConfig(SystemConfig):
    """Settings of a linear layer for change on a dual-encoder."""

    dual_encoder: str
    """Name of the dual-encoder's system: biovil_t, convirt, ..."""
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of its configuration that differ from the published ones."""
    findings: tuple[str, ...]
    use_prior: bool = True
    """Read the prior image; False measures what it adds."""
    head_lr_mult: float = 10.0
    """Learning rate of the linear layer, as a multiple of the encoder's."""

    def __post_init__(self) -> None:
        check_labels(self.findings, "findings")
        check_within(self, "(0, inf)", "head_lr_mult")


@register_system("change_classifier")
class ChangeClassifier(System):
    """Logits of improving, stable and worsening for each finding, from the vector of an image and
    its prior image.

    The vector is that of `embed_with_prior` where the dual-encoder has it; else the two images' own
    vectors side by side, with zeros for a missing prior image. Everything that images pass through
    is trained, also what the dual-encoder's pretraining froze; text parts are frozen. Rows without
    any label, such as a corpus's prior images themselves, and placeholders of missing prior images
    do not enter batch norms.
    """

    Config = ChangeClassifierConfig

    def __init__(self, config: ChangeClassifierConfig, dual_encoder: DualEncoder) -> None:
        super().__init__(config, transform=dual_encoder.transform, tokenizer=None)
        self.dual_encoder = dual_encoder
        self.inputs = Inputs(prior_image=config.use_prior)
        dual_encoder.image_encoder.unfreeze()
        for name, child in dual_encoder.named_children():
            if name.startswith(("text", "word")):
                child.requires_grad_(False)
        size = self.transform.size
        channels = dual_encoder.image_encoder.in_channels
        blank_1CHW = torch.zeros(
            1, channels, size, size, dtype=torch.uint8, device=dual_encoder.device
        )
        with evaluating(dual_encoder):
            width = self._vectors(blank_1CHW, blank_1CHW, torch.ones(1, dtype=torch.bool)).shape[1]
        self.change_head = nn.Linear(width, len(config.findings) * len(CHANGES))
        nn.init.zeros_(self.change_head.weight)  # the loss starts at ln 3, without random weights
        nn.init.zeros_(self.change_head.bias)

    @classmethod
    def build(
        cls, config: ChangeClassifierConfig, *, pretrained: bool, tokenizer: Tokenizer | None
    ) -> Self:
        if tokenizer is not None:
            message = "change_classifier does not read text; leave tokenizer out"
            raise ConfigError(message, "unsupported", field="tokenizer")
        # not `create_model`: a checkpoint must not name further files to read
        dual = system(config.dual_encoder)
        settings = from_dict(dual.Config, config.settings)
        return cls(
            config,
            _checked(dual.build(settings, pretrained=pretrained, tokenizer=None), "dual_encoder"),
        )

    def forward(self, batch: Batch) -> Losses:
        """Return the cross-entropy, averaged over labels; `batch.labels_BL` has the columns of
        `config.findings`.

        Labels are -1 (improving), 0 (stable), 1 (worsening) or NaN (ignored).
        """
        batch, statistics = self._labelled_rows(batch)
        known_BL = ~batch.labels_BL.isnan()
        target_BL = (batch.labels_BL.nan_to_num() + 1).long().masked_fill(~known_BL, -100)
        with statistics:
            logits_BLC = self.change_logits(batch).float()
        total = F.cross_entropy(logits_BLC.flatten(0, 1), target_BL.flatten(), reduction="sum")
        return Losses.sum(change=update_mean(batch, total, known_BL.sum()))

    def loss_counts(self, batch: Batch) -> Tensor:
        """Return (1,) float32: how many labels the loss of a batch is a sum over."""
        return (~batch.labels_BL.isnan()).sum().float()[None]

    def change_logits(self, batch: Batch) -> Tensor:
        """Return (B, L, 3) of a batch: improving, stable and worsening for each of
        `config.findings`.

        Raises ConfigError for a batch without prior images, unless `config.use_prior` is False.
        """
        prior_BCHW = batch.prior_BCHW
        has_prior_B = batch.has_prior_B
        if self.config.use_prior and (prior_BCHW is None or has_prior_B is None):
            message = "expected Batch.prior_BCHW: open the loader with the model's inputs"
            raise ConfigError(message, "missing", field="prior_BCHW")
        logits_BK: Tensor = self.change_head(
            self._vectors(batch.image_BCHW, prior_BCHW, has_prior_B)
        )
        return logits_BK.unflatten(1, (-1, len(CHANGES)))

    def parameter_groups(self, lr: float, weight_decay: float) -> list[dict[str, Any]]:
        """Return optimiser groups: the encoder at `lr`, and the linear layer at `head_lr_mult`
        times `lr`.
        """
        parts = (
            ("encoder", self.dual_encoder, lr),
            ("head", self.change_head, lr * self.config.head_lr_mult),
        )
        return [
            {**group, "name": f"{name}: {group['name']}"}
            for name, module, rate in parts
            for group in parameter_groups(module, rate, weight_decay)
        ]

    def _labelled_rows(self, batch: Batch) -> tuple[Batch, contextlib.AbstractContextManager[None]]:
        """Return the rows that have a label, and a context for their encoding.

        A batch with fewer than two such rows is returned as it is, because every rank must use all
        weights and batch norms need two rows; in the context it does not update their running
        statistics.
        """
        row_K = (~batch.labels_BL.isnan()).any(dim=1).nonzero().squeeze(1)
        if len(row_K) == len(batch):
            return batch, contextlib.nullcontext()
        if len(row_K) < 2:
            return batch, freeze_batch_norm_statistics(self)
        return batch.rows(row_K.tolist()), contextlib.nullcontext()

    def _vectors(
        self, image_BCHW: Tensor, prior_BCHW: Tensor | None, has_prior_B: Tensor | None
    ) -> Tensor:
        """Return (B, D) float32."""
        model = self.dual_encoder
        if not self.config.use_prior or prior_BCHW is None or has_prior_B is None:
            return model.encode_image(image_BCHW)
        has_prior_B = has_prior_B.to(image_BCHW.device)
        if isinstance(model, SupportsPriors):
            return model.embed_with_prior(image_BCHW, prior_BCHW, has_prior_B).global_NE
        count = len(image_BCHW)
        row_K = has_prior_B.nonzero().squeeze(1)
        # one pass, and one batch norm
        both_NE = model.encode_image(torch.cat([image_BCHW, prior_BCHW[row_K]]))
        vector_BE, prior_KE = both_NE.tensor_split([count])
        return torch.cat(
            [vector_BE, torch.zeros_like(vector_BE).index_copy(0, row_K, prior_KE)], dim=1
        )


def create_change_classifier(
    start: Path | str,
    findings: tuple[str, ...],
    *,
    use_prior: bool = True,
    head_lr_mult: float = 10.0,
) -> ChangeClassifier:
    """Put a new linear layer on a dual-encoder's checkpoint.

    Args:
        start: checkpoint of a dual-encoder.
        findings: names of the columns.
        use_prior, head_lr_mult: see `ChangeClassifierConfig`.

    Raises CheckpointError where `start` is not a complete checkpoint, ConfigError where it is not a
    dual-encoder.
    """
    model = _checked(load(start), "init_from")
    settings = dataclasses.asdict(model.config) | {"image_weights": None, "text_weights": None}
    config = ChangeClassifierConfig(
        dual_encoder=model.name,
        settings=settings,
        findings=findings,
        use_prior=use_prior,
        head_lr_mult=head_lr_mult,
    )
    return ChangeClassifier(config, model)


def _checked(model: System, field: str) -> DualEncoder:
    if not isinstance(model, DualEncoder):
        message = f"expected a dual-encoder such as biovil_t or convirt, got {model.name}"
        raise ConfigError(message, "wrong_type", field=field)
    return model
