"""MedViLL: one BERT over an image's cells and its report (Moon et al., arXiv 2105.11333, JBHI
2022).
"""

import dataclasses
from typing import Any, Literal, Self, Unpack

import torch
from torch import Tensor

from medvl.common.config_io import check_choice, check_within
from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.data.transforms.image import EvalTransform
from medvl.encoders import ImageEncoder, TextEncoder, freeze_layers
from medvl.errors import ConfigError
from medvl.losses.pairs.image_text import MatchingPairs
from medvl.models.base import Parts
from medvl.models.checkpoint_folder import copy_training
from medvl.models.fusion_encoders.bases.base import (
    FusionConfig,
    check_attention,
    create_pixel_encoders,
)
from medvl.models.fusion_encoders.bases.bert_stream import JointStream
from medvl.models.fusion_encoders.bases.objectives import Corruption, Encoded
from medvl.models.fusion_encoders.parts.encoder import Fused, Tokens, join, stream_mask
from medvl.models.fusion_encoders.parts.inputs import encode_present, sample_cells, sample_pairs
from medvl.models.fusion_encoders.parts.transformer import CAUSAL_ATTENTIONS, AttentionKind
from medvl.models.registry import register_system
from medvl.models.text_decoding import Decoding, Generated, search
from medvl.schema import Batch

# A BERT that encodes text and image cells jointly, with masks under which it writes texts about
# images.
#
# P cells of the grid, T text tokens including CLS and SEP, S all tokens, R rows that are written;
# the other letters as in `medvl.schema`.

IMAGE = 0
TEXT = 1
"""BERT's token types."""
_LEADING = 2
"""Tokens of the image block that come from the text's ids: CLS, and the SEP that closes the
block.
"""
_GREEDY = Decoding()


