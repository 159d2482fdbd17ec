"""How `TextEncoder` talks to Hugging Face models, open_clip's text towers and static tables of word vectors.

An adapter splits a model in two: embeddings, and layers over any hidden states under any attention mask. That is what
lets a fusion model put image tokens beside the text without another encoder class. Adapters hold no tensors; the
library's module stays as it is, with its own parameter names, so that published files fit it.
"""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from medvl.encoders.image.adapter import by_depth
from medvl.encoders.text.packing import Packing, use_packed_attention
from medvl.errors import ConfigError


class LanguageAdapter(abc.ABC):
    """One kind of model. What a kind cannot do, it refuses with ConfigError."""

    full_length: int | None = None
    """Length that every text is padded to inside, for models that were trained so and attend to their padding. Their
    states are then that long."""
    ends_full: bool = False
    """Whether the last position of that length, padding or not, stands for the text, and not its last real token."""

    @abc.abstractmethod
    def embed(self, net: Any, ids_BT: Tensor, **positions: Tensor) -> Tensor:
        """(B, T, D); padding has been set to the model's own padding id."""

    def embed_vectors(self, net: Any, vectors_BTD: Tensor, **positions: Tensor) -> Tensor:
        """(B, T, D): what `embed` adds to word embeddings, added to vectors of another origin."""
        raise ConfigError(f"{type(net).__name__} embeds words only: take a BERT")

    @abc.abstractmethod
    def encode(self, net: Any, hidden_BTD: Tensor, attend_BQT: Tensor) -> Sequence[Tensor]:
        """All states, the input first; `attend_BQT` is True where a query may look, with Q of 1 or T."""

    def encode_next(self, net: Any, hidden_BTD: Tensor, attend_BTK: Tensor, cache: Any) -> Tensor:
        """(B, T, D): the last states of tokens that follow those of the cache, whose keys and values they join."""
        raise ConfigError(f"{type(net).__name__} keeps no keys and values: take a BERT")

    def prepare_packing(self, net: Any) -> None:
        """Ready a model for `encode_packed`; it encodes padded texts as before."""
        raise ConfigError(f"{type(net).__name__} encodes padded texts only: take a BERT")

    def encode_packed(self, net: Any, hidden_1ND: Tensor, packing: Packing) -> Sequence[Tensor]:
        """All states (1, N, D) of the real tokens of a batch, each of which looks at its own text."""
        raise ConfigError(f"{type(net).__name__} encodes padded texts only: take a BERT")

    @abc.abstractmethod
    def layers(self, net: Any) -> list[list[str]]:
        """Names of all parameters by depth, embeddings first."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Language:
    """A model as its library builds it, and what `TextEncoder` must know of it."""

    net: nn.Module
    adapter: LanguageAdapter
    width: int
    vocab_size: int
    pad_id: int
    max_tokens: int
    num_layers: int
    blocks: str | None = None
    """Beginning of the names of numbered layers, where a model may be built with fewer than the published one."""
    projection: nn.Module | None = None
    projected_width: int = 0
    counts_from_padding: bool = False
    """Whether the first position's number is one above the padding id."""


class BertAdapter(LanguageAdapter):
    """BERT and its kin: `embeddings`, then `encoder.layer`. Layers return their hidden states."""

    def embed(self, net: Any, ids_BT: Tensor, **positions: Tensor) -> Tensor:
        """Takes `position_ids` and `token_type_ids`."""
        hidden_BTD: Tensor = net.embeddings(input_ids=ids_BT, **positions)
        return hidden_BTD

    def embed_vectors(self, net: Any, vectors_BTD: Tensor, **positions: Tensor) -> Tensor:
        """Takes `position_ids` and `token_type_ids`."""
        hidden_BTD: Tensor = net.embeddings(inputs_embeds=vectors_BTD, **positions)
        return hidden_BTD

    def encode(self, net: Any, hidden_BTD: Tensor, attend_BQT: Tensor) -> Sequence[Tensor]:
        """See the base class."""
        states = [hidden_BTD]
        for layer in self._in_order(net):
            states.append(layer(states[-1], attend_BQT[:, None]))
        return states

    def encode_next(self, net: Any, hidden_BTD: Tensor, attend_BTK: Tensor, cache: Any) -> Tensor:
        """See the base class; `cache` is one of transformers'."""
        for layer in self._in_order(net):
            hidden_BTD = layer(hidden_BTD, attend_BTK[:, None], past_key_values=cache)
        return hidden_BTD

    def prepare_packing(self, net: Any) -> None:
        """See the base class."""
        use_packed_attention(net)

    def encode_packed(self, net: Any, hidden_1ND: Tensor, packing: Packing) -> Sequence[Tensor]:
        """See the base class."""
        states = [hidden_1ND]
        for layer in self._in_order(net):
            states.append(layer(states[-1], None, packing=packing))
        return states

    def layers(self, net: Any) -> list[list[str]]:
        """Embeddings, then layer by layer."""
        count = len(net.encoder.layer)
        names = [name for name, _ in net.named_parameters()]
        return by_depth(names, [f"encoder.layer.{index}." for index in range(count)])

    def _in_order(self, net: Any) -> Sequence[nn.Module]:
        layers: Sequence[nn.Module] = net.encoder.layer
        return layers


