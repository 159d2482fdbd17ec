"""Text encoder with one interface for all backbones: one vector per text and one per token.

    encoder = create_text_encoder("bioclinicalbert")
    features = encoder(ids_BT, mask_BT)  # TextFeatures: pooled_BD, tokens_BTD, mask_BT

Padding does not change any value: neither real tokens nor the pooled vector depend on ids behind
the mask. Shape letters are those of `medvl.schema`; Q is the number of query positions.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from medvl.common.config_io import check_choice, check_within
from medvl.encoders.base import Encoder
from medvl.encoders.text.adapters import TextBackbone
from medvl.errors import ConfigError
from medvl.schema import TextFeatures

if TYPE_CHECKING:
    from medvl.encoders.text.packing import Packing

Pool = Literal["cls", "mean", "max", "eos"]
Reduce = Literal["mean", "sum"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TextOptions:
    """Validated arguments of `create_text_encoder`, which documents them."""

    name: str
    vocab_size: int | None
    pad_id: int | None
    layers: Sequence[int]
    reduce: Reduce
    pool: Pool
    projection: bool
    arguments: Mapping[str, Any]
    """Fields of the backbone's configuration."""

    def __post_init__(self) -> None:
        if not self.layers:
            raise ConfigError(
                "layers is empty; use (-1,) for the last layer", "out_of_range", field="layers"
            )
        check_choice(self.reduce, get_args(Reduce), "reduce")
        check_choice(self.pool, get_args(Pool), "pool")
        check_within(self, "[1, inf)", "vocab_size")


