"""The base of dual-encoders: image and text are embedded apart and compared in one space."""

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from medvl.data.tokenize import Tokenizer
from medvl.data.transforms import EvalTransform
from medvl.encoders import ImageEncoder, TextEncoder
from medvl.models.base import TwoTowers
from medvl.schema import Embeddings


class DualEncoder(TwoTowers):
    """Two towers with a head each. A system adds its loss, and its similarity where that is more than the cosine.

    `tokenizer` may be None in a model that is given token ids only; `encode_text` and `embed_texts` of strings then
    raise ConfigError.
    """

    image_encoder: ImageEncoder

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
        super().__init__(config, image_encoder, text_encoder, transform=transform, tokenizer=tokenizer)
        self.image_head, self.text_head = image_head, text_head

    def encode_image(self, image_BCHW: Tensor) -> Tensor:
        """(B, E), L2-normalised, float32. Takes uint8 pixels, or floats that are already normalised."""
        features = self.image_encoder(image_BCHW)
        return F.normalize(self.image_head(features.pooled_BD).float(), dim=-1)

    def encode_text(self, texts: Sequence[str] | Tensor, mask_BT: Tensor | None = None) -> Tensor:
        """(B, E), L2-normalised, float32. Takes strings, or token ids (B, T) with their mask."""
        ids_BT, mask_BT = self.tokenize(texts, mask_BT)
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


def projection_head(in_features: int, out_features: int, hidden: int | None = None) -> nn.Sequential:
    """Linear, ReLU, Linear; inside as wide as `hidden`, or as its input."""
    inside = hidden or in_features
    return nn.Sequential(nn.Linear(in_features, inside), nn.ReLU(inplace=True), nn.Linear(inside, out_features))
