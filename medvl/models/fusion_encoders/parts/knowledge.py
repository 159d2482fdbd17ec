"""Layers of ARL: a graph of entities encoded by graph attention, and a stream of entities beside
the text's.

Letters: B batch, V entities of the graph, M edges, N entities of a text, T text tokens, P image
tokens, H heads, C width of a head, D width.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medvl.common.compilation import untraced
from medvl.common.config_io import check_within
from medvl.data.knowledge.finder import EntityFinder, EntityLinker, LinkedEntities
from medvl.data.knowledge.graph import read_knowledge
from medvl.data.knowledge.transe import load_embeddings
from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.errors import ConfigError
from medvl.losses.common import full_precision
from medvl.models.base import LAYER_NORM_EPS, init_weights
from medvl.models.fusion_encoders.parts.encoder import DualStream, EntityTokens, Tokens
from medvl.models.fusion_encoders.parts.transformer import (
    Attention,
    CoAttentionLayer,
    FeedForward,
    Sizes,
    padding_mask,
)
from medvl.schema import Inputs

if TYPE_CHECKING:
    from medvl.encoders.text.packing import Packing

_SLOPE = 0.2
"""Negative slope of the leaky ReLU, as in GAT."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GraphSizes:
    """Sizes of a knowledge graph, from which the model of a checkpoint is built."""

    entities: int
    triples: int
    names: int
    longest_name: int
    """Words of the longest name."""
    sha256: str
    """Hash of the graph (`medvl.data.KnowledgeGraph`)."""


