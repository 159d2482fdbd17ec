"""MedViLL: one BERT over an image's cells and its report (Moon et al., arXiv 2105.11333, JBHI 2022)."""

from typing import Any, Self

import torch
from torch import Tensor, nn

from medvl import losses
from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.data.transforms.image import EvalTransform
from medvl.encoders import ImageEncoder, TextEncoder, freeze_layers
from medvl.errors import ConfigError
from medvl.models.fusion_encoders.base import FusionModel
from medvl.models.fusion_encoders.config import WRITERS, MedViLLConfig
from medvl.models.fusion_encoders.corruption import Draw, draw_pairs, draw_text
from medvl.models.fusion_encoders.layers.encoder import AttentionMaps, Fused, Pooler, Tokens, stream_mask
from medvl.models.fusion_encoders.layers.heads import WordHead
from medvl.models.fusion_encoders.layers.inputs import create_encoders, of_present
from medvl.models.fusion_encoders.layers.transformer import attention_weights, init_weights
from medvl.models.registry import register_system
from medvl.models.text_decoding import Decoding, Generated, search
from medvl.schema import Batch, Losses

_IMAGE, _TEXT = 0, 1
"""BERT's token types."""
_LEADING = 2
"""Tokens of the image block that come of the text's ids: CLS, and the SEP that closes the block."""
_GREEDY = Decoding()

# P cells of the grid, T text tokens with CLS and SEP, S all tokens; the other letters as in `medvl.schema`.


