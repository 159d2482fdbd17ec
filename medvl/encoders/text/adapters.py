"""Adapters from Hugging Face models, open_clip's text encoders and word vector tables to
`TextEncoder`.

An adapter splits a model into its embeddings, and its layers over any hidden states and attention
mask, so that fusion models can put image tokens beside the text. Adapters hold no tensors: the
library's module keeps its parameter names, so that published files fit it.
"""

import abc
import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from medvl.encoders.base import group_by_depth
from medvl.errors import ConfigError

if TYPE_CHECKING:
    from medvl.encoders.text.packing import Packing


# Projection heads of published text encoders, with the parameter names of their files.


class CxrBertHead(nn.Module):
    """Projection head of BioViL: Linear, GELU, LayerNorm, Linear."""

    def __init__(self, width: int, projected: int) -> None:
        super().__init__()
        self.dense_to_hidden = nn.Linear(width, projected)
        self.LayerNorm = nn.LayerNorm(projected, eps=1e-12)
        self.dense_to_output = nn.Linear(projected, projected)

    def forward(self, text_BD: Tensor) -> Tensor:
        """Map (B, D) to (B, E)."""
        hidden_BE = self.LayerNorm(nn.functional.gelu(self.dense_to_hidden(text_BD)))
        projected_BE: Tensor = self.dense_to_output(hidden_BE)
        return projected_BE


class MatrixHead(nn.Module):
    """Projection head of CLIP: one matrix (D, E), not transposed as in a linear layer."""

    def __init__(self, matrix_DE: nn.Parameter) -> None:
        super().__init__()
        self.matrix = matrix_DE

    def forward(self, text_BD: Tensor) -> Tensor:
        """Map (B, D) to (B, E)."""
        return text_BD @ self.matrix


def text_projection(kind: str, width: int) -> tuple[nn.Module, int]:
    """Return (head, width of its output) for a preset's `projection`, with torch's default
    initialisation.

    Raises:
        ConfigError: "unknown_name".
    """
    if kind == "cxrbert":
        return CxrBertHead(width, 128), 128
    if kind == "biomedclip":
        projected = 512
        middle = (width + projected) // 2
        layers = (
            nn.Linear(width, middle, bias=False),
            nn.GELU(),
            nn.Linear(middle, projected, bias=False),
        )
        return nn.Sequential(*layers), projected
    raise ConfigError(f"unknown projection head {kind!r}", "unknown_name", field="projection")


def knowledge_head(width: int, out: int) -> nn.Sequential:
    """Return BERT's pooler and the head behind it that KAD trains on knowledge, with torch's
    default initialisation.

    The released code draws the weights of the head from N(0, 1 / `width`).
    """
    return nn.Sequential(
        nn.Linear(width, width),
        nn.Tanh(),
        nn.Linear(width, width),
        nn.GELU(),
        nn.Linear(width, out),
    )


# Attention of open_clip's causal text Transformers on a GPU, without a mask in memory.


class CausalAttention(nn.MultiheadAttention):
    """`nn.MultiheadAttention` under a causal mask: on a GPU it tells the kernel, which then
    computes half the matrix.

    Elsewhere this is `nn.MultiheadAttention`. The mask must be the causal one.
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        is_causal = is_causal or (query.is_cuda and attn_mask is not None)
        return super().forward(
            query,
            key,
            value,
            key_padding_mask,
            need_weights,
            attn_mask,
            average_attn_weights,
            is_causal,
        )


def speed_up_causal_attention(net: nn.Module) -> None:
    """Make the attention of a causal Transformer `CausalAttention`, in place; parameters and
    their names stay.
    """
    for module in net.modules():
        if type(module) is nn.MultiheadAttention:
            module.__class__ = CausalAttention


class TextAdapter(abc.ABC):
    """Adapter for one kind of model; operations that a kind does not support raise ConfigError
    ("unsupported").
    """

    padded_length: int | None = None
    """Length to which every text is padded, for models that were trained with padding and attend to
    it; their states have this length.
    """
    pools_last_position: bool = False
    """Whether pool="eos" takes the last position of `padded_length`, not the last real token."""

    @abc.abstractmethod
    def embed(self, net: Any, ids_BT: Tensor, **positions: Tensor) -> Tensor:
        """Return the embeddings (B, T, D) of ids whose padding is the model's padding id."""

    def embed_vectors(self, net: Any, vectors_BTD: Tensor, **positions: Tensor) -> Tensor:
        """Return vectors with everything added that `embed` adds to word embeddings, (B, T, D)."""
        raise _unsupported(net, "embedding vectors")

    @abc.abstractmethod
    def encode(self, net: Any, hidden_BTD: Tensor, attend_BQT: Tensor) -> Sequence[Tensor]:
        """Return all states, the input first; `attend_BQT` is True where a query may attend,
        with Q = 1 or T.
        """

    def encode_next(self, net: Any, hidden_BTD: Tensor, attend_BTK: Tensor, cache: Any) -> Tensor:
        """Return the last states (B, T, D) of tokens after those in the cache, and add their
        keys and values to it.
        """
        raise _unsupported(net, "a cache of keys and values")

    def prepare_packing(self, net: Any) -> "type[Packing]":
        """Prepare a model for `encode_packed` and return the class of its packings."""
        raise _unsupported(net, "packed texts")

    def encode_packed(self, net: Any, hidden_1RD: Tensor, packing: "Packing") -> Sequence[Tensor]:
        """Return all states (1, R, D) of packed tokens, each of which attends to its own text."""
        raise _unsupported(net, "packed texts")

    def first_token_attention(self, net: Any, hidden_BTD: Tensor, mask_BT: Tensor) -> Tensor:
        """Return the last layer's attention from the first token, averaged over heads, (B, T),
        given its input.
        """
        raise _unsupported(net, "attention weights")

    @abc.abstractmethod
    def layers(self, net: Any) -> list[list[str]]:
        """Return the names of all parameters by depth, embeddings first."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TextBackbone:
    """A library's model with the metadata that `TextEncoder` needs."""

    net: nn.Module
    adapter: TextAdapter
    width: int
    vocab_size: int
    pad_id: int
    max_tokens: int
    num_layers: int
    block_prefix: str | None = None
    """Prefix of the names of numbered layers, for models that may be built with fewer layers
    than published.
    """
    projection: nn.Module | None = None
    projected_width: int = 0
    positions_start_after_padding: bool = False
    """Whether positions are numbered from the padding id plus one (RoBERTa)."""


