"""Two encoders, then a fusion-encoder in one of its layouts, pretrained by masked words and image-text matching.

METER's recipe (Dou et al., arXiv 2111.02387) in its dual-stream layout; M3AE adds to it.

N masked positions, M pairs; the other letters as in `medvl.schema`.
"""

import abc
import dataclasses
from typing import Any, Self

import torch
from torch import Tensor, nn

from medvl import losses
from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.data.transforms.image import EvalTransform
from medvl.encoders import TextEncoder
from medvl.models.fusion_encoders.base import FusionModel
from medvl.models.fusion_encoders.config import DualStreamConfig, SingleStreamConfig, StreamConfig
from medvl.models.fusion_encoders.corruption import Draw, draw_pairs, draw_text
from medvl.models.fusion_encoders.layers.encoder import (
    AttentionMaps,
    DualStream,
    Fused,
    FusionEncoder,
    SingleStream,
    Tokens,
)
from medvl.models.fusion_encoders.layers.heads import WordHead
from medvl.models.fusion_encoders.layers.inputs import (
    ImageInput,
    ImageSource,
    RegionEncoder,
    create_encoders,
    of_present,
)
from medvl.models.fusion_encoders.layers.transformer import Sizes, init_weights
from medvl.models.registry import register_system
from medvl.schema import Batch, Losses


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Predictions:
    """What a pretraining step says about what was drawn for it."""

    words_NV: Tensor
    """Scores of the vocabulary at the masked positions."""
    matched_M2: Tensor
    """Logits of "no match" and "match" of the drawn pairs."""