@register_system("medvill")
class MedViLL(FusionModel):
    """The sequence `[CLS] cells [SEP] text [SEP]` through BERT, pretrained by masked words and image-text matching.

    The text encoder is the joint Transformer: cells are projected to its width and take its positions and its first
    token type; the text takes the second, and positions from zero again. `Fused.image` is the image block with CLS and
    SEP, `Fused.text` the text without CLS.

    Both losses come of one pass, words being guessed beside images that do not match as well. A sample that does not
    match gets an image of the batch whose text and labels are others; exactly half of the samples do, where the
    released code tosses a coin. In eval mode all cells are used and a mixed mask is bidirectional, so that nothing is
    left to chance.
    """

    Config = MedViLLConfig

    def __init__(
        self,
        config: MedViLLConfig,
        image_encoder: ImageEncoder,
        text_encoder: TextEncoder,
        *,
        transform: EvalTransform,
        tokenizer: Tokenizer | None,
    ) -> None:
        super().__init__(config, image_encoder, text_encoder, transform=transform, tokenizer=tokenizer)
        width = text_encoder.token_dim
        height, columns = image_encoder.grid(*image_encoder.image_size)
        if getattr(getattr(text_encoder.backbone, "config", None), "model_type", None) != "bert":
            raise ConfigError(f"medvill's joint Transformer is a BERT: {config.text_encoder} is not")
        if height * columns > text_encoder.max_tokens:
            raise ConfigError(
                f"an image of {config.image_size} pixels has {height * columns} cells, and {config.text_encoder} "
                f"positions for {text_encoder.max_tokens}: make it smaller"
            )
        self.image_input = nn.Linear(image_encoder.patch_dim, width)
        self.pooler = Pooler(width)
        self.mlm_head = WordHead(width, text_encoder.vocab_size, tied=True)
        self.itm_head = nn.Linear(width, 2)
        self.pooled_dim = width
        for module in (self.image_input, self.pooler, self.itm_head):
            init_weights(module)
        if config.objective == "report":  # nothing reads them
            self.pooler.requires_grad_(False)
            self.itm_head.requires_grad_(False)

    @classmethod
    def build(cls, config: MedViLLConfig, *, pretrained: bool, tokenizer: Tokenizer | None) -> Self:
        """Raises ConfigError and WeightsError as `create_model` says."""
        image_encoder, text_encoder = create_encoders(config, pretrained=pretrained)
        if not isinstance(image_encoder, ImageEncoder):
            raise ConfigError("medvill draws cells of an image's grid: precomputed regions have none")
        freeze_layers(image_encoder, config.frozen_image_layers)
        transform = EvalTransform(size=config.image_size, fit=config.fit)
        return cls(config, image_encoder, text_encoder, transform=transform, tokenizer=tokenizer)

    def image_tokens(self, image: Tensor, has_image_B: Tensor | None = None) -> Tokens:
        """The embedded cells; in training `image_tokens` of them, drawn without replacement, alike for all images."""

        def encode(index_K: Tensor | None) -> Tokens:
            cells_BPD = self.image_encoder(image if index_K is None else image[index_K]).patches_BPD
            place_P = torch.arange(cells_BPD.shape[1], device=cells_BPD.device)
            if self.training and self.config.image_tokens < len(place_P):
                drawn = torch.randperm(len(place_P), generator=torch.default_generator)[: self.config.image_tokens]
                place_P = drawn.sort().values.to(cells_BPD.device)
            place_BP = place_P.expand(len(cells_BPD), -1)
            states_BPD = self.text_encoder.embed_vectors(
                self.image_input(cells_BPD[:, place_P]),
                position_ids=place_BP,
                token_type_ids=torch.full_like(place_BP, _IMAGE),
            )
            return Tokens(states_BPD, None)

        tokens = of_present(has_image_B, self.pooled_dim, encode)
        if has_image_B is None:
            return tokens
        return Tokens(tokens.states_BND, tokens.real_BN() & has_image_B[:, None])  # CLS and SEP remain to look at

    def text_tokens(self, ids_BT: Tensor, mask_BT: Tensor, has_text_B: Tensor | None = None) -> Tokens:
        """The embedded CLS and SEP of the image block, then those of the text behind its CLS."""
        return self._text_tokens(ids_BT, _ends(ids_BT, mask_BT), mask_BT, has_text_B)

    def _text_tokens(
        self, ids_BT: Tensor, leading_B2: Tensor, mask_BT: Tensor, has_text_B: Tensor | None = None
    ) -> Tokens:
        all_B2 = torch.ones_like(leading_B2, dtype=torch.bool)
        nowhere_B2 = torch.zeros_like(leading_B2)  # each is a sequence of its own: position 0
        leading_B2D = self.text_encoder.embed(
            leading_B2, all_B2, position_ids=nowhere_B2, token_type_ids=torch.full_like(leading_B2, _IMAGE)
        )
        words_BT, real_BT = ids_BT[:, 1:], mask_BT[:, 1:]
        words_BTD = self.text_encoder.embed(words_BT, real_BT, token_type_ids=torch.full_like(words_BT, _TEXT))
        if has_text_B is not None:
            real_BT = real_BT & has_text_B[:, None]
        return Tokens(torch.cat([leading_B2D, words_BTD], dim=1), torch.cat([all_B2, real_BT], dim=1))

    def fuse(self, text: Tokens, image: Tokens) -> Fused:
        """Under the configuration's attention mask."""
        block, words, mask_BSS = self._sequence(text, image)
        states_BSD = self.text_encoder.encode(torch.cat([block.states_BND, words.states_BND], dim=1), mask_BSS)[-1]
        images = block.states_BND.shape[1]
        return Fused(
            Tokens(states_BSD[:, images:], words.mask_BN),
            Tokens(states_BSD[:, :images], block.mask_BN),
            self.pooler(states_BSD),
        )

    def looks(self, text: Tokens, image: Tokens) -> AttentionMaps:
        """See the base class; the pooled token is CLS, which the text begins with."""
        block, words, mask_BSS = self._sequence(text, image)
        below_BSD = self.text_encoder.encode(torch.cat([block.states_BND, words.states_BND], dim=1), mask_BSS)[-2]
        backbone: Any = self.text_encoder.backbone
        last = backbone.encoder.layer[-1].attention.self
        weights_BSS = attention_weights(
            last.query(below_BSD), last.key(below_BSD), last.num_attention_heads, mask_BSS
        ).mean(dim=1)
        images = block.states_BND.shape[1]
        of_text_BTP = torch.cat([weights_BSS[:, :1], weights_BSS[:, images:]], dim=1)[:, :, 1 : images - 1]
        return AttentionMaps(of_text_BTP[:, 0], of_text_BTP).cells(image, leading=0)

    def _sequence(self, text: Tokens, image: Tokens) -> tuple[Tokens, Tokens, Tensor]:
        """The image block, the words behind it, and who of both may attend to whom (B, S, S)."""
        block = image_block(text, image)
        words = Tokens(text.states_BND[:, _LEADING:], text.real_BN()[:, _LEADING:])
        share = self.config.seq2seq_share if self.training else 0.0
        mask_BSS = stream_mask(self.config.attention, words, block, share)
        assert mask_BSS is not None, "a text has its padding"
        return block, words, mask_BSS

    def draw(self, batch: Batch) -> Draw:
        """What a step leaves to chance beside the cells. Samples with equal labels are no negatives of each other."""
        masked, masked_N = draw_text(batch, self.masking)
        groups = []
        if batch.labels_BL.shape[1]:
            unmentioned = -2.0  # no label has this value, and one NaN is not equal to another
            groups = [batch.labels_BL.nan_to_num(unmentioned).unique(dim=0, return_inverse=True)[1]]
        return Draw(masked=masked, masked_N=masked_N, pairs=draw_pairs(batch, *groups))

    def learn(self, batch: Batch) -> Losses:
        """Masked words and image-text matching, from one pass; masked words alone where the objective is a report."""
        if self.config.objective == "report":
            return self._report_losses(batch)
        draw = self.draw(batch)
        row_B = torch.arange(len(batch), device=batch.ids_BT.device)
        image_B = row_B.index_copy(0, draw.pairs.text_N, draw.pairs.image_N)
        image = self.image_tokens(batch.image_BCHW, batch.has_image_B)
        text = self.text_tokens(draw.masked.ids_BT, batch.mask_BT, batch.has_text_B)
        fused = self.fuse(text, image.rows(image_B))
        mlm = losses.mlm(self.words(fused, draw.masked_N, batch.ids_BT.shape[1]), draw.hidden_N)
        itm = losses.itm(self.itm_head(fused.pooled_BD[draw.pairs.text_N]), draw.pairs.matched_N)
        total = self.config.mlm_weight * mlm + self.config.itm_weight * itm
        return Losses(total=total, terms={"mlm": mlm, "itm": itm})

    def _report_losses(self, batch: Batch) -> Losses:
        masked, masked_N = draw_text(batch, self.masking)
        leading_B2 = _ends(batch.ids_BT, batch.mask_BT)  # the image block closes, whatever is hidden in the text
        text = self._text_tokens(masked.ids_BT, leading_B2, batch.mask_BT, batch.has_text_B)
        fused = self.fuse(text, self.image_tokens(batch.image_BCHW, batch.has_image_B))
        scores_NV = self.words(fused, masked_N, batch.ids_BT.shape[1])
        mlm = losses.mlm(scores_NV, masked.labels_BT.flatten()[masked_N])
        return Losses(total=self.config.mlm_weight * mlm, terms={"mlm": mlm})

    @property
    def masks_ends(self) -> bool:
        """See the base class."""
        return bool(self.config.objective == "report")

    @torch.no_grad()
    def generate(self, image: Tensor, has_image_B: Tensor | None = None, *, decoding: Decoding = _GREEDY) -> Generated:
        """Write a report for every image, word by word behind the image block, under the sequence-to-sequence mask.

        As in UniLM (Dong et al., arXiv 1905.03197, section 2.6): a mask token stands behind what has been written, and
        the word that the model sees in it takes its place. The image block is encoded once; keys and values of the
        words are kept, so that a step computes two tokens.

        Args:
            image: (B, C, H, W) pixels.
            has_image_B: bool, False where the pixels are a placeholder.
            decoding: greedy by default.

        Raises:
            ConfigError: the model was trained with an attention mask under which it cannot write, is in training mode,
                has no tokenizer with a mask token, or cannot write texts of that length.
        """
        tokenizer, longest = self._check_writer(decoding)
        block = image_block(self._image_ends(tokenizer, len(image)), self.image_tokens(image, has_image_B))
        mask_id = self.masking.mask_id
        special = (tokenizer.pad_id, tokenizer.cls_id, tokenizer.unk_id, mask_id)
        return search(
            MaskWriter(self, block, mask_id),
            decoding,
            max_tokens=longest,
            end_id=tokenizer.sep_id,
            pad_id=tokenizer.pad_id,
            never=[mark for mark in special if mark is not None],
        )

    def _check_writer(self, decoding: Decoding) -> tuple[Tokenizer, int]:
        """The tokenizer, and how many tokens a text may have."""
        attention = self.config.attention
        if attention not in WRITERS:
            raise ConfigError(
                f"this medvill was trained with attention {attention!r}, under which "
                + ("a word sees those behind it" if attention == "bidirectional" else "words see no image")
                + f", so it cannot write: train it with {' or '.join(WRITERS)}"
            )
        if self.training:
            raise ConfigError("a model writes in eval mode, where nothing is left to chance: call eval() first")
        longest = self.config.max_tokens - 1 if decoding.max_tokens is None else decoding.max_tokens
        if longest > self.text_encoder.max_tokens:
            raise ConfigError(
                f"{longest} tokens: {self.config.text_encoder} has {self.text_encoder.max_tokens} positions"
            )
        if self.tokenizer is None:
            raise ConfigError("medvill needs a tokenizer to write: create_model(..., tokenizer=FOLDER)")
        return self.tokenizer, longest

    def _image_ends(self, tokenizer: Tokenizer, batch: int) -> Tokens:
        """CLS and SEP, without a text behind them."""
        marks_B2 = torch.tensor([[tokenizer.cls_id, tokenizer.sep_id]], device=self.device).expand(batch, -1)
        return self._text_tokens(marks_B2[:, :1], marks_B2, torch.ones_like(marks_B2[:, :1], dtype=torch.bool))

    def words(self, fused: Fused, position_N: Tensor, width: int) -> Tensor:
        """(N, V): scores of the vocabulary at positions of the flattened (B * `width`) token ids, none of them CLS."""
        row_N, column_N = position_N // width, position_N % width
        return self.score_words(fused.text.states_BND[row_N, column_N - 1])

    def score_words(self, states_ND: Tensor) -> Tensor:
        """(N, V): scores of the vocabulary in states of the text."""
        backbone: Any = self.text_encoder.backbone
        scores_NV: Tensor = self.mlm_head(states_ND, backbone.get_input_embeddings().weight)
        return scores_NV