class BertAdapter(TextAdapter):
    """Adapter for BERT-like models: `embeddings`, then `encoder.layer`, whose layers return
    hidden states.
    """

    def embed(self, net: Any, ids_BT: Tensor, **positions: Tensor) -> Tensor:
        """Return the embeddings; `positions` may have `position_ids` and `token_type_ids`."""
        hidden_BTD: Tensor = net.embeddings(input_ids=ids_BT, **positions)
        return hidden_BTD

    def embed_vectors(self, net: Any, vectors_BTD: Tensor, **positions: Tensor) -> Tensor:
        """Return embedded vectors; `positions` may have `position_ids` and `token_type_ids`."""
        hidden_BTD: Tensor = net.embeddings(inputs_embeds=vectors_BTD, **positions)
        return hidden_BTD

    def encode(self, net: Any, hidden_BTD: Tensor, attend_BQT: Tensor) -> Sequence[Tensor]:
        """Return the states after every layer."""
        states = [hidden_BTD]
        for layer in self._layers_in_order(net):
            states.append(layer(states[-1], attend_BQT[:, None]))
        return states

    def encode_next(self, net: Any, hidden_BTD: Tensor, attend_BTK: Tensor, cache: Any) -> Tensor:
        """Return the last states; `cache` is a `transformers.Cache`."""
        for layer in self._layers_in_order(net):
            hidden_BTD = layer(hidden_BTD, attend_BTK[:, None], past_key_values=cache)
        return hidden_BTD

    def prepare_packing(self, net: Any) -> "type[Packing]":
        """Register the packed attention function."""
        # imports torch's compiler: seconds
        from medvl.encoders.text.packing import Packing, use_packed_attention

        use_packed_attention(net)
        return Packing

    def encode_packed(self, net: Any, hidden_1RD: Tensor, packing: "Packing") -> Sequence[Tensor]:
        """Return the states of packed tokens."""
        states = [hidden_1RD]
        for layer in self._layers_in_order(net):
            states.append(layer(states[-1], None, packing=packing))
        return states

    def first_token_attention(self, net: Any, hidden_BTD: Tensor, mask_BT: Tensor) -> Tensor:
        """Return softmax(q k^T / sqrt(d)) of one query, recomputed, because fused attention
        returns no weights.
        """
        attention = self._last_attention(net)
        with _gathered(self._layers_in_order(net)[-1]):
            query_B1hd, key_BThd = (
                projection(states_BTD).unflatten(2, (attention.num_attention_heads, -1))
                for projection, states_BTD in (
                    (attention.query, hidden_BTD[:, :1]),
                    (attention.key, hidden_BTD),
                )
            )
        scores_BhT = (query_B1hd.float() * key_BThd.float()).sum(dim=3).transpose(
            1, 2
        ) * attention.scaling
        weights_BhT = scores_BhT.masked_fill(
            ~mask_BT[:, None], torch.finfo(torch.float32).min
        ).softmax(dim=2)
        return weights_BhT.mean(dim=1).masked_fill(~mask_BT, 0.0)

    def layers(self, net: Any) -> list[list[str]]:
        """Return the parameters of the embeddings and of each layer."""
        count = len(net.encoder.layer)
        names = [name for name, _ in net.named_parameters()]
        return group_by_depth(names, [f"encoder.layer.{index}." for index in range(count)])

    def _layers_in_order(self, net: Any) -> Sequence[nn.Module]:
        layers: Sequence[nn.Module] = net.encoder.layer
        return layers

    def _last_attention(self, net: Any) -> Any:
        return net.encoder.layer[-1].attention.self


