"""Base of systems that predict a list of entities with a query decoder over an image's grid
(MedKLIP, KAD, MAVL).
"""

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medvl.common.config_io import check_within
from medvl.data.reports.statements import describe, statement
from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.encoders import ImageEncoder, TextEncoder, freeze_batch_norm_statistics, freeze_layers
from medvl.errors import CheckpointError, ConfigError
from medvl.losses.common import full_precision, mean_over_ranks
from medvl.models.base import list_of_texts
from medvl.models.dual_encoders.bases.base import DualEncoder, DualEncoderConfig, projection_head
from medvl.models.dual_encoders.parts.layers import mask_of
from medvl.models.heatmaps import maps_of_cells
from medvl.schema import FINDINGS, Batch, Embeddings, Inputs, Losses

# Books of queries: vectors of fixed sentences, encoded once by a frozen text encoder and saved
# with the model.


class QueryBook(nn.Module):
    """Vectors of sentences, (Q, D), and the hash of these sentences: buffers that move and are
    saved with the model.

    Released systems keep such vectors as plain tensors, so that another text encoder silently gives
    other queries.

    Args:
        sentences: in the order of the rows.
        dim: D.
    """

    written_once: ClassVar[bool] = True
    """Buffers do not depend on a training step: one that is skipped leaves them (`BufferGuard`)."""

    def __init__(self, sentences: Sequence[str], dim: int) -> None:
        super().__init__()
        self.sentences = tuple(sentences)
        self._digest = hashlib.sha256("\n".join(self.sentences).encode()).digest()
        self.register_buffer("vectors_QD", torch.zeros(len(self.sentences), dim))
        self.register_buffer("sha256", torch.zeros(len(self._digest), dtype=torch.uint8))
        self.vectors_QD: Tensor
        self.sha256: Tensor
        self._is_checked = False
        self.register_load_state_dict_post_hook(_check_again)

    def fill(self, encode: Callable[[Sequence[str]], Tensor]) -> None:
        """Encode the sentences unless the book has them already.

        Raises CheckpointError where the loaded vectors belong to other sentences.
        """
        if self._is_checked:
            return
        expected = torch.tensor(list(self._digest), dtype=torch.uint8)
        if not self.sha256.any():
            with torch.no_grad():
                self.vectors_QD.copy_(encode(self.sentences))
            self.sha256.copy_(expected)
        elif not torch.equal(self.sha256.cpu(), expected):
            message = (
                "the saved queries are those of other sentences: load the checkpoint with "
                "its own settings"
            )
            raise CheckpointError(message, "mismatch", field="entities")
        self._is_checked = True


def _check_again(book: Any, incompatible_keys: Any) -> None:
    """Let `fill` look at the vectors that were loaded: a checkpoint from before the first batch
    has none.
    """
    book._is_checked = False


# Transformer decoder whose queries read a memory with padding: statements over patches, images
# over words, entities.
#
#     decoder = QueryDecoder(768, config, self_attention=False)          # CARZero: queries do not
#     attend to each other
#     states_BQD = decoder(query_BQD, memory_BKD, mask_BK)
#     states_BQD, attention_BQK = decoder.with_attention(query_BQD, memory_BKD, mask_BK)
#
# Parameters have the names of torch's `TransformerDecoder`, which those of MedKLIP, KAD and MAVL
# share. Shape letters: Q queries, K positions of the memory; the others as in `medvl.schema`.