class MaskWriter:
    """Scores the word in a mask token behind what is written; keeps keys and values of all but that token."""

    def __init__(self, model: MedViLL, block: Tokens, mask_id: int) -> None:
        from transformers import DynamicCache

        self._model, self._block, self._mask_id = model, block, mask_id
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
        """(R, V): behind the words that are written and one new one, or none."""
        rows, new = new_RT.shape
        ids_RT = torch.cat([new_RT, new_RT.new_full((rows, 1), self._mask_id)], dim=1)
        place_T = torch.arange(self._written, self._written + new + 1, device=ids_RT.device)
        text_encoder = self._model.text_encoder
        hidden_RTD = text_encoder.embed(
            ids_RT,
            torch.ones_like(ids_RT, dtype=torch.bool),
            position_ids=place_T.expand(rows, -1),
            token_type_ids=torch.full_like(ids_RT, _TEXT),
        )
        earlier_TW = torch.arange(self._written + new + 1, device=ids_RT.device) <= place_T[:, None]
        mask_RTK = torch.cat(
            [self._image_mask_RI[:, None].expand(-1, new + 1, -1), earlier_TW.expand(rows, -1, -1)], dim=2
        )
        states_RTD = text_encoder.encode_next(hidden_RTD, mask_RTK, self._cache)
        self._cache.crop(-1)  # the mask token is not part of the text
        self._written += new
        return self._model.score_words(states_RTD[:, -1])


def _ends(ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """(B, 2): the first and the last token of every text."""
    last_B1 = (mask_BT.sum(dim=1, keepdim=True) - 1).clamp(min=0)
    return torch.cat([ids_BT[:, :1], ids_BT.gather(1, last_B1)], dim=1)


def image_block(text: Tokens, image: Tokens) -> Tokens:
    """The image's tokens between the two that `text` begins with."""
    leading_B2D, leads_B2 = text.states_BND[:, :_LEADING], text.real_BN()[:, :_LEADING]
    return Tokens(
        torch.cat([leading_B2D[:, :1], image.states_BND, leading_B2D[:, 1:]], dim=1),
        torch.cat([leads_B2[:, :1], image.real_BN(), leads_B2[:, 1:]], dim=1),
    )
