"""Classification of findings: an image encoder and one linear layer, fine-tuned or probed, on any system's encoder."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from medvl import losses
from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.data.transforms.image import EvalTransform
from medvl.encoders import ImageEncoder, create_image_encoder, parameter_groups
from medvl.errors import ConfigError
from medvl.models.base import System
from medvl.models.checkpoint import load
from medvl.models.downstream.classifier_config import ClassifierConfig
from medvl.models.registry import register_system
from medvl.schema import Batch, Losses


@register_system("classifier")
class Classifier(System):
    """Logits of labels from the encoder's pooled vector; a label that is NaN takes no part in the loss.

    With `config.frozen_encoder` the encoder is not trained and stays in eval mode: the statistics of its batch norms
    do not move, and its dropout is off.
    """

    Config = ClassifierConfig

    def __init__(self, config: ClassifierConfig, image_encoder: ImageEncoder, transform: EvalTransform) -> None:
        super().__init__(config, transform=transform, tokenizer=None)
        self.image_encoder = image_encoder
        self.label_head = nn.Linear(image_encoder.feature_dim, len(config.labels))
        nn.init.zeros_(self.label_head.weight)  # the loss begins at ln 2, and no draw of weights enters a comparison
        nn.init.zeros_(self.label_head.bias)
        if config.frozen_encoder:
            image_encoder.requires_grad_(False)
            image_encoder.keep_frozen_in_eval(True)

    @classmethod
    def build(cls, config: ClassifierConfig, *, pretrained: bool, tokenizer: Tokenizer | None) -> Self:
        """Raises ConfigError and WeightsError as `create_model` says."""
        if tokenizer is not None:
            raise ConfigError("a classifier reads no text: leave the tokenizer out")
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
        """A fresh head on an encoder, which is taken as it is and not copied."""
        config = ClassifierConfig(
            encoder=image_encoder.config,
            transform=dataclasses.asdict(transform),
            labels=tuple(labels),
            frozen_encoder=frozen_encoder,
            head_lr_mult=head_lr_mult,
        )
        return cls(config, image_encoder, transform)

    def forward(self, batch: Batch) -> Losses:
        """`batch.labels_BL` has the columns of `config.labels`, 1, 0 or NaN."""
        return Losses.sum(labels=losses.multilabel_bce(self.label_logits(batch.image_BCHW), batch.labels_BL))

    def label_logits(self, image_BCHW: Tensor) -> Tensor:
        """(B, L), in the order of `config.labels`."""
        logits_BL: Tensor = self.label_head(self.image_encoder(image_BCHW).pooled_BD)
        return logits_BL

    @torch.no_grad()
    def predict(self, image_BCHW: Tensor) -> dict[str, Tensor]:
        """Label -> probability (B,) of images as `transform` makes them."""
        probability_BL = torch.sigmoid(self.label_logits(image_BCHW.to(self.device)).float())
        return dict(zip(self.config.labels, probability_BL.T, strict=True))

    def parameter_groups(self, lr: float, weight_decay: float, layer_decay: float = 1.0) -> list[dict[str, Any]]:
        """The encoder at `lr`, falling by `layer_decay` towards its stem, and the head at `head_lr_mult` times `lr`."""
        parts = (("encoder", self.image_encoder, lr), ("head", self.label_head, lr * self.config.head_lr_mult))
        return [
            {**group, "name": f"{name}: {group['name']}"}
            for name, module, rate in parts
            for group in parameter_groups(module, rate, weight_decay, layer_decay=layer_decay)
        ]


def create_classifier(
    start: Path | str, labels: Sequence[str], *, frozen_encoder: bool = False, head_lr_mult: float = 1.0
) -> Classifier:
    """A fresh head over labels on the image encoder of a checkpoint of any system, or on an encoder by name.

    Args:
        start: folder of a checkpoint; or the name of an image encoder (`medvl list image-encoders`), which starts from
            its published weights.
        labels: names of the columns.
        frozen_encoder, head_lr_mult: see `ClassifierConfig`.

    Raises:
        CheckpointError: the folder is no whole checkpoint.
        ConfigError: the checkpoint has no image encoder that reads pixels, or the name is unknown.
        WeightsError: published weights cannot be had.
    """
    encoder, transform = encoder_at(start)
    return Classifier.on(encoder, labels, transform, frozen_encoder=frozen_encoder, head_lr_mult=head_lr_mult)


def encoder_at(start: Path | str) -> tuple[ImageEncoder, EvalTransform]:
    """The image encoder of a checkpoint of any system, or by name from its published weights; and its transform.

    Raises as `create_classifier` does.
    """
    if Path(start).is_dir():
        started = load(start)
        return image_encoder_of(started), started.transform
    encoder = create_image_encoder(str(start), pretrained=True)
    return encoder, EvalTransform(size=encoder.image_size[0])


def image_encoder_of(model: System) -> ImageEncoder:
    """The image encoder inside a system: of a dual-encoder, a fusion-encoder, or a head on either.

    Raises ConfigError when none reads pixels (a model that takes precomputed regions).
    """
    found = next((module for module in model.modules() if isinstance(module, ImageEncoder)), None)
    if found is None:
        raise ConfigError(f"{model.name} has no image encoder that reads pixels")
    return found
