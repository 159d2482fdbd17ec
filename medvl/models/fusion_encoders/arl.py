"""ARL: align, reason and learn with a knowledge graph (Chen et al., arXiv 2209.07118, ACM MM
2022).
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Self, Unpack

import torch
from torch import Tensor

from medvl import losses
from medvl.common.config_io import check_within
from medvl.data.knowledge.finder import MAX_ENTITIES, LinkedEntities
from medvl.data.tokenizer.tokenizer import IGNORED, Tokenizer
from medvl.encoders import ImageEncoder, TextEncoder
from medvl.errors import ConfigError
from medvl.losses.masked import PatchMask
from medvl.models.base import MaskedWords, Parts, sample_masked_words
from medvl.models.fusion_encoders.bases.objectives import (
    Corruption,
    Encoded,
    MaskedImageModeling,
    Objective,
)
from medvl.models.fusion_encoders.m3ae import M3AEConfig, pixel_decoder, reconstruct_pixels
from medvl.models.fusion_encoders.parts.encoder import FusionEncoder, Tokens
from medvl.models.fusion_encoders.parts.inputs import ImageSource
from medvl.models.fusion_encoders.parts.knowledge import (
    GRAPH_DROPOUT,
    EntityGraph,
    EntityHead,
    KnowledgeConfig,
    KnowledgeStream,
    find_entities,
    read_graph,
    without_masked,
)
from medvl.models.fusion_encoders.parts.transformer import Sizes
from medvl.models.fusion_encoders.streams import StreamModel
from medvl.models.registry import register_system
from medvl.schema import Batch

# Entities of a knowledge graph in images and texts (ARL).


class EntityScores(NamedTuple):
    """Scores of all entities for images and texts, and which of them are there: 1, 0, or NaN in
    rows that lack it.
    """

    image_BV: Tensor
    image_target_BV: Tensor
    text_BV: Tensor
    text_target_BV: Tensor


class EntityAlignment(Objective[Encoded, None, EntityScores]):
    """Classification of the entities that an image shows and that a text mentions (ARL, section
    3.3).

    Each is one binary decision for each entity. The entities of an image are those that any text of
    its sample mentions, so a sample without a text counts for neither.

    Args:
        weight: factor of the term.
        score: function from image and text tokens before fusion to the scores (B, V) of all
            entities.
    """

    name = "align"

    def __init__(
        self, weight: float, score: Callable[[Tokens, Tokens], tuple[Tensor, Tensor]]
    ) -> None:
        super().__init__(weight)
        self.score = score

    def corrupt(self, batch: Batch) -> None:
        """Sample nothing."""

    def predict(self, encoded: Encoded, corruption: None) -> EntityScores:
        """Score all entities for each image and each text. Raises ConfigError for a batch
        without entities.
        """
        batch = encoded.batch
        if batch.entity_BN is None or batch.image_entity_BN is None:
            raise ConfigError(
                "expected a batch with entities (Inputs.entities)", "missing", field="entity_BN"
            )
        image_BV, text_BV = self.score(encoded.image, encoded.text)
        has_text_B = (
            torch.ones_like(batch.mask_BT[:, 0]) if batch.has_text_B is None else batch.has_text_B
        )
        has_both_B = has_text_B if batch.has_image_B is None else has_text_B & batch.has_image_B
        return EntityScores(
            image_BV,
            mentioned(batch.image_entity_BN, image_BV.shape[1], has_both_B),
            text_BV,
            mentioned(batch.entity_BN, text_BV.shape[1], has_text_B),
        )

    def loss(self, predictions: EntityScores, corruption: None) -> Tensor:
        """Return the mean binary cross-entropy of the images' entities plus that of the texts'."""
        image_BV, image_target_BV, text_BV, text_target_BV = predictions
        return losses.multilabel_bce(image_BV, image_target_BV) + losses.multilabel_bce(
            text_BV, text_target_BV
        )


def mentioned(entity_BN: Tensor, entities: int, counted_B: Tensor) -> Tensor:
    """(B, V): 1 for the entities of each row, 0 for others; NaN in rows that do not count."""
    place_BN = torch.where(entity_BN >= 0, entity_BN, entities)  # padding goes to one more column
    target_BV = torch.zeros(len(entity_BN), entities + 1, device=entity_BN.device).scatter(
        1, place_BN, 1.0
    )
    return target_BV[:, :entities].masked_fill(~counted_B[:, None], torch.nan)


# V entities of the graph, N entities of a text; the other letters as in `medvl.schema`.


@dataclasses.dataclass(frozen=True, kw_only=True)
class ARLConfig(KnowledgeConfig, M3AEConfig):
    """Published settings of ARL."""

    itm_weight: float = 0.1
    align_weight: float = 1.0
    former = (
        ("whole_entities", True),
        ("max_entities", MAX_ENTITIES),
        ("graph_dropout", GRAPH_DROPOUT),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_knowledge()
        check_within(self, "(0, inf)", "align_weight")


@register_system("arl")
class ARL(StreamModel):
    """M3AE that aligns images and texts with a knowledge graph, reasons with it in fusion and masks
    whole entities.

    A text's entities are encoded by graph attention over the whole graph, once a step, and form a
    stream of their own in the text's fusion layers; for masked words, entities with a masked word
    are left out. Batches that medvl's loaders did not make may lack entities: those of a text are
    found in its ids, and an image has those of its text.

    Deviations: entities are found by a dictionary of names instead of scispaCy's linker
    (`medvl.data.EntityFinder`); words outside of entities are masked as whole words, where the
    released code masks RoBERTa's tokens; a text has the same share of masked words whatever its
    length, where the released code masks ten tokens (0.15 of the padded length) of every text, so
    that short ones lose most of theirs; the last fusion layer reads no entities, for which no
    gradient reached its weights (`KnowledgeStream`). Otherwise as in `M3AE`.
    """

    Config = ARLConfig
    fusion: KnowledgeStream
    image_encoder: ImageEncoder

    def __init__(
        self,
        config: ARLConfig,
        image_encoder: ImageSource,
        text_encoder: TextEncoder,
        **parts: Unpack[Parts],
    ) -> None:
        super().__init__(config, image_encoder, text_encoder, **parts)
        self.mim_head = pixel_decoder(config, image_encoder)
        self.mim = MaskedImageModeling(config.mim_weight, self, config.mask_ratio)
        self.align_head = EntityHead(config.width, EntityGraph(config))
        self.objectives = (
            self.mim,
            *self.objectives,
            EntityAlignment(config.align_weight, self.score_entities),
        )
        self.register_load_state_dict_post_hook(_set_finder)

    @classmethod
    def build(cls, config: ARLConfig, *, pretrained: bool, tokenizer: Tokenizer | None) -> Self:
        """Raises as `read_graph` too."""
        if config.graph is not None or config.knowledge is None:
            return super().build(config, pretrained=pretrained, tokenizer=tokenizer)
        sizes, tensors = read_graph(config.knowledge, config.entity_width)
        model = super().build(
            dataclasses.replace(config, graph=sizes), pretrained=pretrained, tokenizer=tokenizer
        )
        model.align_head.graph.set_graph(tensors)
        _set_finder(model)
        return model

    def make_fusion(self, config: Any) -> FusionEncoder:
        return KnowledgeStream(Sizes.of(config, config.width), config)

    def reconstruct(
        self, image_BCHW: Tensor, image: Tokens, text: Tokens, patches: PatchMask
    ) -> Tensor:
        """(B, P, C): predict pixels of all patches as M3AE does; `image`, whole, is not read."""
        return reconstruct_pixels(self, image_BCHW, text, patches)

    def score_entities(self, image: Tokens, text: Tokens) -> tuple[Tensor, Tensor]:
        """Return the scores (B, V) of all entities for images and for texts, by their first
        tokens.
        """
        text_BTD, image_BPD = self.fusion.mark(text, image)
        return self.align_head(image_BPD[:, 0], text_BTD[:, 0])

    def predict(self, batch: Batch, corruption: Corruption) -> dict[str, Any]:
        """Encode the graph once."""
        with self.align_head.graph.once():
            return super().predict(batch, corruption)

    def encode(self, batch: Batch, corruption: Corruption) -> Encoded:
        linked = self.link(batch)
        targets = batch.image_entity_BN
        targets = linked.entity_BN if targets is None else targets
        return super().encode(
            dataclasses.replace(batch, **linked._asdict(), image_entity_BN=targets), corruption
        )

    def mask_words(self, batch: Batch) -> MaskedWords:
        """Mask all words of an entity's mention, or none."""
        return sample_masked_words(batch, self.masking, self.link(batch).mention_BT)

    def masked_and_unmasked(self, batch: Batch, words: MaskedWords) -> tuple[Tokens, Tokens]:
        """Leave entities with a masked word out of the masked texts."""
        whole = self.link(batch)
        unmasked = without_masked(whole, words.labels_BT != IGNORED)
        twice = LinkedEntities(*(torch.cat(pair) for pair in zip(unmasked, whole, strict=True)))
        return super().masked_and_unmasked(dataclasses.replace(batch, **twice._asdict()), words)

    def link(self, batch: Batch) -> LinkedEntities:
        """Return the entities of a batch's texts, found in the ids if the loader did not find
        them.
        """
        if batch.entity_BN is None or batch.mention_BT is None:
            return find_entities(self.inputs, self.tokenizer, batch.ids_BT, batch.mask_BT)
        return LinkedEntities(batch.entity_BN, batch.mention_BT)

    def texts_of(self, batch: Batch) -> Tokens:
        text = super().text_tokens(batch.ids_BT, batch.mask_BT, batch.has_text_B)
        return self.align_head.attach(text, self.link(batch), batch.has_text_B)

    def text_tokens(
        self, ids_BT: Tensor, mask_BT: Tensor, has_text_B: Tensor | None = None
    ) -> Tokens:
        """Find the entities in the ids."""
        text = super().text_tokens(ids_BT, mask_BT, has_text_B)
        return self.align_head.attach(
            text, find_entities(self.inputs, self.tokenizer, ids_BT, mask_BT), has_text_B
        )


def _set_finder(model: ARL, *_: object) -> None:
    """Make loaders find the entities of the model's graph; on the meta device it has no names
    yet.
    """
    graph = model.align_head.graph
    if not graph.name_hash_N.is_meta:
        model.inputs = dataclasses.replace(model.inputs, entities=graph.finder())
