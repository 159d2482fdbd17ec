"""ALBEF: align before fuse (Li et al., arXiv 2107.07651, NeurIPS 2021). Both a dual-encoder and a fusion-encoder."""

import dataclasses
from typing import Any, Literal, Self, Unpack

from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.data.transforms.image import EvalTransform
from medvl.encoders import ImageEncoder, TextEncoder, create_text_encoder
from medvl.encoders.pretrained import Pretrained
from medvl.errors import ConfigError
from medvl.models.base import EncoderArguments, Parts
from medvl.models.fusion_encoders.bases.aligned import AlignedFusionConfig, AlignedFusionModel
from medvl.models.fusion_encoders.bases.encoders import create_pixel_encoders
from medvl.models.fusion_encoders.parts.bert import init_from_bert
from medvl.models.registry import register_system


@dataclasses.dataclass(frozen=True, kw_only=True)
class ALBEFConfig(AlignedFusionConfig):
    """Published settings of ALBEF."""

    image_encoder: str = "vit_b16"
    text_encoder: str = "bert"
    text_arguments: EncoderArguments = dataclasses.field(default_factory=lambda: {"num_hidden_layers": 6})
    """The lower half of BERT encodes the text; the upper half is the fusion-encoder of `layers` layers."""
    image_size: int = 256
    fit: Literal["crop", "pad", "squash"] = "squash"
    whole_words: bool = False
    fusion_lr_mult: float = 1.0
    head_lr_mult: float = 1.0
    max_tokens: int = 25


@register_system("albef")
class ALBEF(AlignedFusionModel):
    """Contrastive alignment of two towers, then matching and masked words in a fusion-encoder above the text's.

    As published, the text encoder is the lower half of a BERT; the upper half, with cross-attention to the image tokens
    added to each layer, is the fusion-encoder. With `pretrained` it starts from BERT's upper half.

    Deviations: the image encoder starts from timm's ViT instead of DeiT, with pixels normalised as its weights expect
    instead of by CLIP's statistics; the contrastive loss is computed over all ranks, with images of one study as
    positives; hard negatives are sampled by the model's own similarities, never from the same study or text; the queue
    starts empty instead of with noise; the word head starts at random; special tokens are never masked.
    """

    Config = ALBEFConfig

    def __init__(
        self, config: ALBEFConfig, image_encoder: ImageEncoder, text_encoder: TextEncoder, **parts: Unpack[Parts]
    ) -> None:
        _check_encoders(image_encoder, text_encoder, config)
        super().__init__(config, image_encoder, text_encoder, **parts)

    @classmethod
    def build(cls, config: ALBEFConfig, *, pretrained: bool, tokenizer: Tokenizer | None) -> Self:
        """See the base class."""
        image_encoder, text_encoder = create_pixel_encoders(config, cls.name, pretrained=pretrained)
        transform = EvalTransform(size=config.image_size, fit=config.fit, resize=config.resize)
        model = cls(config, image_encoder, text_encoder, transform=transform, tokenizer=tokenizer)
        model._init_fusion(pretrained)
        return model

    def load_encoders(self, image: Pretrained, text: Pretrained) -> None:
        """See the base class; the fusion-encoder starts from the upper half of the text's BERT."""
        super().load_encoders(image, text)
        self._init_fusion(text)

    def _init_fusion(self, source: Pretrained) -> None:
        if source is not False:
            config = self.config
            arguments: dict[str, Any] = {**config.text_arguments}
            arguments["num_hidden_layers"] = self.text_encoder.num_layers + config.layers
            bert = create_text_encoder(
                config.text_encoder, pretrained=source, vocab_size=config.vocab_size, **arguments
            )
            init_from_bert(self.fusion, bert)


def _check_encoders(image_encoder: ImageEncoder, text_encoder: TextEncoder, config: ALBEFConfig) -> None:
    if image_encoder.feature_dim != image_encoder.patch_dim:
        message = f"pooled and patch features of {config.image_encoder} must be equally wide, as in vision Transformers"
        raise ConfigError(message, "unsupported", field="image_encoder")
    embeddings = getattr(text_encoder.backbone, "get_input_embeddings", None)
    if text_encoder.pool != "cls" or embeddings is None or embeddings().weight.shape[1] != text_encoder.token_dim:
        message = f"text_encoder must be BERT-like, with words as wide as its states; got {config.text_encoder}"
        raise ConfigError(message, "unsupported", field="text_encoder")
    if text_encoder.token_dim % config.heads:
        message = f"heads must divide the text encoder's width {text_encoder.token_dim}, got {config.heads}"
        raise ConfigError(message, "conflict", field="heads")