@dataclasses.dataclass(frozen=True, kw_only=True)
class QueryDecoderConfig:
    """Settings of a `QueryDecoder`, to inherit beside those of a system; published ones of all
    of its systems.
    """

    decoder_layers: int = 4
    decoder_heads: int = 4
    decoder_hidden: int = 1024
    dropout: float = 0.1
    """Rate of dropout in the decoder, of the states that it returns, and in CARZero's head."""
    init_std: float | None = 0.02
    """Standard deviation of the initial weights of the decoder and of heads around it; None: the
    rules of torch, which narrow decoders keep.
    """

    def check_decoder(self) -> None:
        """Raise ConfigError for a value out of range."""
        check_within(self, "[1, inf)", "decoder_layers", "decoder_heads", "decoder_hidden")
        check_within(self, "[0, 1)", "dropout")
        check_within(self, "(0, inf)", "init_std")

    def init_modules(self, *modules: nn.Module) -> None:
        """Draw weights of linear and attention layers from N(0, `init_std`), as the released code
        of MedKLIP, KAD, MAVL and CARZero does; biases keep their values.
        """
        if self.init_std is None:
            return
        for child in (child for module in modules for child in module.modules()):
            if isinstance(child, nn.Linear):
                nn.init.normal_(child.weight, std=self.init_std)
            elif isinstance(child, nn.MultiheadAttention):
                nn.init.normal_(child.in_proj_weight, std=self.init_std)