GRAPH_DROPOUT = 0.2
"""Dropout of the graph attention, as published."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class KnowledgeConfig:
    """Settings of a knowledge graph in a model, to inherit beside a system's other settings;
    ARL's by default.
    """

    knowledge: str | None = None
    """Folder of a knowledge graph with embeddings (`medvl knowledge build` and `train`). A
    checkpoint needs none.
    """
    graph: GraphSizes | None = None
    """Sizes of that graph; set when the model is created."""
    entity_width: int = 256
    """Width of the entities, equal to that of the embeddings."""
    entity_heads: int = 4
    entity_intermediate: int = 1024
    graph_heads: int = 8
    graph_head_width: int = 64

    def check_knowledge(self) -> None:
        """Raise ConfigError for sizes that are out of range."""
        check_within(self, "(0, inf)", "entity_width", "entity_heads", "entity_intermediate")
        check_within(self, "(0, inf)", "graph_heads", "graph_head_width")
        if self.entity_width % self.entity_heads:
            message = (
                f"entity_heads must divide entity_width {self.entity_width}, got "
                f"{self.entity_heads}"
            )
            raise ConfigError(message, "conflict", field="entity_heads")


def read_graph(folder: str, width: int) -> tuple[GraphSizes, dict[str, Tensor]]:
    """Return the sizes of the graph in a folder, and the tensors of its `EntityGraph`.

    Raises ConfigError when its embeddings are not `width` wide, CorpusError as `read_knowledge` and
    `load_embeddings`.
    """
    graph = read_knowledge(folder)
    vectors_VD = load_embeddings(graph, folder)
    finder = graph.finder()
    if vectors_VD.shape[1] != width:
        message = (
            f"expected entity_width {vectors_VD.shape[1]} as in {folder}, got {width}; "
            f"set it to that"
        )
        raise ConfigError(message, "mismatch", field="entity_width")
    sizes = GraphSizes(
        entities=len(graph.identifiers),
        triples=len(graph.triples_N3),
        names=len(finder),
        longest_name=finder.longest,
        sha256=graph.sha256,
    )
    loops_2V = torch.arange(sizes.entities, device="cpu").expand(2, -1)  # as the triples
    tensors = {
        "vectors": vectors_VD,
        "edges_2M": torch.cat([torch.from_numpy(graph.triples_N3[:, [0, 2]].T), loops_2V], dim=1),
        "name_hash_N": torch.from_numpy(finder.hash_N.view(np.int64)),
        "name_entity_N": torch.from_numpy(finder.entity_N),
    }
    return sizes, tensors


class GraphAttention(nn.Module):
    """A layer of graph attention (GAT; Velickovic et al., arXiv 1710.10903, section 2.1), heads
    concatenated.

    Args:
        in_dim: width of the input.
        head_dim: C.
        heads: H; the output has H * C numbers.
        dropout: rate of dropout of the attention.
    """

    def __init__(self, in_dim: int, head_dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.project = nn.Linear(in_dim, heads * head_dim, bias=False)
        self.source = nn.Parameter(torch.empty(heads, head_dim))
        self.target = nn.Parameter(torch.empty(heads, head_dim))
        self.bias = nn.Parameter(torch.zeros(heads * head_dim))
        for weight in (self.project.weight, self.source, self.target):
            nn.init.xavier_uniform_(weight)

    def forward(self, states_VD: Tensor, edges_2M: Tensor) -> Tensor:
        """(V, H * C): each node is the weighted sum of the nodes with an edge to it, in float32.

        `edges_2M` has the source and the target of each edge. A node without an edge to it is only
        the bias, so give every node an edge to itself.
        """
        source_M, target_M = edges_2M
        with full_precision(states_VD):
            projected_VHC = self.project(states_VD.float()).unflatten(1, (self.heads, -1))
            score_MH = (projected_VHC * self.source).sum(-1)[source_M] + (
                projected_VHC * self.target
            ).sum(-1)[target_M]
            weight_MH = softmax_by_target(F.leaky_relu(score_MH, _SLOPE), target_M, len(states_VD))
            weight_MH = F.dropout(weight_MH, self.dropout, self.training)
            message_MHC = weight_MH[..., None] * projected_VHC[source_M]
            return (
                torch.zeros_like(projected_VHC).index_add(0, target_M, message_MHC).flatten(1)
                + self.bias
            )


def softmax_by_target(score_MH: Tensor, target_M: Tensor, nodes: int) -> Tensor:
    """(M, H): softmax over the edges with the same target."""
    place_MH = target_M[:, None].expand_as(score_MH)
    highest_VH = score_MH.new_full((nodes, score_MH.shape[1]), -torch.inf)
    highest_VH = highest_VH.scatter_reduce(0, place_MH, score_MH.detach(), "amax")
    weight_MH = (score_MH - highest_VH[target_M]).exp()
    total_VH = weight_MH.new_zeros(highest_VH.shape).index_add(0, target_M, weight_MH)
    return weight_MH / total_VH[target_M]


class EntityGraph(nn.Module):
    """Vectors of a graph's entities, encoded by two layers of graph attention, and the dictionary
    of their names.

    Edges go from the head to the tail of each triple, and from every entity to itself. The names
    are kept as hashes, so that a checkpoint has no licensed strings and needs no folder.

    The first layer has `graph_heads`, the second one head. Dropout is applied to the input of both
    and to their attention.

    Raises ConfigError for a configuration without a graph.
    """

    def __init__(self, config: KnowledgeConfig) -> None:
        super().__init__()
        if config.graph is None:
            message = (
                "expected a knowledge graph; set knowledge to a folder of `medvl "
                "knowledge build` and `train`"
            )
            raise ConfigError(message, "missing", field="knowledge")
        sizes = config.graph
        width = config.entity_width
        head_dim = config.graph_head_width
        heads = config.graph_heads
        self.sizes = sizes
        self.dropout = GRAPH_DROPOUT
        self.vectors = nn.Parameter(nn.init.xavier_uniform_(torch.empty(sizes.entities, width)))
        self.norm = nn.LayerNorm(width)
        self.first = GraphAttention(width, head_dim, heads, self.dropout)
        self.second = GraphAttention(head_dim * heads, width, 1, self.dropout)
        edges = sizes.triples + sizes.entities
        self.register_buffer("edges_2M", torch.zeros(2, edges, dtype=torch.int64))
        self.register_buffer("name_hash_N", torch.zeros(sizes.names, dtype=torch.int64))
        self.register_buffer("name_entity_N", torch.zeros(sizes.names, dtype=torch.int64))
        self.edges_2M: Tensor
        self.name_hash_N: Tensor
        self.name_entity_N: Tensor
        self._kept: list[Tensor] | None = None

    @torch.no_grad()
    def set_graph(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over the tensors of `read_graph`."""
        for name, tensor in tensors.items():
            getattr(self, name).copy_(tensor)

    def finder(self) -> EntityFinder:
        """Return the dictionary of the names, on the CPU."""
        hash_N = self.name_hash_N.cpu().numpy().view(np.uint64)
        return EntityFinder(hash_N, self.name_entity_N.cpu().numpy(), self.sizes.longest_name)

    def forward(self) -> Tensor:
        """(V, D): all entities. Within `once` they are encoded at the first call only."""
        if self._kept:
            return self._kept[0]
        hidden_VD = F.dropout(self.norm(self.vectors), self.dropout, self.training)
        hidden_VD = F.elu(self.first(hidden_VD, self.edges_2M))
        encoded_VD: Tensor = self.second(
            F.dropout(hidden_VD, self.dropout, self.training), self.edges_2M
        )
        if self._kept is not None:
            self._kept.append(encoded_VD)
        return encoded_VD

    @contextlib.contextmanager
    def once(self) -> Iterator[None]:
        """Encode the graph once for all calls in this context."""
        self._kept = []
        try:
            yield
        finally:
            self._kept = None