class StreamModel(FusionModel, abc.ABC):
    """Both layouts: everything but the layers is the same."""

    def __init__(
        self,
        config: StreamConfig,
        image_encoder: ImageSource,
        text_encoder: TextEncoder,
        *,
        transform: EvalTransform,
        tokenizer: Tokenizer | None,
    ) -> None:
        super().__init__(config, image_encoder, text_encoder, transform=transform, tokenizer=tokenizer)
        self.image_input = ImageInput(image_encoder, config.width, positions=config.image_positions)
        self.text_input = nn.Linear(text_encoder.token_dim, config.width)
        self.fusion = self.make_fusion(config)
        self.mlm_head = WordHead(config.width, text_encoder.vocab_size)
        self.itm_head = nn.Linear(self.fusion.pooled_dim, 2)
        self.pooled_dim = self.fusion.pooled_dim
        init_weights(self.text_input)
        init_weights(self.itm_head)

    @classmethod
    def build(cls, config: Any, *, pretrained: bool, tokenizer: Tokenizer | None) -> Self:
        """Raises ConfigError and WeightsError as `create_model` says."""
        image_encoder, text_encoder = create_encoders(config, pretrained=pretrained)
        transform = EvalTransform(size=config.image_size, fit=config.fit)
        return cls(config, image_encoder, text_encoder, transform=transform, tokenizer=tokenizer)

    @abc.abstractmethod
    def make_fusion(self, config: Any) -> FusionEncoder:
        """The layers, of the configuration's sizes."""

    def image_tokens(self, image: Tensor, has_image_B: Tensor | None = None, keep_BK: Tensor | None = None) -> Tokens:
        """See the base class; `keep_BK` leaves patches out before the first block of a vision Transformer."""

        def encode(index_K: Tensor | None) -> Tokens:
            chosen = image if index_K is None else image[index_K]
            if isinstance(self.image_encoder, RegionEncoder):
                return self.image_input(self.image_encoder(chosen), real_BP=self.image_encoder.real(chosen))
            if keep_BK is None:
                return self.image_input(self.image_encoder(chosen))
            kept = keep_BK if index_K is None else keep_BK[index_K]
            return self.image_input(self.image_encoder(chosen, kept), keep_BK=kept)

        return of_present(has_image_B, self.config.width, encode)

    def text_tokens(self, ids_BT: Tensor, mask_BT: Tensor, has_text_B: Tensor | None = None) -> Tokens:
        """See the base class."""

        def encode(index_K: Tensor | None) -> Tokens:
            ids, mask = (ids_BT, mask_BT) if index_K is None else (ids_BT[index_K], mask_BT[index_K])
            features = self.text_encoder(ids, mask)
            return Tokens(self.text_input(features.tokens_BTD), features.mask_BT)

        return of_present(has_text_B, self.config.width, encode)

    def fuse(self, text: Tokens, image: Tokens) -> Fused:
        """See the base class."""
        fused: Fused = self.fusion(text, image)
        return fused

    def looks(self, text: Tokens, image: Tokens) -> AttentionMaps:
        """See the base class."""
        return self.fusion.looks(text, image).cells(image, leading=1)

    def draw(self, batch: Batch) -> Draw:
        """What this step leaves to chance."""
        masked, masked_N = draw_text(batch, self.masking)
        return Draw(masked=masked, masked_N=masked_N, pairs=draw_pairs(batch))

    def learn(self, batch: Batch) -> Losses:
        """Masked words behind the text's own image; pairs that match or not. Each averages over the samples that have
        what it needs. A negative is another image of the batch, where METER decodes one for it.
        """
        draw = self.draw(batch)
        return self.judge(self.predict(batch, draw), draw)

    def predict(self, batch: Batch, draw: Draw) -> Predictions:
        """Every image is encoded once for both tasks, and both are fused in one pass."""
        image = self.image_tokens(self.image_input_of(batch), batch.has_image_B)
        masked, clean = self.texts(batch, draw)
        return self.predict_words_and_pairs(masked, clean, image, draw)

    def texts(self, batch: Batch, draw: Draw) -> tuple[Tokens, Tokens]:
        """(masked, clean), from one pass of the text encoder."""
        twice = None if batch.has_text_B is None else batch.has_text_B.repeat(2)
        both = self.text_tokens(torch.cat([draw.masked.ids_BT, batch.ids_BT]), batch.mask_BT.repeat(2, 1), twice)
        first_B = torch.arange(len(batch), device=both.states_BND.device)
        return both.rows(first_B), both.rows(first_B + len(batch))

    def predict_words_and_pairs(self, masked: Tokens, clean: Tokens, image: Tokens, draw: Draw) -> Predictions:
        """Masked texts with their images and the drawn pairs, side by side through the fusion-encoder."""
        text = masked.beside(clean.rows(draw.pairs.text_N))
        fused = self.fuse(text, image.beside(image.rows(draw.pairs.image_N)))
        count = len(masked.states_BND)
        states_ND = fused.text.states_BND[:count].flatten(0, 1)[draw.masked_N]
        return Predictions(words_NV=self.mlm_head(states_ND), matched_M2=self.itm_head(fused.pooled_BD[count:]))

    def judge(self, said: Predictions, draw: Draw) -> Losses:
        """The losses of predictions."""
        mlm = losses.mlm(said.words_NV, draw.hidden_N)
        itm = losses.itm(said.matched_M2, draw.pairs.matched_N)
        total = self.config.mlm_weight * mlm + self.config.itm_weight * itm
        return Losses(total=total, terms={"mlm": mlm, "itm": itm})


@register_system("dual_stream")
class DualStreamModel(StreamModel):
    """A stream for each modality, with co-attention."""

    Config = DualStreamConfig
    fusion: DualStream

    def make_fusion(self, config: StreamConfig) -> FusionEncoder:
        """See the base class."""
        return DualStream(_sizes(config))


@register_system("single_stream")
class SingleStreamModel(StreamModel):
    """One Transformer over both modalities' tokens."""

    Config = SingleStreamConfig

    def make_fusion(self, config: SingleStreamConfig) -> FusionEncoder:
        """See the base class."""
        return SingleStream(_sizes(config), config.attention, config.seq2seq_share)


def _sizes(config: StreamConfig) -> Sizes:
    return Sizes(
        width=config.width,
        layers=config.layers,
        heads=config.heads,
        intermediate=config.intermediate,
        dropout=config.dropout,
    )