class TextEncoder(Encoder):
    """A language backbone with the interface of medvl; create it with `create_text_encoder`.

    `backbone` is the library's module, with the library's parameter names; `projection` is the
    published model's head, or None.

    Attributes:
        name: as given to `create_text_encoder`.
        feature_dim, token_dim: widths of `pooled_BD` and `tokens_BTD`.
        vocab_size, pad_id, max_tokens: number of token ids, id of padding, and maximum length of a
            text.
        num_layers: number of the backbone's layers.
        config: arguments that create the same encoder with random weights, JSON values only.
    """

    def __init__(self, language: TextBackbone, options: TextOptions) -> None:
        super().__init__(options.name, language.net, language.adapter)
        self.projection = language.projection
        self._adapter = language.adapter
        self.vocab_size = language.vocab_size
        self.pad_id = language.pad_id
        self.max_tokens = language.max_tokens
        self.num_layers = language.num_layers
        self.token_dim = language.width
        self.feature_dim = (
            language.width if language.projection is None else language.projected_width
        )
        self.layers = tuple(options.layers)
        self.reduce = options.reduce
        self.pool = options.pool
        states = self.num_layers + 1
        if not all(-states <= layer < states for layer in self.layers):
            accepted = f"0 (embeddings) to {self.num_layers}, or -1 to -{states} from the end"
            message = f"expected layers of {self.name} from {accepted}; got {self.layers}"
            raise ConfigError(message, "out_of_range", field="layers")
        self.config = dataclasses.asdict(options) | dict(options.arguments)
        del self.config["arguments"]
        self._packing: type[Packing] | None = None

    def pack(self, enabled: bool = True) -> None:
        """Let `forward` encode the real tokens of a batch in one row, so that padding costs
        nothing.

        Values and gradients change only by rounding and by the random numbers of dropout. See
        `medvl.encoders.text.packing` for its cost and for the GPU kernel of its attention.

        Raises:
            ConfigError: "unsupported" unless the backbone is a BERT, RoBERTa or ALBERT.
        """
        self._packing = None
        if enabled:
            self._packing = self._adapter.prepare_packing(self.backbone)

    def packing_of(self, mask_BT: Tensor | None) -> "Packing | None":
        """Return the packing of texts, for layers above this encoder; None where it does not
        pack.
        """
        return (
            None if self._packing is None or mask_BT is None else self._packing.from_mask(mask_BT)
        )

    def forward(
        self,
        ids_BT: Tensor,
        mask_BT: Tensor,
        *,
        types_BT: Tensor | None = None,
        output_attention: bool = False,
    ) -> TextFeatures:
        """Encode a batch of texts.

        Args:
            ids_BT: int64 token ids, padded on the right.
            mask_BT: bool (or 0 and 1), True on real tokens. A text without tokens gives zeros.
            types_BT: int64: 0 and 1 in the first and second text of a pair (`Tokenizer.pairs`);
                None: all 0.
            output_attention: compute `attention_BT`, the last layer's attention from the first
                token to all tokens, averaged over heads, without dropout, zero behind the mask;
                without gradient where weights are sharded.

        Returns:
            `tokens_BTD`, the combination of `layers`, zero behind the mask; `pooled_BD`; the mask
            as bool; and `attention_BT` if requested.

        Raises:
            ConfigError: "too_large" if a text is longer than `max_tokens`, "mismatch" if the shapes
                differ, "unsupported" for the attention or the types of a backbone that is not
                BERT-like.
        """
        types = {} if types_BT is None else {"token_type_ids": types_BT}
        hidden_BTD = self.embed(ids_BT, mask_BT, **types)
        return self.features(hidden_BTD, mask_BT, output_attention=output_attention)

    def features(
        self, hidden_BTD: Tensor, mask_BT: Tensor, *, output_attention: bool = False
    ) -> TextFeatures:
        """Encode a batch of embedded texts, the output of `embed` or `embed_vectors`; see
        `forward`.
        """
        mask_BT = mask_BT.bool()
        packing = self.packing_of(mask_BT)
        if packing is not None and len(packing.index_R):  # transformers rejects an empty row
            states = self._adapter.encode_packed(
                self.backbone, packing.pack(hidden_BTD)[None], packing
            )
            combined_BTD = packing.unpack(self._combine_layers(states)[0])
        else:
            packing = None
            states = self.encode(hidden_BTD, mask_BT)
            combined_BTD = self._combine_layers(states)
        attention_BT = None
        if output_attention:
            last_BTD = states[-2 if self.num_layers else -1]
            last_BTD = last_BTD if packing is None else packing.unpack(last_BTD[0])
            attention_BT = self._adapter.first_token_attention(self.backbone, last_BTD, mask_BT)
        tokens_BTD = combined_BTD[:, : mask_BT.shape[1]].masked_fill(~mask_BT[:, :, None], 0.0)
        if self.pool == "eos" and self._adapter.pools_last_position:
            pooled_BD = combined_BTD[:, -1]
        else:
            pooled_BD = self._pool_tokens(tokens_BTD, mask_BT)
        if self.projection is not None:
            pooled_BD = self.projection(pooled_BD)
        return TextFeatures(
            pooled_BD=pooled_BD, tokens_BTD=tokens_BTD, mask_BT=mask_BT, attention_BT=attention_BT
        )

    def embed(self, ids_BT: Tensor, mask_BT: Tensor, **positions: Tensor) -> Tensor:
        """Return the backbone's embeddings (B, T, D) of tokens, positions and types, the input of
        its first layer.

        Single-stream models concatenate image tokens to them and call `encode`.

        Args:
            ids_BT, mask_BT: as in `forward`.
            positions: `position_ids` and `token_type_ids` (B, T), for backbones that have them.

        Raises:
            ConfigError: "too_large" if a text is longer than `max_tokens`, "mismatch" if the shapes
                differ, "unsupported" if the backbone does not take `positions`.
        """
        if ids_BT.shape != mask_BT.shape or ids_BT.ndim != 2:
            got = f"{tuple(ids_BT.shape)} and {tuple(mask_BT.shape)}"
            raise ConfigError(f"expected ids and mask of one shape (B, T), got {got}", "mismatch")
        if ids_BT.shape[1] > self.max_tokens:
            limit = f"at most {self.max_tokens} tokens for {self.name}, got {ids_BT.shape[1]}"
            raise ConfigError(
                f"expected {limit}: set the tokenizer's max_tokens", "too_large", field="max_tokens"
            )
        clean_BT = ids_BT.masked_fill(~mask_BT.bool(), self.pad_id)
        return self._adapter.embed(self.backbone, clean_BT, **positions)

    def embed_vectors(self, vectors_BTD: Tensor, **positions: Tensor) -> Tensor:
        """Embed vectors in place of words: add position and type embeddings and normalise, as
        `embed` does.

        Args:
            vectors_BTD: tokens from elsewhere (cells of an image), as wide as the word embeddings.
            positions: `position_ids` and `token_type_ids` (B, T). Default: token i has position i
                and type 0.

        Raises:
            ConfigError: "unsupported" if the backbone embeds words only.
        """
        return self._adapter.embed_vectors(self.backbone, vectors_BTD, **positions)

    def encode(self, hidden_BTD: Tensor, mask: Tensor) -> Sequence[Tensor]:
        """Return all states (B, T, D), the input first and the last layer's output last.

        Args:
            hidden_BTD: output of `embed`, optionally concatenated with other tokens.
            mask: bool, True where a position may be attended to: (B, T) for all queries, or (B, Q,
                T) with Q = T (causal, sequence-to-sequence, and the other masks of fusion models).
                A query without any allowed position attends to all of them; exclude it from
                pooling.
        """
        if hidden_BTD.shape[0] == 0:  # transformers cannot split the heads of no rows
            # gradients exist, and are 0
            row_1TD = hidden_BTD.new_zeros(1, *hidden_BTD.shape[1:]) + hidden_BTD.sum()
            return [state[:0] for state in self.encode(row_1TD, mask.new_ones(1, *mask.shape[1:]))]
        mask = mask.bool()
        attend_BQT = mask[:, None, :] if mask.ndim == 2 else mask
        attend_BQT = attend_BQT | ~attend_BQT.any(dim=-1, keepdim=True)
        return self._adapter.encode(self.backbone, hidden_BTD, attend_BQT)

    def encode_next(self, hidden_BTD: Tensor, mask_BTK: Tensor, cache: Any) -> Tensor:
        """Return the last states (B, T, D) of new tokens, given a cache with the keys and values of
        earlier tokens.

        Args:
            hidden_BTD: output of `embed` for the new tokens only.
            mask_BTK: bool, True where a new token may attend: the tokens of the cache, then the new
                ones. No row may be all False.
            cache: a `transformers.DynamicCache`, empty at first; the new tokens are added to it.

        Raises:
            ConfigError: "unsupported" if the backbone has no such cache.
        """
        return self._adapter.encode_next(self.backbone, hidden_BTD, mask_BTK, cache)

    def _combine_layers(self, states: Sequence[Tensor]) -> Tensor:
        """Return the mean or sum of the states of `layers`."""
        states_LBTD = torch.stack([states[layer] for layer in self.layers])
        return states_LBTD.sum(dim=0) if self.reduce == "sum" else states_LBTD.mean(dim=0)

    def _pool_tokens(self, tokens_BTD: Tensor, mask_BT: Tensor) -> Tensor:
        """Pool the real tokens of each text; zeros for a text without tokens."""
        if self.pool == "cls":
            return tokens_BTD[:, 0]
        count_B1 = mask_BT.sum(dim=1, keepdim=True)
        if self.pool == "mean":
            return tokens_BTD.sum(dim=1) / count_B1.clamp(min=1)
        if self.pool == "eos":
            position_BT = torch.arange(mask_BT.shape[1], device=mask_BT.device).expand_as(mask_BT)
            last_B = torch.where(mask_BT, position_BT, 0).amax(dim=1)
            return tokens_BTD[torch.arange(last_B.shape[0], device=last_B.device), last_B]
        lowest = torch.finfo(tokens_BTD.dtype).min
        highest_BD = tokens_BTD.masked_fill(~mask_BT[:, :, None], lowest).amax(dim=1)
        return highest_BD.masked_fill(count_B1 == 0, 0.0)
