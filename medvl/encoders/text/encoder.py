"""Text encoders: token ids to one vector a text and one vector a token, for every kind of backbone alike.

    encoder = create_text_encoder("bioclinicalbert")
    features = encoder(ids_BT, mask_BT)  # TextFeatures: pooled_BD, tokens_BTD, mask_BT

Padding never changes a value: whatever stands behind the mask, real tokens and the pooled vector come out the same.
Shape letters are those of `medvl.schema`; Q counts query positions.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from medvl.encoders.base import Encoder
from medvl.encoders.text.adapters import Language
from medvl.encoders.text.packing import Packing
from medvl.errors import ConfigError
from medvl.schema import TextFeatures

Pool = Literal["cls", "mean", "max", "eos"]
Reduce = Literal["mean", "sum"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TextOptions:
    """The arguments of `create_text_encoder` that decide the encoder, checked; their meaning stands there."""

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
            raise ConfigError("layers is empty: (-1,) is the last layer")
        if self.reduce not in ("mean", "sum"):
            raise ConfigError(f"reduce is {self.reduce!r}: known are 'mean' and 'sum'")
        if self.pool not in ("cls", "mean", "max", "eos"):
            raise ConfigError(f"pool is {self.pool!r}: known are 'cls', 'mean', 'max' and 'eos'")
        if self.vocab_size is not None and self.vocab_size < 1:
            raise ConfigError(f"vocab_size is {self.vocab_size}")


class TextEncoder(Encoder):
    """A language backbone behind one contract; make it with `create_text_encoder`.

    The library's module is `backbone`, its parameters under the library's own names; `projection` is the published
    model's head where it was asked for.

    Attributes:
        name: as given to `create_text_encoder`.
        feature_dim, token_dim: widths of `pooled_BD` and `tokens_BTD`.
        vocab_size, pad_id, max_tokens: what token ids may be, and how many of them a text may have.
        num_layers: of the backbone.
        config: arguments that make the same encoder again at random weights, JSON values only.
    """

    def __init__(self, language: Language, options: TextOptions) -> None:
        super().__init__(options.name, language.net, language.adapter)
        self.projection = language.projection
        self._adapter = language.adapter
        self.vocab_size, self.pad_id = language.vocab_size, language.pad_id
        self.max_tokens, self.num_layers = language.max_tokens, language.num_layers
        self.token_dim = language.width
        self.feature_dim = language.width if language.projection is None else language.projected_width
        self.layers, self.reduce, self.pool = tuple(options.layers), options.reduce, options.pool
        states = self.num_layers + 1
        if not all(-states <= layer < states for layer in self.layers):
            raise ConfigError(
                f"layers {self.layers}: {self.name} has states 0 (embeddings) to {self.num_layers}, "
                f"or -1 to -{states} from the end"
            )
        self.config = dataclasses.asdict(options) | dict(options.arguments)
        del self.config["arguments"]
        self._packs = False

    def pack(self, packs: bool = True) -> None:
        """Whether `forward` puts the real tokens of a batch in one row from now on, and spends nothing on padding.

        Values and gradients stay what they are, but for rounding and for what dropout draws. See
        `medvl.encoders.text.packing` for what it costs and when a GPU has a kernel for its attention.

        Raises:
            ConfigError: the backbone is no BERT, RoBERTa or ALBERT.
        """
        if packs:
            self._adapter.prepare_packing(self.backbone)
        self._packs = packs

    def forward(self, ids_BT: Tensor, mask_BT: Tensor) -> TextFeatures:
        """Encode a batch of texts.

        Args:
            ids_BT: int64 token ids, padded on the right.
            mask_BT: bool (or 0 and 1), True on real tokens. A text without any gives zeros.

        Returns:
            `tokens_BTD`, the chosen layers combined, zero behind the mask; `pooled_BD`; and the mask as bool.

        Raises:
            ConfigError: a text is longer than the positions that the backbone knows.
        """
        mask_BT = mask_BT.bool()
        hidden_BTD = self.embed(ids_BT, mask_BT)
        packing = Packing.of(mask_BT) if self._packs else None
        if packing is not None and len(packing):  # transformers takes no row without tokens
            states = self._adapter.encode_packed(self.backbone, packing.pack(hidden_BTD)[None], packing)
            combined_BTD = packing.unpack(self._combined(states)[0])
        else:
            combined_BTD = self._combined(self.encode(hidden_BTD, mask_BT))
        tokens_BTD = combined_BTD[:, : mask_BT.shape[1]].masked_fill(~mask_BT[:, :, None], 0.0)
        if self.pool == "eos" and self._adapter.ends_full:
            pooled_BD = combined_BTD[:, -1]
        else:
            pooled_BD = self._pooled(tokens_BTD, mask_BT)
        if self.projection is not None:
            pooled_BD = self.projection(pooled_BD)
        return TextFeatures(pooled_BD=pooled_BD, tokens_BTD=tokens_BTD, mask_BT=mask_BT)

    def embed(self, ids_BT: Tensor, mask_BT: Tensor, **positions: Tensor) -> Tensor:
        """The backbone's own embeddings (B, T, D) of tokens, positions and types: what its first layer takes.

        Single-stream models put image tokens beside these and call `encode`.

        Args:
            ids_BT, mask_BT: as in `forward`.
            positions: `position_ids` and `token_type_ids` (B, T), for backbones that have them.

        Raises:
            ConfigError: the text is too long, or the backbone shows no embeddings of its own.
        """
        if ids_BT.shape != mask_BT.shape or ids_BT.ndim != 2:
            raise ConfigError(f"ids and mask must both be (B, T), not {tuple(ids_BT.shape)} and {tuple(mask_BT.shape)}")
        if ids_BT.shape[1] > self.max_tokens:
            raise ConfigError(
                f"a text of {ids_BT.shape[1]} tokens: {self.name} has positions for {self.max_tokens}; "
                "truncate with the tokenizer's max_tokens"
            )
        clean_BT = ids_BT.masked_fill(~mask_BT.bool(), self.pad_id)
        return self._adapter.embed(self.backbone, clean_BT, **positions)

    def embed_vectors(self, vectors_BTD: Tensor, **positions: Tensor) -> Tensor:
        """What `embed` makes of words, made of vectors that stand in their place: positions, types and norm are added.

        Args:
            vectors_BTD: tokens of another origin (cells of an image), as wide as the word embeddings.
            positions: `position_ids` and `token_type_ids` (B, T); left out, token i is at position i, of type 0.

        Raises:
            ConfigError: the backbone takes words only.
        """
        return self._adapter.embed_vectors(self.backbone, vectors_BTD, **positions)

    def encode(self, hidden_BTD: Tensor, mask: Tensor) -> Sequence[Tensor]:
        """All states (B, T, D), the input first and the last layer's output last.

        Args:
            hidden_BTD: what `embed` gives, or tokens of any other origin beside them.
            mask: bool, True where a position may be attended to: (B, T) for all queries alike, or (B, Q, T) with Q = T
                (causal, sequence-to-sequence, and the other masks of fusion models). A query that may attend to
                nothing attends to everything; whoever pools leaves it out.
        """
        mask = mask.bool()
        attend_BQT = mask[:, None, :] if mask.ndim == 2 else mask
        attend_BQT = attend_BQT | ~attend_BQT.any(dim=-1, keepdim=True)
        return self._adapter.encode(self.backbone, hidden_BTD, attend_BQT)

    def encode_next(self, hidden_BTD: Tensor, mask_BTK: Tensor, cache: Any) -> Tensor:
        """The last states (B, T, D) of tokens that come behind others, whose keys and values the cache holds.

        Args:
            hidden_BTD: what `embed` gives of the new tokens alone.
            mask_BTK: bool, True where a new token may attend, to those of the cache and then to the new ones; every
                row sees something.
            cache: a `transformers.DynamicCache`, empty at first; it takes the new tokens in.

        Raises:
            ConfigError: the backbone keeps no keys and values.
        """
        return self._adapter.encode_next(self.backbone, hidden_BTD, mask_BTK, cache)

    def _combined(self, states: Sequence[Tensor]) -> Tensor:
        """One state of those that were chosen."""
        chosen = torch.stack([states[layer] for layer in self.layers])
        return chosen.sum(dim=0) if self.reduce == "sum" else chosen.mean(dim=0)

    def _pooled(self, tokens_BTD: Tensor, mask_BT: Tensor) -> Tensor:
        """One vector a text from its real tokens; zeros for a text without any."""
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
