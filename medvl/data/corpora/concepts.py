"""Facts about the concepts of a knowledge graph, for pretraining a text encoder on knowledge (KAD's
first stage).

A sample is a fact about a concept, without an image. The first line of its text is the fact, in
segments separated by tabs; the other lines are names of the concept:

    Fluid between the lung and the chest wall.         a definition
    blunting <tab> manifestation of                    the concept is the relation's tail
    isa <tab> pleural disease                          the concept is its head

Splits are by concept: the concepts of validation have no fact in training.
"""

from collections.abc import Iterator, Mapping, Sequence

from medvl.data.corpora.common.documents import Document
from medvl.data.corpora.common.tables import Plan
from medvl.data.corpora.text import TextOptions, plan as plan_text
from medvl.data.knowledge.graph import KnowledgeGraph
from medvl.data.privacy import Deidentifier
from medvl.data.splits import DEFAULT_FRACTIONS
from medvl.data.transforms.text_sequences import SEGMENTS


def plan(
    graph: KnowledgeGraph,
    deid: Deidentifier,
    *,
    definitions: Mapping[str, Sequence[str]] | None = None,
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
    options = TextOptions(block_words=0)
    return plan_text(
        _facts(graph, deid, definitions or {}, name),
        deid,
        name=name,
        options=options,
        fractions=fractions,
    )


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