class AlbertAdapter(BertAdapter):
    """ALBERT: narrow embeddings, mapped to the width of layers that share their parameters."""

    def embed(self, net: Any, ids_BT: Tensor, **positions: Tensor) -> Tensor:
        """The mapping to full width counts as embeddings."""
        hidden_BTD: Tensor = net.encoder.embedding_hidden_mapping_in(super().embed(net, ids_BT, **positions))
        return hidden_BTD

    def embed_vectors(self, net: Any, vectors_BTD: Tensor, **positions: Tensor) -> Tensor:
        """Vectors have the width of the narrow embeddings, and are mapped like them."""
        narrow_BTD = super().embed_vectors(net, vectors_BTD, **positions)
        hidden_BTD: Tensor = net.encoder.embedding_hidden_mapping_in(narrow_BTD)
        return hidden_BTD

    def encode_next(self, net: Any, hidden_BTD: Tensor, attend_BTK: Tensor, cache: Any) -> Tensor:
        """Refused: its layers share their parameters, and would share their places in the cache."""
        return LanguageAdapter.encode_next(self, net, hidden_BTD, attend_BTK, cache)

    def layers(self, net: Any) -> list[list[str]]:
        """Embeddings, then the groups of shared layers."""
        groups = [f"encoder.albert_layer_groups.{index}." for index in range(len(net.encoder.albert_layer_groups))]
        return by_depth([name for name, _ in net.named_parameters()], groups)

    def _in_order(self, net: Any) -> Sequence[nn.Module]:
        total, groups = net.config.num_hidden_layers, net.encoder.albert_layer_groups
        return [groups[index * len(groups) // total] for index in range(total)]


class WholeAdapter(LanguageAdapter):
    """Any other Hugging Face encoder: `embed` hands the ids through, `encode` runs the whole model on them.

    It serves texts only: hidden states from elsewhere, and masks with a row for every query, are refused.
    """

    def embed(self, net: Any, ids_BT: Tensor, **positions: Tensor) -> Tensor:
        """(B, T) int64: the ids themselves."""
        if positions:
            raise ConfigError(f"{type(net).__name__} takes no {', '.join(positions)} here")
        return ids_BT

    def encode(self, net: Any, hidden_BTD: Tensor, attend_BQT: Tensor) -> Sequence[Tensor]:
        """See the base class."""
        if hidden_BTD.is_floating_point() or attend_BQT.shape[1] != 1:
            raise ConfigError(f"{type(net).__name__} encodes token ids under one mask only: take a BERT-like encoder")
        output = net(input_ids=hidden_BTD, attention_mask=attend_BQT[:, 0].long(), output_hidden_states=True)
        states: Sequence[Tensor] = output.hidden_states
        return states

    def layers(self, net: Any) -> list[list[str]]:
        """Embeddings, then the children of the longest list of modules."""
        lists = {name: child for name, child in net.named_modules() if isinstance(child, nn.ModuleList)}
        longest = max(lists, key=lambda name: len(lists[name]))
        names = [name for name, _ in net.named_parameters()]
        blocks = [f"{longest}.{index}." for index in range(len(lists[longest]))]
        last = [index for index, name in enumerate(names) if name.startswith(longest)][-1]
        return by_depth(names, blocks, top=names[last + 1 :])


class ClipAdapter(LanguageAdapter):
    """open_clip's own text Transformer: causal, or bidirectional over its full length."""

    def __init__(self, net: Any) -> None:
        if net.attn_mask is None:
            self.full_length = int(net.context_length)
            self.ends_full = net.pool_type == "last"  # SigLIP's; MobileCLIP's is its end token

    def embed(self, net: Any, ids_BT: Tensor, **positions: Tensor) -> Tensor:
        """A bidirectional tower (SigLIP) was trained on texts padded to its full length, and attends to the padding."""
        if positions:
            raise ConfigError(f"open_clip's text tower takes no {', '.join(positions)}")
        if self.full_length is not None:
            ids_BT = nn.functional.pad(ids_BT, (0, self.full_length - ids_BT.shape[1]), value=net.pad_id)
        hidden_BTD: Tensor = net.token_embedding(ids_BT) + net.positional_embedding[: ids_BT.shape[1]]
        return hidden_BTD

    def encode(self, net: Any, hidden_BTD: Tensor, attend_BQT: Tensor) -> Sequence[Tensor]:
        """States after every block; the last one after the final norm. Causality is the model's own, so a mask over
        right padding changes nothing for real tokens; other masks are refused."""
        length = hidden_BTD.shape[1]
        if attend_BQT.shape[1] != 1:
            raise ConfigError("open_clip's text tower has its own attention mask: take a BERT-like encoder")
        mask = None if net.attn_mask is None else net.attn_mask[:length, :length]
        last_BTD, states = net.transformer.forward_intermediates(hidden_BTD, attn_mask=mask)
        return [hidden_BTD, *states[:-1], net.ln_final(last_BTD)]

    def layers(self, net: Any) -> list[list[str]]:
        """Token and position embeddings, blocks, final norm."""
        blocks = [f"transformer.resblocks.{index}." for index in range(len(net.transformer.resblocks))]
        names = [name for name, _ in net.named_parameters()]
        return by_depth(names, blocks, top=["ln_final."], stem=["token_embedding.", "positional_embedding"])


class StaticAdapter(LanguageAdapter):
    """A table of word vectors: every token for itself."""

    def embed(self, net: Any, ids_BT: Tensor, **positions: Tensor) -> Tensor:
        """The rows of the table."""
        if positions:
            raise ConfigError(f"a static table takes no {', '.join(positions)}")
        vectors_BTD: Tensor = net(ids_BT)
        return vectors_BTD

    def encode(self, net: Any, hidden_BTD: Tensor, attend_BQT: Tensor) -> Sequence[Tensor]:
        """Nothing looks at anything."""
        return [hidden_BTD]

    def layers(self, net: Any) -> list[list[str]]:
        """The table."""
        return [["weight"]]
