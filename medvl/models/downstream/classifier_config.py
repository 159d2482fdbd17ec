"""The settings of a classifier of findings."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from medvl.errors import ConfigError
from medvl.models.base import SystemConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassifierConfig(SystemConfig):
    """An image encoder and one linear layer."""

    system: ClassVar[str] = "classifier"

    encoder: Mapping[str, Any]
    """Arguments of `create_image_encoder`, its name among them."""
    transform: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of `EvalTransform`."""
    labels: tuple[str, ...]
    frozen_encoder: bool = False
    """Train the linear layer alone, the encoder in eval mode: a linear probe by gradient descent."""
    head_lr_mult: float = 1.0
    """Learning rate of the linear layer, as a multiple of the encoder's."""

    def __post_init__(self) -> None:
        if not self.labels or len(set(self.labels)) != len(self.labels):
            raise ConfigError(f"labels must be one or more, each once; there are {len(self.labels)}")
        if self.head_lr_mult <= 0:
            raise ConfigError(f"head_lr_mult must be above 0, got {self.head_lr_mult}")
        if "name" not in self.encoder:
            raise ConfigError("encoder must name the image encoder: {'name': 'resnet50'}")
