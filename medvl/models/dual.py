"""The base of dual-encoders: image and text are embedded apart and compared in one space."""

import abc
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medvl.data.tokenize import Tokenizer
from medvl.data.transforms import EvalTransform
from medvl.encoders import ImageEncoder, TextEncoder
from medvl.errors import ConfigError
from medvl.schema import Batch, Embeddings, Losses


class DualEncoder(nn.Module, abc.ABC):
    """Two towers with a head each. A system adds its loss, and its similarity where that is more than the cosine.

    `tokenizer` may be None in a model that is given token ids only; `encode_text` and `embed_texts` of strings then
    raise ConfigError.
    """

    name: ClassVar[str]
    """What `create_model` knows the system by."""
    Config: ClassVar[type]
    """Its frozen dataclass of settings."""

    def __init__(
        self,
        config: Any,
        image_encoder: ImageEncoder,
        text_encoder: TextEncoder,
        image_head: nn.Module,
        text_head: nn.Module,
        *,
        transform: EvalTransform,
        tokenizer: Tokenizer | None,
    ) -> None:
        super().__init__()
        self.config = config
        self.image_encoder, self.text_encoder = image_encoder, text_encoder
        self.image_head, self.text_head = image_head, text_head
        self.transform, self.tokenizer = transform, tokenizer

    @classmethod
    @abc.abstractmethod
    def build(cls, config: Any, *, pretrained: bool, tokenizer: Tokenizer | None) -> Self:
        """The system as its configuration says; with `pretrained`, from its encoders' published weights."""

    @abc.abstractmethod
    def forward(self, batch: Batch) -> Losses:
        """The losses of a training batch."""

    def encode_image(self, image_BCHW: Tensor) -> Tensor:
        """(B, E), L2-normalised, float32. Takes uint8 pixels, or floats that are already normalised."""
        features = self.image_encoder(image_BCHW)
        return F.normalize(self.image_head(features.pooled_BD).float(), dim=-1)

    def encode_text(self, texts: Sequence[str] | Tensor, mask_BT: Tensor | None = None) -> Tensor:
        """(B, E), L2-normalised, float32. Takes strings, or token ids (B, T) with their mask."""
        ids_BT, mask_BT = self._tokens(texts, mask_BT)
        features = self.text_encoder(ids_BT, mask_BT)
        return F.normalize(self.text_head(features.pooled_BD).float(), dim=-1)

    def embed_images(self, image_BCHW: Tensor) -> Embeddings:
        """Images as `similarity` takes them."""
        return Embeddings(self.encode_image(image_BCHW))

    def embed_texts(self, texts: Sequence[str]) -> Embeddings:
        """Texts as `similarity` takes them."""
        return Embeddings(self.encode_text(texts))

    def similarity(self, images: Embeddings | Tensor, texts: Embeddings | Sequence[str]) -> Tensor:
        """(N, M): the cosine of every image with every text.

        Takes embeddings, or pixels (N, C, H, W) and strings: encode once with `embed_images` and `embed_texts` where
        one side is compared more than once.
        """
        image_embeddings = images if isinstance(images, Embeddings) else self.embed_images(images)
        text_embeddings = texts if isinstance(texts, Embeddings) else self.embed_texts(texts)
        return image_embeddings.global_NE @ text_embeddings.global_NE.T

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next(self.parameters()).device

    def _tokens(self, texts: Sequence[str] | Tensor, mask_BT: Tensor | None) -> tuple[Tensor, Tensor]:
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


def projection_head(in_features: int, out_features: int) -> nn.Sequential:
    """Linear, ReLU, Linear; as wide inside as its input."""
    return nn.Sequential(
        nn.Linear(in_features, in_features), nn.ReLU(inplace=True), nn.Linear(in_features, out_features)
    )
