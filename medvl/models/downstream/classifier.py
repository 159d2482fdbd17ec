"""Classification of findings: an image encoder of any system and one linear layer, fine-tuned or
probed.
"""

import abc
import dataclasses
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from medvl import losses
from medvl.common.config_io import check_labels, check_within
from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.data.transforms.image import EvalTransform
from medvl.encoders import ImageEncoder, create_image_encoder, parameter_groups
from medvl.errors import ConfigError
from medvl.models.base import EncoderArguments, ImageConfig, System, mean_count
from medvl.models.checkpoint import load
from medvl.models.registry import register_system
from medvl.schema import Batch, Losses

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