class EntityHead(nn.Module):
    """The graph, and scores of its entities for images and for texts (ARL, section 3.3).

    Args:
        width: width of the images' and texts' tokens.
        graph: encodes the entities.
    """

    def __init__(self, width: int, graph: EntityGraph) -> None:
        super().__init__()
        self.graph = graph
        entity_width = graph.vectors.shape[1]
        self.image, self.text = (
            nn.Sequential(
                nn.Linear(width, width), nn.ReLU(), nn.Linear(width, entity_width), nn.ReLU()
            )
            for _ in range(2)
        )
        init_weights(self.image)
        init_weights(self.text)

    def forward(self, image_BD: Tensor, text_BD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores (B, V) of all entities for the first tokens of images and of texts."""
        encoded_VD = self.graph()
        return self.image(image_BD) @ encoded_VD.T, self.text(text_BD) @ encoded_VD.T

    def attach(self, text: Tokens, linked: LinkedEntities, has_text_B: Tensor | None) -> Tokens:
        """Return texts with their entities; padding, and placeholders of missing texts, have
        vectors of zeros.
        """
        real_BN = linked.entity_BN >= 0
        if has_text_B is not None:
            real_BN = real_BN & has_text_B[:, None]
        states_BND = F.embedding(linked.entity_BN.clamp(min=0), self.graph()) * real_BN[..., None]
        mention_BT = linked.mention_BT[:, : text.states_BND.shape[1]]
        known_BT = (mention_BT >= 0) & real_BN.gather(1, mention_BT.clamp(min=0))
        return text._replace(
            entities=EntityTokens(states_BND, real_BN, mention_BT.masked_fill(~known_BT, -1))
        )


@untraced  # torch.compile cannot trace the search in NumPy
def find_entities(
    inputs: Inputs, tokenizer: Tokenizer | None, ids_BT: Tensor, mask_BT: Tensor
) -> LinkedEntities:
    """Return the entities of texts on their device, as a loader finds them; none without a
    finder or a tokenizer.
    """
    if inputs.entities is None or tokenizer is None:
        none_BT = torch.full_like(ids_BT, -1)
        return LinkedEntities(none_BT[:, :1], none_BT)
    linked = EntityLinker(inputs.entities, tokenizer)(ids_BT, mask_BT)
    return LinkedEntities(*(tensor.to(ids_BT.device) for tensor in linked))


def without_masked(linked: LinkedEntities, masked_BT: Tensor) -> LinkedEntities:
    """Return the entities without those that a masked word is part of, which would give the word
    away.
    """
    entity_BN, mention_BT = linked
    masked_BT = masked_BT & (mention_BT >= 0)
    counts_BN = torch.zeros_like(entity_BN).scatter_add(
        1, mention_BT.clamp(min=0), masked_BT.long()
    )
    return LinkedEntities(entity_BN.masked_fill(counts_BN > 0, -1), mention_BT)


class EntityLayer(nn.Module):
    """A layer of the entities' stream: attention to each other and to the image, projection to the
    words, feed-forward.

    Without `feeds`, for the last layer of the stream, there is no feed-forward layer, whose output
    would be unused.
    """

    def __init__(self, sizes: Sizes, width: int, *, feeds: bool) -> None:
        super().__init__()
        self.attention = Attention(sizes)
        self.cross_attention = Attention(sizes)
        self.from_image = nn.Linear(width, sizes.width)
        self.to_text = nn.Linear(sizes.width, width)
        self.feed_forward = FeedForward(sizes) if feeds else None

    def forward(
        self, entities: EntityTokens, image_BPD: Tensor, image_mask_BP: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the addition to the words (B, T, D), zeros outside of mentions, and the
        entities (B, N, D).
        """
        states_BND = self.attention(
            entities.states_BND, entities.states_BND, padding_mask(entities.mask_BN)
        )
        states_BND = self.cross_attention(
            states_BND, self.from_image(image_BPD), padding_mask(image_mask_BP)
        )
        added_BTD = at_mentions(self.to_text(states_BND), entities.mention_BT)
        return added_BTD, states_BND if self.feed_forward is None else self.feed_forward(states_BND)


class KnowledgeLayer(nn.Module):
    """A layer of the text's stream that reads the entities of the text (ARL, section 3.4).

    Each entity is added to the words of its mention; a linear layer with a residual and LayerNorm
    follows, before the words' feed-forward layer. Without `entities`, nothing is added.
    """

    def __init__(self, sizes: Sizes, entities: EntityLayer | None) -> None:
        super().__init__()
        self.text = CoAttentionLayer(sizes)
        self.entities = entities
        self.dropout = sizes.dropout
        self.merge = nn.Linear(sizes.width, sizes.width)
        self.merge_norm = nn.LayerNorm(sizes.width, LAYER_NORM_EPS)

    def forward(
        self,
        text_BTD: Tensor,
        image_BPD: Tensor,
        text_mask_BT: Tensor | None,
        image_mask_BP: Tensor | None,
        entities: EntityTokens,
        packing: "Packing | None" = None,
    ) -> tuple[Tensor, EntityTokens]:
        """Return the words (B, T, D), packed if they were, and the entities."""
        attended_BTD = self.text.attention(
            text_BTD, text_BTD, padding_mask(text_mask_BT), packing, packing
        )
        crossed_BTD = self.text.cross_attention(
            attended_BTD, image_BPD, padding_mask(image_mask_BP), packing
        )
        known_BTD = crossed_BTD
        if self.entities is not None:
            added_BTD, states_BND = self.entities(entities, image_BPD, image_mask_BP)
            added_BTD = added_BTD if packing is None else packing.pack(added_BTD)
            known_BTD = crossed_BTD + added_BTD
            entities = entities._replace(states_BND=states_BND)
        merged_BTD = F.dropout(self.merge(known_BTD), self.dropout, self.training)
        words_BTD: Tensor = self.text.feed_forward(self.merge_norm(merged_BTD + crossed_BTD))
        return words_BTD, entities

    def cross_weights(
        self,
        states_BND: Tensor,
        other_BKD: Tensor,
        mask_BN: Tensor | None,
        other_mask_BK: Tensor | None,
    ) -> Tensor:
        """(B, N, K): see `CoAttentionLayer.cross_weights`."""
        return self.text.cross_weights(states_BND, other_BKD, mask_BN, other_mask_BK)


def at_mentions(entity_BND: Tensor, mention_BT: Tensor) -> Tensor:
    """(B, T, D): the vector of the entity that each word mentions, zeros for words outside of
    mentions.
    """
    index_BTD = mention_BT.clamp(min=0)[..., None].expand(-1, -1, entity_BND.shape[2])
    return entity_BND.gather(1, index_BTD) * (mention_BT >= 0)[..., None]


class KnowledgeStream(DualStream):
    """Co-attention of a text and an image, with entities in the text's stream. Texts need
    `Tokens.entities`.

    The last layer adds no entities: words of mentions would be their only readers, and of the last
    layer's words only the first and the masked ones are read, so that its weights for entities
    would not learn.
    """

    def __init__(self, sizes: Sizes, config: KnowledgeConfig) -> None:
        entity_sizes = dataclasses.replace(
            sizes,
            width=config.entity_width,
            heads=config.entity_heads,
            intermediate=config.entity_intermediate,
        )
        last = sizes.layers - 1
        entity_layers = [
            EntityLayer(entity_sizes, sizes.width, feeds=number < last)
            for number in range(1, last + 1)
        ]
        super().__init__(
            sizes, [KnowledgeLayer(sizes, entities) for entities in (*entity_layers, None)]
        )

    def streams(self, text: Tokens, image: Tokens, depth: int) -> tuple[Tokens, Tokens]:
        if text.entities is None:
            raise ValueError(
                "expected texts with entities: encode them with the model's text_tokens"
            )
        entities, (text_BTD, image_BPD) = text.entities, self.mark(text, image)
        packing = self.packing_of(text)
        mask_BT = text.mask_BN
        if packing is not None:
            text_BTD = packing.pack(text_BTD)
            mask_BT = packing.mask_BT
        for text_layer, image_layer in list(zip(self.text_layers, self.image_layers, strict=True))[
            :depth
        ]:
            (text_BTD, entities), image_BPD = (
                text_layer(text_BTD, image_BPD, mask_BT, image.mask_BN, entities, packing),
                image_layer(image_BPD, text_BTD, image.mask_BN, mask_BT, None, packing),
            )
        text_BTD = text_BTD if packing is None else packing.unpack(text_BTD)
        return Tokens(text_BTD, text.mask_BN), Tokens(image_BPD, image.mask_BN)
