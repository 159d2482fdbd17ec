"""What every system is, of either family: the same encoders, a configuration, a transform, a tokenizer."""

import abc
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.data.transforms.image import EvalTransform
from medvl.encoders import TextEncoder
from medvl.errors import ConfigError
from medvl.schema import Batch, Losses


class System(nn.Module, abc.ABC):
    """A published system, as `create_model` makes it and a checkpoint holds it.

    Attributes:
        config: its settings, enough to build it again.
        transform: how an image is prepared for inference.
        tokenizer: None in a model that is given token ids only.
    """

    name: ClassVar[str]
    """What `create_model` knows the system by."""
    Config: ClassVar[type]
    """Its frozen dataclass of settings."""

    def __init__(self, config: Any, *, transform: EvalTransform, tokenizer: Tokenizer | None) -> None:
        super().__init__()
        self.config, self.transform, self.tokenizer = config, transform, tokenizer

    @classmethod
    @abc.abstractmethod
    def build(cls, config: Any, *, pretrained: bool, tokenizer: Tokenizer | None) -> Self:
        """The system as its configuration says; with `pretrained`, from its encoders' published weights."""

    @abc.abstractmethod
    def forward(self, batch: Batch) -> Losses:
        """The losses of a training batch."""

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next(self.parameters()).device

    def tokenize(self, texts: Sequence[str] | Tensor, mask_BT: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(ids_BT, mask_BT) on the model's device, of strings or of ids with their mask.

        Raises ConfigError when strings meet a model without a tokenizer, or ids come without their mask.
        """
        if isinstance(texts, Tensor):
            if mask_BT is None:
                raise ConfigError("token ids need their mask: encode_text(ids_BT, mask_BT)")
            return texts, mask_BT
        if self.tokenizer is None:
            raise ConfigError(
                "this model has no tokenizer, so it cannot encode strings: "
                "create_model(..., tokenizer=FOLDER), or pass token ids and their mask"
            )
        ids_BT, mask_BT = self.tokenizer([texts] if isinstance(texts, str) else list(texts))
        return ids_BT.to(self.device), mask_BT.to(self.device)


class TwoTowers(System):
    """A system that is pretrained: with an image encoder and a text encoder of its own.

    Attributes:
        image_encoder, text_encoder: the same objects in every family, under the same names, so that the towers of one
            system's checkpoint start another one (`medvl.models.load_towers`).
    """

    def __init__(
        self,
        config: Any,
        image_encoder: nn.Module,
        text_encoder: TextEncoder,
        *,
        transform: EvalTransform,
        tokenizer: Tokenizer | None,
    ) -> None:
        super().__init__(config, transform=transform, tokenizer=tokenizer)
        self.image_encoder, self.text_encoder = image_encoder, text_encoder
