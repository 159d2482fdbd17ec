"""Base classes of all systems."""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Self, TypedDict, Unpack

import torch
from torch import Tensor, nn

from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.data.transforms.image import EvalTransform
from medvl.encoders import TextEncoder
from medvl.errors import ConfigError
from medvl.schema import Batch, Inputs, Losses


@dataclasses.dataclass(frozen=True, kw_only=True)
class SystemConfig:
    """Base of the settings of a system."""

    system: ClassVar[str]
    """Name of the system; set by `medvl.models.registry.register_system`."""


class Parts(TypedDict):
    """What the constructors of systems pass to the base class: the attributes of `System` with these names."""

    transform: EvalTransform
    tokenizer: Tokenizer | None


class System(nn.Module, abc.ABC):
    """Base of everything that `create_model` creates and a checkpoint holds.

    Attributes:
        config: settings, sufficient to build the system again.
        transform: preparation of an image for inference.
        tokenizer: None in a model that takes token ids only.
    """

    name: ClassVar[str]
    """Name for `create_model`; set by `medvl.models.registry.register_system`."""
    Config: ClassVar[type[SystemConfig]]
    """Frozen dataclass of settings."""
    inputs: ClassVar[Inputs] = Inputs()
    """Optional parts of a batch that `forward` needs; loaders of a training run make them."""

    def __init__(self, config: Any, *, transform: EvalTransform, tokenizer: Tokenizer | None) -> None:
        super().__init__()
        self.config, self.transform, self.tokenizer = config, transform, tokenizer

    @classmethod
    @abc.abstractmethod
    def build(cls, config: Any, *, pretrained: bool, tokenizer: Tokenizer | None) -> Self:
        """Build the system from its settings; with `pretrained`, from the encoders' published weights.

        Raises ConfigError and WeightsError as `create_model` does.
        """

    @abc.abstractmethod
    def forward(self, batch: Batch) -> Losses:
        """Return the losses of a training batch."""

    def before_step(self, step: int) -> None:
        """Update state before the forward pass of optimiser step `step`, from 0: clamps, freezing, normalisation."""

    def after_step(self, step: int) -> None:
        """Update state after optimiser step `step`, from 0, unless it was skipped: moving averages."""

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return next(self.parameters()).device

    def tokenize(self, texts: Sequence[str] | Tensor, mask_BT: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return (ids_BT, mask_BT) on the model's device, from strings or from ids with their mask.

        Raises ConfigError for strings without a tokenizer, and for ids without a mask.
        """
        if isinstance(texts, Tensor):
            if mask_BT is None:
                raise ConfigError("token ids need a mask: encode_text(ids_BT, mask_BT)", "missing", field="mask_BT")
            return texts, mask_BT
        if self.tokenizer is None:
            message = "strings need a tokenizer: create_model(..., tokenizer=FOLDER), or pass token ids"
            raise ConfigError(message, "missing", field="tokenizer")
        ids_BT, mask_BT = self.tokenizer([texts] if isinstance(texts, str) else list(texts))
        return ids_BT.to(self.device), mask_BT.to(self.device)


class TwoTowers(System):
    """Base of pretrained systems: an image encoder and a text encoder.

    Attributes:
        image_encoder, text_encoder: the same classes under the same names in every system, so that the towers of one
            system's checkpoint can initialise another system (`medvl.models.load_towers`).
    """

    def __init__(
        self, config: Any, image_encoder: nn.Module, text_encoder: TextEncoder, **parts: Unpack[Parts]
    ) -> None:
        super().__init__(config, **parts)
        self.image_encoder, self.text_encoder = image_encoder, text_encoder


def complete_rows(batch: Batch) -> Tensor:
    """Return (N,) int64: the rows of a batch that have both an image and a text."""
    complete_B = torch.ones_like(batch.mask_BT[:, 0])
    for has_B in (batch.has_image_B, batch.has_text_B):
        complete_B = complete_B if has_B is None else complete_B & has_B
    return complete_B.nonzero().squeeze(1)