class QueryDecoder(nn.Module):
    """Pre-norm layers of attention among queries, attention to the memory, and a feed-forward
    network with ReLU.

    Args:
        dim: width of queries and memory.
        config: sizes.
        self_attention: whether queries attend to each other. The score of a query then depends on
            the others, unless `reads_QQ` hides them from it.
        shared_norm: apply the last norm to queries and memory as well (KAD, CARZero).
    """

    def __init__(
        self,
        dim: int,
        config: QueryDecoderConfig,
        *,
        self_attention: bool = True,
        shared_norm: bool = False,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            _Layer(dim, config, self_attention) for _ in range(config.decoder_layers)
        )
        self.norm = nn.LayerNorm(dim)
        self.dropout = nn.Dropout(config.dropout)
        self.shared_norm = shared_norm
        config.init_modules(self)

    def forward(
        self, query_BQD: Tensor, memory_BKD: Tensor, mask_BK: Tensor | None = None
    ) -> Tensor:
        """Return (B, Q, D). `mask_BK` is True on real positions; None: all are. A memory without
        any adds nothing.
        """
        return self._decode(query_BQD, memory_BKD, mask_BK, None, attention=False)[0]

    def with_attention(
        self,
        query_BQD: Tensor,
        memory_BKD: Tensor,
        mask_BK: Tensor | None = None,
        *,
        reads_QQ: Tensor | None = None,
        last_layer: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Return (B, Q, D), and (B, Q, K), the attention to the memory, averaged over heads and
        layers.

        With `last_layer`, the attention is that of the last layer, averaged over heads. `reads_QQ`
        (float): entry (i, j) is the number of equal queries that query j counts as when query i
        attends to it; 0 hides it. None: 1 for all.
        """
        states_BQD, weights = self._decode(query_BQD, memory_BKD, mask_BK, reads_QQ, attention=True)
        return states_BQD, weights[-1] if last_layer else torch.stack(weights).mean(dim=0)

    def _decode(
        self,
        query_BQD: Tensor,
        memory_BKD: Tensor,
        mask_BK: Tensor | None,
        reads_QQ: Tensor | None,
        *,
        attention: bool,
    ) -> tuple[Tensor, list[Tensor]]:
        mask_BK = mask_of(memory_BKD, mask_BK)
        memory_BKD = memory_BKD.masked_fill(~mask_BK[:, :, None], 0.0)
        if self.shared_norm:
            query_BQD = self.norm(query_BQD)
            memory_BKD = self.norm(memory_BKD)
        weights = []
        for layer in self.layers:
            query_BQD, weight_BQK = layer(query_BQD, memory_BKD, mask_BK, reads_QQ, attention)
            weights.append(weight_BQK)
        return self.dropout(self.norm(query_BQD)), weights


class _Layer(nn.TransformerDecoderLayer):
    """Layer of torch with optional self-attention, which returns the attention to the memory."""

    def __init__(self, dim: int, config: QueryDecoderConfig, self_attention: bool) -> None:
        sizes = config.decoder_heads, config.decoder_hidden, config.dropout
        super().__init__(dim, *sizes, batch_first=True, norm_first=True)
        if not self_attention:
            del self.self_attn, self.norm1, self.dropout1

    def forward(self, *inputs: Any) -> Any:
        """Return the states (B, Q, D) and, if wanted, the attention (B, Q, K)."""
        x_BQD, memory_BKD, mask_BK, reads_QQ, attention = inputs
        if hasattr(self, "self_attn"):
            normed_BQD = self.norm1(x_BQD)
            bias_QQ = None if reads_QQ is None else reads_QQ.log()
            of_queries = self.self_attn(
                normed_BQD, normed_BQD, normed_BQD, need_weights=False, attn_mask=bias_QQ
            )
            x_BQD = x_BQD + self.dropout1(of_queries[0])
        # without any, attend to the padding, whose result is not used
        some_B1 = mask_BK.any(dim=1, keepdim=True)
        hidden_BK = ~mask_BK & some_B1
        read_BQD, weight_BQK = self.multihead_attn(
            self.norm2(x_BQD),
            memory_BKD,
            memory_BKD,
            key_padding_mask=hidden_BK,
            need_weights=attention,
        )
        x_BQD = x_BQD + self.dropout2(read_BQD.masked_fill(~some_B1[:, :, None], 0.0))
        wide_BQD = self.dropout(torch.relu(self.linear1(self.norm3(x_BQD))))
        return x_BQD + self.dropout3(self.linear2(wide_BQD)), weight_BQK


_FINDINGS_OF = {
    "effusion": ("Pleural Effusion",),
    "infiltrate": ("Infiltration",),
    "opacity": ("Lung Opacity",),
    "tail_abnorm_obs": ("Fibrosis",),
    "thicken": ("Pleural Thickening",),
}
"""Entities of the published MedKLIP and MAVL -> findings of another name that their authors
score by them.
"""
_QUERIES = 256
"""Further queries of one pass of the decoder, whose memory grows with their square."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class QueryConfig(QueryDecoderConfig, DualEncoderConfig):
    """Settings of a system with queries of entities."""

    fit: Literal["crop", "pad", "squash"] = "squash"
    """As in the authors' tests."""
    entities: tuple[str, ...] = FINDINGS
    """Names of the entities: the label columns of the shards, in their order."""
    descriptions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Name -> sentence of its query; other entities use `medvl.data.reports.statements.describe`.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_decoder()


class QueryEncoder(DualEncoder):
    """Base of systems whose frozen text encoder turns each entity into a query; a decoder over the
    image's grid predicts which entities are present.

    A text that names an entity of the book (name, statement or description, or the statement of a
    finding that the authors score by it) selects that entity's query. Any other text is a further
    query beside the book, as in the papers. Queries attend to each other; a further query attends
    to the book and to itself, and the book does not attend to it. In the published code the book
    attends to it as well, so that the scores of all entities depend on it, and every text needs a
    pass of its own.

    Attributes:
        image_head: maps the cells of the grid to the decoder's width.
        text_head: maps the text encoder's vector to a query.
        book: vectors of the entities' descriptions.
        presence: maps the states of an entity's queries to logits of absent and present.
        aspects: A, number of queries of an entity: 1, and 8 in MAVL.
        shared_norm: whether the decoder's last norm is applied to queries and grid as well.
        last_layer_maps: whether heat maps are the attention of the decoder's last layer, instead of
            the mean over all.
    """

    compares_pairs = False
    zero_shot_prompts = "statements"
    attention_maps = maps_of_cells
    shared_norm: ClassVar[bool] = False
    last_layer_maps: ClassVar[bool] = False

    def __init__(
        self,
        config: Any,
        *args: Any,
        book: QueryBook,
        decoder: QueryDecoder,
        presence: nn.Module,
        **kwargs: Any,
    ) -> None:
        super().__init__(config, *args, **kwargs)
        self.book = book
        self.decoder = decoder
        self.presence = presence
        self.inputs = Inputs(labels=True)
        sentences = self.sentences_of(config)
        rows = list(enumerate(zip(config.entities, sentences, strict=True)))
        others = {
            statement(other): row for row, (name, _) in rows for other in _FINDINGS_OF.get(name, ())
        }
        self._row_of = others | {
            alias: row for row, (name, each) in rows for alias in (name, statement(name), each[0])
        }
        self.aspects = len(sentences[0])

    @classmethod
    def sentences_of(cls, config: Any) -> list[tuple[str, ...]]:
        """Return the sentences of each entity, one per query; all entities have the same number."""
        return [(config.descriptions.get(name, describe(name)),) for name in config.entities]

    @classmethod
    def build(cls, config: Any, *, pretrained: bool, tokenizer: Tokenizer | None) -> Self:
        model = super().build(config, pretrained=pretrained, tokenizer=tokenizer)
        freeze_layers(model.text_encoder, "all")
        return model

    @classmethod
    def encoder_arguments(cls, config: Any) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        return {}, {"pool": "cls"}

    @classmethod
    def make_heads(
        cls, config: Any, image_encoder: ImageEncoder, text_encoder: TextEncoder
    ) -> dict[str, Any]:
        width = config.projection_dim
        sentences = cls.sentences_of(config)
        heads: dict[str, Any] = {
            "decoder": QueryDecoder(width, config, shared_norm=cls.shared_norm),
            "image_head": projection_head(image_encoder.patch_dim, width),
            "text_head": nn.Linear(text_encoder.feature_dim, width),
            "book": QueryBook(
                [text for each in sentences for text in each], text_encoder.feature_dim
            ),
            "presence": nn.Linear(width * len(sentences[0]), 2),
        }
        config.init_modules(heads["presence"])
        return heads

    def unnormalized_image(self, image_BCHW: Tensor) -> Tensor:
        """Return the mean of the projected grid."""
        return self._project_grid(image_BCHW).mean(dim=1).float()

    def embed_images(self, image_BCHW: Tensor) -> Embeddings:
        """Return images as `similarity` takes them, with their projected grid."""
        grid_BPD = self._project_grid(image_BCHW)
        return Embeddings(F.normalize(grid_BPD.mean(dim=1).float(), dim=-1), grid_BPD)

    def _project_grid(self, image_BCHW: Tensor) -> Tensor:
        grid_BPD: Tensor = self.image_head(self.image_encoder(image_BCHW).patches_BPD)
        return grid_BPD

    def unnormalized_text(
        self, texts: Sequence[str] | Tensor, mask_BT: Tensor | None = None
    ) -> Tensor:
        """Return (B, A x D) float32: vectors of the frozen text encoder, before `text_head`, of an
        entity's A aspects.

        Strings that name an entity have the vectors of the book. The vector of other strings, and
        of token ids, is repeated for all aspects.
        """
        if isinstance(texts, Tensor):
            return self.sentence_vectors(texts, mask_BT).repeat(1, self.aspects)
        texts = list_of_texts(texts)
        row_B = torch.tensor([self._row_of.get(text, -1) for text in texts], device=self.device)
        vectors_BD = self._entity_vectors()[row_B]
        further = [text for text in texts if text not in self._row_of]
        if further:
            queries = [self.query_text(text) for text in further]
            vectors_BD[row_B < 0] = self.sentence_vectors(queries).repeat(1, self.aspects)
        return vectors_BD

    def query_text(self, text: str) -> str:
        """Return what the text encoder reads of a text that names no entity of the book: by
        default, all of it.
        """
        return text

    def sentence_vectors(
        self, texts: Sequence[str] | Tensor, mask_BT: Tensor | None = None
    ) -> Tensor:
        """Return (B, D) float32: the vector of each sentence by the frozen text encoder.

        Autocast does not apply to strings, so that the vectors of the book are the same in any run.
        """
        with contextlib.ExitStack() as stack:
            if not isinstance(texts, Tensor):
                stack.enter_context(full_precision(self.book.vectors_QD))
            features: Tensor = self.text_encoder(*self.tokenize(texts, mask_BT)).pooled_BD
        return features.float()

    def embed_ids(self, ids_BT: Tensor, mask_BT: Tensor) -> Embeddings:
        """Return texts as `similarity` takes them: vectors of any length."""
        return Embeddings(self.unnormalized_text(ids_BT, mask_BT))

    def embed_texts(self, texts: Sequence[str]) -> Embeddings:
        """Return texts as `similarity` takes them. Raises ConfigError without a tokenizer."""
        return Embeddings(self.unnormalized_text(texts))

    def ask(self, grid_BPD: Tensor, more_BMD: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the states of all entities (B, Q, A x D), aspect after aspect, and their attention
        (B, Q, P).

        The attention is the mean over heads, aspects and layers, or over those of the last layer
        (`last_layer_maps`).

        The entities are the book's, then those of `more_BMD` (B or 1, M, A x D), from
        `unnormalized_text`. Each of the latter attends to the book and itself. Its aspects are
        equal, so one query counts as A.
        """
        parts = [self.queries()[None]]
        reads_QQ = None
        book = parts[0].shape[1]
        if more_BMD is not None:
            parts.append(more_BMD.unflatten(2, (self.aspects, -1))[:, :, 0])
            itself_MM = torch.eye(more_BMD.shape[1], device=grid_BPD.device) * self.aspects
            reads_QQ = F.pad(F.pad(itself_MM, (0, 0, book, 0)), (book, 0), value=1.0)
        query_BQD = torch.cat(
            [self.text_head(part).expand(len(grid_BPD), -1, -1) for part in parts], dim=1
        )
        states_BQD, attention_BQP = self.decoder.with_attention(
            query_BQD, grid_BPD, reads_QQ=reads_QQ, last_layer=self.last_layer_maps
        )
        by_entity = (-1, self.aspects)
        of_book = states_BQD[:, :book].unflatten(1, by_entity).flatten(2)
        states_BQD = torch.cat([of_book, states_BQD[:, book:].repeat(1, 1, self.aspects)], dim=1)
        attention_of_book = attention_BQP[:, :book].unflatten(1, by_entity).mean(dim=2)
        return states_BQD, torch.cat([attention_of_book, attention_BQP[:, book:]], dim=1)

    def queries(self) -> Tensor:
        """Return (Q x A, D): the vectors of the book, before `text_head`."""
        self.book.fill(self.sentence_vectors)
        return self.book.vectors_QD

    def similarity(self, images: Embeddings | Tensor, texts: Embeddings | Sequence[str]) -> Tensor:
        """Return (N, M): the log-odds that the entity of each text is present; not a cosine."""
        image, text = self.embedded(images, texts)
        grid_NPD = self._grid_of(image)
        row_M = self._rows(text.global_NE)
        odds_NQ = self._odds(self.ask(grid_NPD)[0])
        further_MD = text.global_NE[row_M < 0]
        parts = further_MD.split(_QUERIES) if len(further_MD) else ()
        further = [
            self._odds(self.ask(grid_NPD, part_MD[None])[0])[:, -len(part_MD) :]
            for part_MD in parts
        ]
        place_M = odds_NQ.shape[1] + (row_M < 0).cumsum(dim=0) - 1
        return torch.cat([odds_NQ, *further], dim=1)[:, torch.where(row_M < 0, place_M, row_M)]

    def pair_similarity(self, images: Embeddings, texts: Embeddings) -> Tensor:
        """Compute all scores in one pass of the decoder."""
        odds_N, _ = self._ask_pairs(self._grid_of(images), texts.global_NE)
        return odds_N

    def cell_maps(self, image_BCHW: Tensor, texts: Sequence[str]) -> Tensor:
        """Return the attention of each text's queries (`ask`)."""
        return self.attend_texts(self._grid_of(self.embed_images(image_BCHW)), texts)

    def attend_texts(self, grid_NPD: Tensor, texts: Sequence[str]) -> Tensor:
        """Return (N, P): the attention of each text's queries (`ask`) over its own grid."""
        return self._ask_pairs(grid_NPD, self.embed_texts(texts).global_NE)[1]

    def _ask_pairs(self, grid_NPD: Tensor, vectors_ND: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-odds (N,) and the attention (N, P) of each image's own text."""
        states_BQD, attention_BQP = self.ask(grid_NPD, vectors_ND[:, None])
        # -1: the text itself, behind the book
        pair = (torch.arange(len(grid_NPD)), self._rows(vectors_ND))
        return self._odds(states_BQD)[pair], attention_BQP[pair]

    def forward(self, batch: Batch) -> Losses:
        """Return the losses of a batch. Samples without an image are left out; means are over all
        ranks.

        Their placeholders are not encoded, so that they do not enter batch norms. Where no sample
        has an image, all placeholders are encoded, because every rank must use all weights. Running
        statistics are not updated in this case, nor from a single image.
        """
        statistics: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if batch.has_image_B is not None:
            row_K = batch.has_image_B.nonzero().squeeze(1)
            batch = batch.rows(row_K.tolist()) if len(row_K) else batch
            statistics = freeze_batch_norm_statistics(self) if len(row_K) < 2 else statistics
        labels_BL = batch.labels_BL
        if labels_BL.shape[1] != len(self.config.entities):
            message = f"expected a label column for each of {len(self.config.entities)} entities"
            raise ConfigError(
                f"{message}, got {labels_BL.shape[1]}: set entities", "mismatch", field="entities"
            )
        if batch.has_image_B is not None:
            labels_BL = labels_BL.masked_fill(~batch.has_image_B[:, None], torch.nan)
        with statistics:
            images = self.embed_images(batch.image_BCHW)
        states_BQD, _ = self.ask(self._grid_of(images))
        terms = {"presence": (self.presence_loss(states_BQD, labels_BL), 1.0)}
        return Losses.weighted(**terms, **self.more_terms(batch, images, states_BQD, labels_BL))

    def more_terms(
        self, batch: Batch, images: Embeddings, states_BQD: Tensor, labels_BL: Tensor
    ) -> Mapping[str, tuple[Tensor, float]]:
        """Return further losses and their weights, of a system that has some."""
        return {}

    def presence_loss(self, states_BQD: Tensor, labels_BL: Tensor) -> Tensor:
        """Return the cross-entropy of absent and present over the labels 0 and 1; others have no
        gradient.
        """
        counted_BL = (labels_BL == 0) | (labels_BL == 1)
        logits_BL2 = self.presence(states_BQD).float()
        target_BL = torch.where(counted_BL, labels_BL, 0).long()
        entropy_BL = F.cross_entropy(
            logits_BL2.flatten(0, 1), target_BL.flatten(), reduction="none"
        )
        return mean_over_ranks(entropy_BL, counted_BL.flatten())

    def _odds(self, states_BQD: Tensor) -> Tensor:
        logits_BQ2 = self.presence(states_BQD).float()
        return logits_BQ2[..., 1] - logits_BQ2[..., 0]

    def _rows(self, vectors_MD: Tensor) -> Tensor:
        """Return (M,): the entity of the book that each vector was copied from by
        `unnormalized_text`, -1 for none.
        """
        row_M = vectors_MD.new_full((len(vectors_MD),), -1, dtype=torch.int64)
        for row, vector_D in enumerate(self._entity_vectors()):
            row_M[(vectors_MD == vector_D).all(dim=1)] = row
        return row_M

    def _entity_vectors(self) -> Tensor:
        """Return (Q, A x D) float32: the vectors of the book by entity."""
        return self.queries().float().unflatten(0, (-1, self.aspects)).flatten(1)

    @staticmethod
    def _grid_of(images: Embeddings) -> Tensor:
        assert images.local_NPE is not None, "embed_images keeps the grid"
        return images.local_NPE