@contextlib.contextmanager
def _gathered(layer: Any) -> Iterator[None]:
    """Gather a layer's weights outside of its forward pass, if `fully_shard` has divided them,
    without gradient.
    """
    if not hasattr(layer, "unshard"):
        yield
        return
    layer.unshard()
    with torch.no_grad():
        yield
    layer.reshard()


class AlbertAdapter(BertAdapter):
    """Adapter for ALBERT: narrow embeddings, mapped to the width of layers that share their
    parameters.
    """

    def embed(self, net: Any, ids_BT: Tensor, **positions: Tensor) -> Tensor:
        """Return the embeddings, mapped to full width."""
        hidden_BTD: Tensor = net.encoder.embedding_hidden_mapping_in(
            super().embed(net, ids_BT, **positions)
        )
        return hidden_BTD

    def embed_vectors(self, net: Any, vectors_BTD: Tensor, **positions: Tensor) -> Tensor:
        """Return embedded vectors; the inputs have the width of the narrow embeddings."""
        narrow_BTD = super().embed_vectors(net, vectors_BTD, **positions)
        hidden_BTD: Tensor = net.encoder.embedding_hidden_mapping_in(narrow_BTD)
        return hidden_BTD

    def encode_next(self, net: Any, hidden_BTD: Tensor, attend_BTK: Tensor, cache: Any) -> Tensor:
        """Raise ConfigError: layers that share parameters would also share their places in the
        cache.
        """
        return TextAdapter.encode_next(self, net, hidden_BTD, attend_BTK, cache)

    def layers(self, net: Any) -> list[list[str]]:
        """Return the parameters of the embeddings and of each group of shared layers."""
        groups = [
            f"encoder.albert_layer_groups.{index}."
            for index in range(len(net.encoder.albert_layer_groups))
        ]
        return group_by_depth([name for name, _ in net.named_parameters()], groups)

    def _layers_in_order(self, net: Any) -> Sequence[nn.Module]:
        total = net.config.num_hidden_layers
        groups = net.encoder.albert_layer_groups
        return [groups[index * len(groups) // total] for index in range(total)]

    def _last_attention(self, net: Any) -> Any:
        layers = net.encoder.albert_layer_groups[-1].albert_layers
        if len(layers) > 1:  # the input of the last one is not among the states
            raise _unsupported(net, "attention weights with inner_group_num above 1")
        return layers[0].attention


class FullModelAdapter(TextAdapter):
    """Adapter for other Hugging Face encoders: `embed` returns the ids, `encode` runs the whole
    model on them.

    Other hidden states, and masks with a row for every query, are not supported.
    """

    def embed(self, net: Any, ids_BT: Tensor, **positions: Tensor) -> Tensor:
        """Return the ids (B, T) unchanged."""
        if positions:
            raise _unsupported(net, ", ".join(positions))
        return ids_BT

    def encode(self, net: Any, hidden_BTD: Tensor, attend_BQT: Tensor) -> Sequence[Tensor]:
        """Return the hidden states of the whole model."""
        if hidden_BTD.is_floating_point() or attend_BQT.shape[1] != 1:
            raise _unsupported(net, "hidden states or a mask for every query")
        output = net(
            input_ids=hidden_BTD, attention_mask=attend_BQT[:, 0].long(), output_hidden_states=True
        )
        states: Sequence[Tensor] = output.hidden_states
        return states

    def layers(self, net: Any) -> list[list[str]]:
        """Return the parameters of the embeddings, of each module in the longest module list,
        and of the rest.
        """
        lists = {
            name: child for name, child in net.named_modules() if isinstance(child, nn.ModuleList)
        }
        longest = max(lists, key=lambda name: len(lists[name]))
        names = [name for name, _ in net.named_parameters()]
        blocks = [f"{longest}.{index}." for index in range(len(lists[longest]))]
        last = [index for index, name in enumerate(names) if name.startswith(longest)][-1]
        return group_by_depth(names, blocks, top=names[last + 1 :])


class ClipAdapter(TextAdapter):
    """Adapter for open_clip's text Transformer: causal, or bidirectional over its full length."""

    def __init__(self, net: Any) -> None:
        if net.attn_mask is None:
            self.padded_length = int(net.context_length)
            # SigLIP; MobileCLIP pools its end token
            self.pools_last_position = net.pool_type == "last"
        else:
            speed_up_causal_attention(net)

    def embed(self, net: Any, ids_BT: Tensor, **positions: Tensor) -> Tensor:
        """Return the embeddings; bidirectional models (SigLIP) get texts padded to full length,
        as in training.
        """
        if positions:
            raise _unsupported(net, ", ".join(positions))
        if self.padded_length is not None:
            ids_BT = nn.functional.pad(
                ids_BT, (0, self.padded_length - ids_BT.shape[1]), value=net.pad_id
            )
        hidden_BTD: Tensor = (
            net.token_embedding(ids_BT) + net.positional_embedding[: ids_BT.shape[1]]
        )
        return hidden_BTD

    def encode(self, net: Any, hidden_BTD: Tensor, attend_BQT: Tensor) -> Sequence[Tensor]:
        """Return the states after every block, the last one after the final norm.

        Attention is causal in the model itself, so right padding needs no mask; masks per query are
        unsupported.
        """
        length = hidden_BTD.shape[1]
        if attend_BQT.shape[1] != 1:
            raise _unsupported(net, "a mask for every query")
        mask = None if net.attn_mask is None else net.attn_mask[:length, :length]
        last_BTD, states = net.transformer.forward_intermediates(hidden_BTD, attn_mask=mask)
        return [hidden_BTD, *states[:-1], net.ln_final(last_BTD)]

    def layers(self, net: Any) -> list[list[str]]:
        """Return the parameters of the embeddings, the blocks and the final norm."""
        blocks = [
            f"transformer.resblocks.{index}." for index in range(len(net.transformer.resblocks))
        ]
        names = [name for name, _ in net.named_parameters()]
        return group_by_depth(
            names, blocks, top=["ln_final."], stem=["token_embedding.", "positional_embedding"]
        )


class TowerAdapter(TextAdapter):
    """Adapter for the text towers of CLIP and SigLIP in transformers: causal, or bidirectional over
    its full length without a mask, as SigLIP was trained.
    """

    def __init__(self, net: Any, *, is_causal: bool) -> None:
        self._options = {"is_causal": True} if is_causal else {}
        if not is_causal:
            self.padded_length = int(net.config.max_position_embeddings)
            self.pools_last_position = True

    def embed(self, net: Any, ids_BT: Tensor, **positions: Tensor) -> Tensor:
        """Return the embeddings; SigLIP gets texts padded to full length."""
        if set(positions) - {"position_ids"}:
            raise _unsupported(net, ", ".join(positions))
        if self.padded_length is not None:
            if positions:
                raise _unsupported(net, "position_ids")
            padding = self.padded_length - ids_BT.shape[1]
            ids_BT = nn.functional.pad(ids_BT, (0, padding), value=net.config.pad_token_id)
        hidden_BTD: Tensor = net.embeddings(input_ids=ids_BT, **positions)
        return hidden_BTD

    def encode(self, net: Any, hidden_BTD: Tensor, attend_BQT: Tensor) -> Sequence[Tensor]:
        """Return the states after every block, the last one after the final norm.

        Right padding needs no mask: later positions are hidden, or are part of the text (SigLIP).
        """
        if attend_BQT.shape[1] != 1:
            raise _unsupported(net, "a mask for every query")
        states = [hidden_BTD]
        for layer in net.encoder.layers:
            states.append(layer(states[-1], None, **self._options))
        return [*states[:-1], net.final_layer_norm(states[-1])]

    def layers(self, net: Any) -> list[list[str]]:
        """Return the parameters of the embeddings, the blocks and the final norm."""
        blocks = [f"encoder.layers.{index}." for index in range(len(net.encoder.layers))]
        names = [name for name, _ in net.named_parameters()]
        return group_by_depth(names, blocks, top=["final_layer_norm."], stem=["embeddings."])


class StaticAdapter(TextAdapter):
    """Adapter for a table of word vectors, without context."""

    def embed(self, net: Any, ids_BT: Tensor, **positions: Tensor) -> Tensor:
        """Return the rows of the table."""
        if positions:
            raise _unsupported(net, ", ".join(positions))
        vectors_BTD: Tensor = net(ids_BT)
        return vectors_BTD

    def encode(self, net: Any, hidden_BTD: Tensor, attend_BQT: Tensor) -> Sequence[Tensor]:
        """Return the embeddings as the only state."""
        return [hidden_BTD]

    def layers(self, net: Any) -> list[list[str]]:
        """Return the table."""
        return [["weight"]]


def _unsupported(net: Any, feature: str) -> ConfigError:
    return ConfigError(
        f"{type(net).__name__} does not support {feature}; use a BERT-like encoder", "unsupported"
    )
