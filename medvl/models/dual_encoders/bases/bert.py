"""Base of dual-encoders with a BERT-like text encoder: how they are built from their configuration."""

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any, Self

from torch import nn

from medvl.common.checks import check_within
from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.data.transforms.image import EvalTransform
from medvl.encoders import ImageEncoder, TextEncoder, freeze_layers
from medvl.models.dual_encoders.bases.base import ContrastiveEncoder, DualEncoderConfig
from medvl.models.dual_encoders.bases.build import create_encoders


@dataclasses.dataclass(frozen=True, kw_only=True)
class BertDualConfig(DualEncoderConfig):
    """Settings of a dual-encoder with a BERT-like text encoder."""

    frozen_text_layers: int = 0
    """Layers of the text encoder that are frozen, with the embeddings, from the bottom; 0 trains everything. They keep
    their dropout, as in LoVT's code."""
    attention_dropout: float | None = None
    """Dropout of the text encoder's attention in training; None is its default, 0.1 in BERT. At 0, packed text uses the
    GPU's kernel for sequences of unequal length."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_within(self, "[0, inf)", "frozen_text_layers")
        check_within(self, "[0, 1)", "attention_dropout")


class BertDualEncoder(ContrastiveEncoder):
    """A contrastive dual-encoder that implements `make_heads`, and `encoder_arguments` where it needs others."""

    @classmethod
    def build(cls, config: Any, *, pretrained: bool, tokenizer: Tokenizer | None) -> Self:
        """See the base class."""
        image, text = cls.encoder_arguments(config)
        if config.attention_dropout is not None:
            text = {**text, "attention_probs_dropout_prob": config.attention_dropout}
        encoders = create_encoders(
            config,
            {"pretrained": pretrained, "image_size": config.image_size, **image},
            {"pretrained": pretrained, "vocab_size": config.vocab_size, **text},
        )
        freeze_layers(encoders[1], config.frozen_text_layers, eval_mode=False)
        heads: dict[str, Any] = {**cls.make_heads(config, *encoders)}
        return cls(config, *encoders, **heads, transform=cls.make_transform(config), tokenizer=tokenizer)

    @classmethod
    def encoder_arguments(cls, config: Any) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """Return arguments of `create_image_encoder` and `create_text_encoder` that this system sets."""
        return {}, {}

    @classmethod
    @abc.abstractmethod
    def make_heads(cls, config: Any, image_encoder: ImageEncoder, text_encoder: TextEncoder) -> dict[str, nn.Module]:
        """Return the modules behind the encoders, by name of the constructor's argument: image_head, text_head, ..."""

    @classmethod
    def make_transform(cls, config: Any) -> EvalTransform:
        """Return the preparation of an image for inference."""
        transform: EvalTransform = config.transform()
        return transform
