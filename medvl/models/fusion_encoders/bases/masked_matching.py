"""The base of systems that are pretrained by masked words and image-text matching.

N masked positions, M pairs, V vocabulary; the other letters as in `medvl.schema`.
"""

import dataclasses
import functools
from typing import Any, Self

import torch
from torch import Tensor, nn

from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.data.transforms.image import EvalTransform
from medvl.losses.pairs.itm import MatchingPairs
from medvl.models.bert_init import init_weights
from medvl.models.fusion_encoders.bases.base import FusionModel
from medvl.models.fusion_encoders.bases.encoders import create_encoders
from medvl.models.fusion_encoders.objectives.base import Corruption, Encoded
from medvl.models.fusion_encoders.objectives.matching import ImageTextMatching
from medvl.models.fusion_encoders.objectives.words import MaskedLanguageModeling
from medvl.models.fusion_encoders.parts.corruption import sample_pairs
from medvl.models.fusion_encoders.parts.encoder import Fused, Tokens
from medvl.models.masked_words import MaskedWords, WordHead
from medvl.schema import Batch


class MaskedMatchingModel(FusionModel):
    """Masked words (`mlm`) and image-text matching (`itm`).

    `encode` is `encode_apart` by default: masked texts with their own images, and whole texts with the images that are
    sampled for them (METER, ViLT). A system whose masked texts are also those that are matched (BERT, VisualBERT,
    LXMERT, MedViLL) returns `encode_together`. Negatives are other images of the batch.

    A subclass calls `make_heads` when it has its layers.
    """

    def make_heads(self, fused_dim: int, pooled_dim: int, *, tied: bool = False) -> None:
        """Create the heads and the objectives; with `tied`, words are scored by the table of word embeddings."""
        self.fused_dim, self.pooled_dim = fused_dim, pooled_dim
        self.mlm_head = WordHead(fused_dim, self.text_encoder.vocab_size, tied=tied)
        self.itm_head = nn.Linear(pooled_dim, 2)
        init_weights(self.itm_head)
        self.mlm = MaskedLanguageModeling(self.config.mlm_weight, self.mask_words, self.score_words)
        self.itm = ImageTextMatching(self.config.itm_weight, self.sample_pairs, self.itm_head)
        self.objectives = (self.mlm, self.itm)

    @classmethod
    def build(cls, config: Any, *, pretrained: bool, tokenizer: Tokenizer | None) -> Self:
        """See the base class."""
        image_encoder, text_encoder = create_encoders(config, pretrained=pretrained)
        transform = EvalTransform(size=config.image_size, fit=config.fit, resize=config.resize)
        return cls(config, image_encoder, text_encoder, transform=transform, tokenizer=tokenizer)

    def sample_pairs(self, batch: Batch) -> MatchingPairs:
        """Keep the image of half of the complete samples; give the others a wrong image of the batch."""
        return sample_pairs(batch)

    def score_words(self, states_ND: Tensor) -> Tensor:
        """See the base class."""
        backbone: Any = self.text_encoder.backbone
        table_VD = backbone.get_input_embeddings().weight if self.mlm_head.words is None else None
        scores_NV: Tensor = self.mlm_head(states_ND, table_VD)
        return scores_NV

    def word_states(self, fused: Fused, position_N: Tensor, width: int) -> Tensor:
        """(N, D): fused states at positions of the flattened (B * `width`) token ids; none may be the first."""
        row_N, column_N = position_N // width, position_N % width
        return fused.text.states_BND[row_N, column_N]

    def masked_text_tokens(self, batch: Batch, masked_ids_BT: Tensor) -> Tokens:
        """Encode the masked texts of a batch."""
        return self.text_tokens(masked_ids_BT, batch.mask_BT, batch.has_text_B)

    def encode(self, batch: Batch, corruption: Corruption) -> Encoded:
        """See the base class."""
        return self.encode_apart(batch, corruption)

    def encode_apart(
        self, batch: Batch, corruption: Corruption, image: Tokens | None = None, own_image: Tokens | None = None
    ) -> Encoded:
        """Fuse masked texts with their images and whole texts with sampled ones, in one pass of twice the rows.

        `image` are the encoded images, if they exist already; `own_image` the images of masked texts, if they differ.
        """
        words, pairs = corruption.of(self.mlm), corruption.of(self.itm)
        image = image or self.image_tokens(self.image_input_of(batch), batch.has_image_B)
        masked, text = self.masked_and_unmasked(batch, words)
        own, sampled = self.fuse_all((masked, own_image or image), (text.rows(pairs.text_N), image.rows(pairs.image_N)))
        return Encoded(
            batch=batch,
            image=image,
            text=text,
            word_states_ND=self.word_states(own, words.position_N, batch.ids_BT.shape[1]),
            pooled_MD=sampled.pooled_BD,
            own=own,
            pairs=sampled,
            matched_M=pairs.matched_N,
        )

    def encode_together(self, batch: Batch, corruption: Corruption) -> Encoded:
        """Fuse every masked text with the image sampled for it, or its own in a system without matching."""
        image = self.image_tokens(self.image_input_of(batch), batch.has_image_B)
        return self.fuse_together(batch, corruption, image)[0]

    def fuse_together(self, batch: Batch, corruption: Corruption, image: Tokens) -> tuple[Encoded, Fused, Tensor]:
        """See `encode_together`; also return the fused sequences, and the image of each row (B,)."""
        words = corruption.of(self.mlm)
        text = self.masked_text_tokens(batch, words.ids_BT)
        row_B = image_B = torch.arange(len(batch), device=batch.ids_BT.device)
        if self.itm in self.objectives:
            pairs = corruption.of(self.itm)
            image_B, row_B = row_B.index_copy(0, pairs.text_N, pairs.image_N), pairs.text_N
        fused = self.fuse(text, image.rows(image_B))
        encoded = Encoded(
            batch=batch,
            image=image,
            text=text,
            word_states_ND=self.word_states(fused, words.position_N, batch.ids_BT.shape[1]),
            pooled_MD=fused.pooled_BD[row_B],
        )
        return encoded, fused, image_B

    def fuse_all(self, *inputs: tuple[Tokens, Tokens]) -> list[Fused]:
        """Fuse several batches of texts and images in one pass."""
        texts, images = zip(*inputs, strict=True)
        text: Tokens = functools.reduce(Tokens.beside, texts)
        image: Tokens = functools.reduce(Tokens.beside, images)
        return self.fuse(text, image).split([len(tokens.states_BND) for tokens in texts])

    def masked_and_unmasked(self, batch: Batch, words: MaskedWords) -> tuple[Tokens, Tokens]:
        """Encode the texts masked and unmasked in one pass of the text encoder."""
        twice = dataclasses.replace(
            batch,
            ids_BT=torch.cat([words.ids_BT, batch.ids_BT]),
            mask_BT=batch.mask_BT.repeat(2, 1),
            has_text_B=None if batch.has_text_B is None else batch.has_text_B.repeat(2),
        )
        masked, text = self.texts_of(twice).split([len(batch), len(batch)])
        return masked, text
