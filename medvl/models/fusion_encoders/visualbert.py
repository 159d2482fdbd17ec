"""VisualBERT: a BERT over the words of a text and the regions of an image (Li et al., arXiv
1908.03557).
"""

import dataclasses
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from medvl.encoders import TextEncoder
from medvl.encoders.pretrained import Pretrained
from medvl.models.base import Parts
from medvl.models.fusion_encoders.bases.base import FusionConfig
from medvl.models.fusion_encoders.bases.bert_stream import IMAGE_TYPE, JointStream
from medvl.models.fusion_encoders.bases.objectives import Corruption, Encoded
from medvl.models.fusion_encoders.parts.inputs import ImageSource
from medvl.models.registry import register_system
from medvl.schema import Batch, ImageFeatures


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisualBERTConfig(FusionConfig):
    """Published settings of VisualBERT, on a grid of cells unless `image_encoder` is
    `regions:WIDTH`.
    """

    image_encoder: str = "resnet50"
    text_encoder: str = "bert"
    image_size: int = 224
    whole_words: bool = False
    fusion_lr_mult: float = 1.0
    head_lr_mult: float = 1.0
    image_positions: bool = False
    """Number the cells of a grid; as published, all regions have the position 0."""
    max_tokens: int = 128


@register_system("visualbert")
class VisualBERT(JointStream):
    """Masked words and sentence-image prediction from one pass, also of the words of texts that do
    not match.

    The paper's text consists of two captions, and the second may belong to another image; a report
    is one text, which belongs to another image in half of the cases. The paper's regions are from a
    frozen detector (`regions:2048`); an image encoder in its place is trained.
    """

    Config = VisualBERTConfig

    def __init__(
        self,
        config: VisualBERTConfig,
        image_encoder: ImageSource,
        text_encoder: TextEncoder,
        **parts: Unpack[Parts],
    ) -> None:
        super().__init__(config, image_encoder, text_encoder, **parts)
        self.numbers_cells = config.image_positions
        words: Any = self._word_embeddings()
        self.image_types = nn.Embedding(*words[0].shape)
        self.image_positions = nn.Embedding(*words[1].shape)
        self._copy_embeddings()

    def load_encoders(self, image: Pretrained, text: Pretrained) -> None:
        super().load_encoders(image, text)
        self._copy_embeddings()

    def _word_embeddings(self) -> tuple[Tensor, Tensor]:
        embeddings: Any = self.text_encoder.backbone
        embeddings = embeddings.embeddings
        return embeddings.token_type_embeddings.weight, embeddings.position_embeddings.weight

    @torch.no_grad()
    def _copy_embeddings(self) -> None:
        """Start the types and positions of regions from those of words, as published."""
        for table, words in zip(
            (self.image_types, self.image_positions), self._word_embeddings(), strict=True
        ):
            table.weight.copy_(words)

    def embed_image(self, features: ImageFeatures) -> Tensor:
        states_BPD: Tensor = self.image_input(features.patches_BPD)
        place_P = (
            torch.arange(states_BPD.shape[1], device=states_BPD.device)
            * self.config.image_positions
        )
        type_P = torch.full_like(place_P, IMAGE_TYPE)
        return self.embed_like_words(
            states_BPD, self.image_types(type_P) + self.image_positions(place_P)
        )

    def encode(self, batch: Batch, corruption: Corruption) -> Encoded:
        return self.encode_together(batch, corruption)