@dataclasses.dataclass(frozen=True, kw_only=True)
class MedViLLConfig(FusionConfig):
    """Published settings of MedViLL.

    The released code trains nothing of the ResNet: its list of layers to train is empty, where the
    paper freezes the first ones.
    """

    image_encoder: str = "resnet50"
    text_encoder: str = "bert"
    image_size: int = 512
    fit: Literal["crop", "pad", "squash"] = "squash"
    """As the released fine-tuning code prepares images."""
    whole_words: bool = False
    fusion_lr_mult: float = 1.0
    head_lr_mult: float = 1.0
    frozen_image_layers: int = 1
    """Number of stages above the stem that are frozen together with it; 0 trains everything."""
    image_tokens: int = 180
    """Grid cells that are sampled in training; all are used if there are no more, and in eval
    mode.
    """
    attention: AttentionKind = "bar"
    seq2seq_share: float = 0.75
    """With attention "mixed": share of samples that are trained with the sequence-to-sequence
    mask.
    """
    objective: Literal["pretraining", "report"] = "pretraining"
    """"pretraining": MLM and ITM. "report": fine-tuning for report generation by MLM alone, with
    matching images and with the closing token masked like words (with attention `seq2seq` in the
    paper).
    """
    max_tokens: int = 255
    """Including the first and the last token: 253 word pieces."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self.objective, ("pretraining", "report"), "objective")
        unmatched: tuple[AttentionKind, ...] = (
            ("seq2seq",) if self.objective == "pretraining" else ()
        )
        check_attention(self, unmatched=unmatched)
        check_within(self, "(0, inf)", "image_tokens")
        check_within(self, "[0, inf)", "frozen_image_layers")
        for name in ("mirror_weight", "denial_weight"):
            if self.objective == "report" and getattr(self, name):
                message = f"objective 'report' is without matching; leave {name} 0"
                raise ConfigError(message, "conflict", field=name)
        if self.objective == "report" and self.attention not in CAUSAL_ATTENTIONS:
            message = (
                f"objective 'report' needs attention {' or '.join(CAUSAL_ATTENTIONS)}, "
                f"got {self.attention!r}"
            )
            raise ConfigError(message, "conflict", field="attention")


@register_system("medvill")
class MedViLL(JointStream):
    """The sequence `[CLS] cells [SEP] text [SEP]` through BERT, pretrained by masked words and
    image-text matching in one pass, under the configuration's attention mask.

    The image block, including CLS and SEP, has the first token type, the text the second. The
    positions of cells and of the text both start from zero. `Fused.image` is the image block with
    CLS and SEP, `Fused.text` the text without CLS. CLS is pooled; under "non_cross", where it reads
    no text, its product with the text's closing SEP (in the released code with a second CLS before
    the text).

    Words are also predicted next to images that do not match. A wrong image is one of the batch
    whose text and labels differ (without labels, whose text differs); exactly half of the samples
    match, where the released code flips a coin. In eval mode all cells are used and a mixed mask is
    bidirectional, so that nothing is random.

    Positions of cells are rows of BERT's own table, so a checkpoint is fine-tuned at the image size
    that it has.
    """

    Config = MedViLLConfig
    image_between_text_tokens = True
    numbers_cells = True

    def __init__(
        self,
        config: MedViLLConfig,
        image_encoder: ImageEncoder,
        text_encoder: TextEncoder,
        **parts: Unpack[Parts],
    ) -> None:
        super().__init__(config, image_encoder, text_encoder, **parts)
        height, columns = image_encoder.grid(*image_encoder.image_size)
        if height * columns > text_encoder.max_tokens:
            message = (
                f"{height * columns} cells exceed {text_encoder.max_tokens} positions; "
                f"use a smaller image_size"
            )
            raise ConfigError(message, "too_large", field="image_size")
        if config.objective == "report":
            self.objectives = (self.mlm,)
            self.masks_closing_token = True
            self.pooler.requires_grad_(False)
            self.itm_head.requires_grad_(False)
            self.can_match = False

    @classmethod
    def build(cls, config: MedViLLConfig, *, pretrained: bool, tokenizer: Tokenizer | None) -> Self:
        image_encoder, text_encoder = create_pixel_encoders(
            config, "medvill", pretrained=pretrained
        )
        freeze_layers(image_encoder, config.frozen_image_layers)
        transform = EvalTransform(size=config.image_size, fit=config.fit, resize=config.resize)
        return cls(config, image_encoder, text_encoder, transform=transform, tokenizer=tokenizer)

    def for_reading(self) -> Self:
        """Make attention bidirectional and read all cells in training, as in the released code."""
        encoder: Any = self.image_encoder
        height, columns = encoder.grid(*encoder.image_size)
        if (
            self.config.attention == "bidirectional"
            and self.config.image_tokens >= height * columns
        ):
            return self
        config = dataclasses.replace(
            self.config,
            objective="pretraining",
            attention="bidirectional",
            image_tokens=max(self.config.image_tokens, height * columns),
            image_weights=None,
            text_weights=None,
        )
        other = self.build(config, pretrained=False, tokenizer=self.tokenizer)
        other.load_state_dict(self.state_dict(), strict=True)
        copy_training(self, other)
        return other.train(self.training)

    def image_tokens(self, image: Tensor, has_image_B: Tensor | None = None) -> Tokens:
        """Embed the cells; training samples `config.image_tokens` of them, the same for all
        images of a batch.
        """
        tokens = encode_present(has_image_B, self.pooled_dim, self._embed_cells, image)
        if has_image_B is None:
            return tokens
        # CLS and SEP remain as keys
        return Tokens(tokens.states_BND, tokens.real_BN() & has_image_B[:, None])

    def _embed_cells(self, image: Tensor) -> Tokens:
        cells_BPD = self.image_encoder(image).patches_BPD
        place_P = torch.arange(cells_BPD.shape[1], device=cells_BPD.device)
        if self.training and self.config.image_tokens < len(place_P):
            place_P = sample_cells(len(place_P), self.config.image_tokens, 1)[0].to(
                cells_BPD.device
            )
        place_BP = place_P.expand(len(cells_BPD), -1)
        states_BPD = self.text_encoder.embed_vectors(
            self.image_input(cells_BPD[:, place_P]),
            position_ids=place_BP,
            token_type_ids=torch.full_like(place_BP, IMAGE),
        )
        return Tokens(states_BPD, None)

    def sample_pairs(self, batch: Batch) -> MatchingPairs:
        """Sample pairs; samples with equal labels are not each other's negatives, samples
        without labels may be.
        """
        if not batch.labels_BL.shape[1]:
            return sample_pairs(batch)
        missing = -2.0  # not a label value; NaN does not equal NaN
        group_B = batch.labels_BL.nan_to_num(missing).unique(dim=0, return_inverse=True)[1]
        own_B = -1 - torch.arange(len(group_B), device=group_B.device)
        return sample_pairs(batch, torch.where(batch.labels_BL.isnan().all(dim=1), own_B, group_B))

    def encode(self, batch: Batch, corruption: Corruption) -> Encoded:
        """Fuse every masked text with the image sampled for it in one pass."""
        return self.encode_together(batch, corruption)

    def text_tokens(
        self, ids_BT: Tensor, mask_BT: Tensor, has_text_B: Tensor | None = None
    ) -> Tokens:
        """Embed CLS and SEP of the image block, then the text without its CLS."""
        return self.embed_texts(ids_BT, text_ends(ids_BT, mask_BT), mask_BT, has_text_B)

    def masked_text_tokens(self, batch: Batch, masked_ids_BT: Tensor) -> Tokens:
        """Leave the tokens around the image block unmasked."""
        return self.embed_texts(
            masked_ids_BT, text_ends(batch.ids_BT, batch.mask_BT), batch.mask_BT, batch.has_text_B
        )

    def embed_texts(
        self, ids_BT: Tensor, leading_B2: Tensor, mask_BT: Tensor, has_text_B: Tensor | None = None
    ) -> Tokens:
        """See `text_tokens`; `leading_B2` are the ids of CLS and SEP, which masking must not
        change.
        """
        all_B2 = torch.ones_like(leading_B2, dtype=torch.bool)
        position_B2 = torch.zeros_like(leading_B2)
        leading_B2D = self.text_encoder.embed(
            leading_B2,
            all_B2,
            position_ids=position_B2,
            token_type_ids=torch.full_like(leading_B2, IMAGE),
        )
        words_BT = ids_BT[:, 1:]
        real_BT = mask_BT[:, 1:]
        words_BTD = self.text_encoder.embed(
            words_BT, real_BT, token_type_ids=torch.full_like(words_BT, TEXT)
        )
        if has_text_B is not None:
            real_BT = real_BT & has_text_B[:, None]
        return Tokens(
            torch.cat([leading_B2D, words_BTD], dim=1), torch.cat([all_B2, real_BT], dim=1)
        )

    def sequence(self, text: Tokens, image: Tokens) -> tuple[Tokens, Tensor | None]:
        """Put the image block first."""
        block = image_block(text, image)
        words = Tokens(text.states_BND[:, _LEADING:], text.real_BN()[:, _LEADING:])
        share = self.config.seq2seq_share if self.training else 0.0
        return join(block, words), stream_mask(self.config.attention, words, block, share)

    def fused(self, encoded: Tokens, texts: int) -> Fused:
        block = encoded.states_BND.shape[1] - texts + _LEADING
        text = encoded.part(slice(block, None))
        image = encoded.part(slice(0, block))
        pooled_BD = self.pooler(image.states_BND)
        if self.config.attention == "non_cross":
            last_B = (text.real_BN().sum(dim=1) - 1).clamp(min=0)
            row_B = torch.arange(len(last_B), device=last_B.device)
            pooled_BD = pooled_BD * self.pooler(text.states_BND[row_B, last_B][:, None])
        return Fused(text, image, pooled_BD)

    def text_to_image(self, weights_BSS: Tensor, texts: int) -> Tensor:
        block = weights_BSS.shape[1] - texts + _LEADING
        return torch.cat([weights_BSS[:, :1], weights_BSS[:, block:]], dim=1)[:, :, 1 : block - 1]

    def word_states(self, fused: Fused, position_N: Tensor, width: int) -> Tensor:
        """Return the states of words: `Fused.text` is without CLS."""
        row_N = position_N // width
        column_N = position_N % width
        return fused.text.states_BND[row_N, column_N - 1]

    @torch.no_grad()
    def generate(
        self, image: Tensor, has_image_B: Tensor | None = None, *, decoding: Decoding = _GREEDY
    ) -> Generated:
        """Write a report for every image, word by word after the image block, under the
        sequence-to-sequence mask.

        As in UniLM (Dong et al., arXiv 1905.03197, section 2.6), a mask token follows the words
        written so far, and the word predicted there replaces it. The image block is encoded once
        and the keys and values of words are cached, so that a step computes two tokens.

        Args:
            image: (B, C, H, W) pixels.
            has_image_B: bool, False where the pixels are a placeholder.
            decoding: greedy by default.

        Raises:
            ConfigError: the model was trained with an attention mask under which it cannot write,
                is in training mode, has no tokenizer with a mask token, or has too few positions
                for texts of that length.
        """
        tokenizer, longest = self._check_decoding(decoding)
        closing_B2 = torch.tensor(
            [[tokenizer.cls_id, tokenizer.sep_id]], device=self.device
        ).expand(len(image), -1)
        no_text_B1 = torch.ones_like(closing_B2[:, :1], dtype=torch.bool)
        ends = self.embed_texts(closing_B2[:, :1], closing_B2, no_text_B1)
        block = image_block(ends, self.image_tokens(image, has_image_B))
        mask_id = self.masking.mask_id
        special = (tokenizer.pad_id, tokenizer.cls_id, tokenizer.unk_id, mask_id)
        return search(
            MaskWriter(self, block, mask_id),
            decoding,
            max_tokens=longest,
            end_id=tokenizer.sep_id,
            pad_id=tokenizer.pad_id,
            never=[token for token in special if token is not None],
        )

    def write_reports(self, batch: Batch, *, decoding: Decoding = _GREEDY) -> Generated:
        """Write a report for every image of a batch, as `generate`; its texts are not read."""
        return self.generate(batch.image_BCHW, batch.has_image_B, decoding=decoding)

    def _check_decoding(self, decoding: Decoding) -> tuple[Tokenizer, int]:
        """Return the tokenizer and the maximum number of tokens. Raises ConfigError as
        `generate` does.
        """
        if self.config.attention not in CAUSAL_ATTENTIONS:
            message = (
                f"writing needs attention {' or '.join(CAUSAL_ATTENTIONS)}, got "
                f"{self.config.attention!r}"
            )
            raise ConfigError(message, "unsupported", field="attention")
        if self.training:
            raise ConfigError("generate needs eval mode; call eval() first", "conflict")
        longest = self.config.max_tokens - 1 if decoding.max_tokens is None else decoding.max_tokens
        if longest > self.text_encoder.max_tokens:
            message = (
                f"max_tokens must be at most {self.text_encoder.max_tokens} (positions), "
                f"got {longest}"
            )
            raise ConfigError(message, "out_of_range", field="max_tokens")
        return self.require_tokenizer("writing"), longest


class MaskWriter:
    """A `NextToken` that predicts the word at a mask token after the written ones; caches all
    but that token.
    """

    def __init__(self, model: MedViLL, block: Tokens, mask_id: int) -> None:
        from transformers import DynamicCache

        self._model = model
        self._block = block
        self._mask_id = mask_id
        self._cache = DynamicCache()
        self._image_mask_RI = block.real_BN()
        self._written = 0

    def first(self) -> Tensor:
        """See `NextToken`."""
        real_BI = self._image_mask_RI
        self._model.text_encoder.encode_next(
            self._block.states_BND, real_BI[:, None].expand(-1, real_BI.shape[1], -1), self._cache
        )
        return self._step(real_BI.new_empty(len(real_BI), 0, dtype=torch.int64))

    def next(self, ids_R: Tensor, parent_R: Tensor) -> Tensor:
        """See `NextToken`."""
        self._cache.batch_select_indices(parent_R)
        self._image_mask_RI = self._image_mask_RI[parent_R]
        return self._step(ids_R[:, None])

    def _step(self, new_RT: Tensor) -> Tensor:
        """(R, V): logits after the written words and one new word, or none."""
        rows, new = new_RT.shape
        ids_RT = torch.cat([new_RT, new_RT.new_full((rows, 1), self._mask_id)], dim=1)
        place_T = torch.arange(self._written, self._written + new + 1, device=ids_RT.device)
        text_encoder = self._model.text_encoder
        hidden_RTD = text_encoder.embed(
            ids_RT,
            torch.ones_like(ids_RT, dtype=torch.bool),
            position_ids=place_T.expand(rows, -1),
            token_type_ids=torch.full_like(ids_RT, TEXT),
        )
        earlier_TW = torch.arange(self._written + new + 1, device=ids_RT.device) <= place_T[:, None]
        mask_RTK = torch.cat(
            [self._image_mask_RI[:, None].expand(-1, new + 1, -1), earlier_TW.expand(rows, -1, -1)],
            dim=2,
        )
        states_RTD = text_encoder.encode_next(hidden_RTD, mask_RTK, self._cache)
        self._cache.crop(-1)  # the mask token is not part of the text
        self._written += new
        return self._model.score_words(states_RTD[:, -1])


def text_ends(ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """(B, 2): the first and the last token id of every text."""
    last_B1 = (mask_BT.sum(dim=1, keepdim=True) - 1).clamp(min=0)
    return torch.cat([ids_BT[:, :1], ids_BT.gather(1, last_B1)], dim=1)


def image_block(text: Tokens, image: Tokens) -> Tokens:
    """Put the image tokens between the two leading tokens of `MedViLL.text_tokens`."""
    leading_B2D = text.states_BND[:, :_LEADING]
    real_B2 = text.real_BN()[:, :_LEADING]
    return Tokens(
        torch.cat([leading_B2D[:, :1], image.states_BND, leading_B2D[:, 1:]], dim=1),
        torch.cat([real_B2[:, :1], image.real_BN(), real_B2[:, 1:]], dim=1),
    )
