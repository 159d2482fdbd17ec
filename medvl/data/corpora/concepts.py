"""Facts about the concepts of a knowledge graph, for pretraining a text encoder on knowledge (KAD's
first stage).

A sample is a fact about a concept, without an image. The first line of its text is the fact, in
segments separated by tabs; the other lines are names of the concept:

    Fluid between the lung and the chest wall.         a definition
    blunting <tab> manifestation of                    the concept is the relation's tail
    isa <tab> pleural disease                          the concept is its head

Splits are by concept: the concepts of validation have no fact in training.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from medvl.data.corpora.common.documents import Document
from medvl.data.corpora.common.tables import Plan
from medvl.data.corpora.registry import Corpus, FileAccess, register_corpus
from medvl.data.corpora.text import TextOptions, plan_documents
from medvl.data.knowledge.graph import KnowledgeGraph, read_definitions, read_knowledge
from medvl.data.privacy import Deidentifier
from medvl.data.splits import DEFAULT_FRACTIONS, parse_fractions
from medvl.data.transforms.masked_text import SEGMENTS


@register_corpus("concepts")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Concepts(Corpus):
    """Convert the facts of a knowledge graph, for pretraining a text encoder on them
    (recipes/kebert.py).
    """

    has_images: ClassVar[bool] = False

    knowledge: Path
    """graph of `medvl knowledge build`."""
    umls: Path | None = None
    """release of UMLS with MRDEF.RRF, for definitions; default relations alone."""
    name: str = "concepts"
    """name of the corpus."""
    splits: tuple[str, ...] = ("train=0.98", "validate=0.01", "test=0.01")
    """fractions of the splits, by concept."""

    def plan(self, deid: Deidentifier, access: FileAccess = FileAccess()) -> Plan:
        """Plan the facts of the graph and of the definitions, as `plan_facts`."""
        graph = read_knowledge(self.knowledge)
        definitions = {} if self.umls is None else read_definitions(self.umls, graph.identifiers)
        fractions = parse_fractions(self.splits)
        return plan_facts(graph, deid, definitions, name=self.name, fractions=fractions)


def plan_facts(
    graph: KnowledgeGraph,
    deid: Deidentifier,
    definitions: Mapping[str, Sequence[str]],
    *,
    name: str = "concepts",
    fractions: Mapping[str, float] = DEFAULT_FRACTIONS,
) -> Plan:
    """Plan the facts of a graph: two of each triple, one of its head and one of its tail, and one
    of each definition.

    Args:
        graph: entities and triples.
        deid: makes the keys of the samples.
        definitions: identifier of an entity -> its definitions
            (`medvl.data.knowledge.graph.read_definitions`).
        name: name of the corpus.
        fractions: fractions of the splits, by concept.

    Raises CorpusError when there is no fact.
    """
    facts = _facts(graph, deid, definitions, name)
    options = TextOptions(block_words=0)
    return plan_documents(facts, deid, name=name, options=options, fractions=fractions)


def _facts(
    graph: KnowledgeGraph, deid: Deidentifier, definitions: Mapping[str, Sequence[str]], name: str
) -> Iterator[Document]:
    def fact(entity: int, *segments: str) -> Document:
        lines = [
            SEGMENTS.join(" ".join(segment.split()) for segment in segments),
            *graph.names[entity],
        ]
        return Document(
            text="\n".join(lines), patient=deid.patient(f"{name} {graph.identifiers[entity]}")
        )

    for entity, identifier in enumerate(graph.identifiers):
        for definition in definitions.get(identifier, ()):
            yield fact(entity, definition)
    for head, number, tail in graph.triples_N3.tolist():
        relation = graph.relations[number].replace("_", " ")
        yield fact(tail, graph.names[head][0], relation)
        yield fact(head, relation, graph.names[tail][0])
