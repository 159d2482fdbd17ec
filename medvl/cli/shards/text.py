"""`medvl shards text` and `concepts`: convert texts and knowledge to shards, for pretraining text encoders."""

import itertools
from collections.abc import Iterator
from pathlib import Path

from medvl.cli.shards.corpora import ConversionOptions, Flat, convert, named_values, split_fractions
from medvl.data.convert.options import ShardOptions, ShardRun
from medvl.data.corpora.common.documents import Document, DocumentFormat
from medvl.data.corpora.text import TextOptions
from medvl.data.privacy.deidentify import Deidentifier

_FRACTIONS = ("train=0.98", "validate=0.01", "test=0.01")


def text(
    sources: tuple[Path, ...],
    run: Flat[ShardRun],
    options: Flat[TextOptions],
    files: Flat[DocumentFormat],
    *,
    name: str = "text",
    sections: tuple[str, ...] = (),
    held_out: tuple[str, ...] = (),
    splits: tuple[str, ...] = _FRACTIONS,
    samples_per_shard: int = 10_000,
) -> str:
    """Convert text documents, PubMed's XML, or the reports of shards, for pretraining text encoders.

    Args:
        sources: files or folders of .txt, .jsonl or .xml (PubMed baseline), also as .gz; or folders of shards.
        run: output folder, budget, workers.
        options: selection of documents, and their division into blocks.
        files: format of the files.
        name: name of the corpus.
        sections: sections of the reports of shards, such as findings; default all.
        held_out: evaluation sets as NAME=PATH (file or folder): documents that share a run of 12 words with one of them
            are left out and counted.
        splits: fractions of the splits, by document; reports of shards keep their split.
        samples_per_shard: blocks of text per shard.
    """
    from medvl.data.corpora import text as corpus
    from medvl.data.corpora.common.text_overlap import HeldOutTexts, read_texts

    shared = ConversionOptions(run=run, options=ShardOptions(samples_per_shard=samples_per_shard))
    deid = shared.deidentifier()
    sets = {each: read_texts(Path(path)) for each, path in named_values(held_out, "--held-out").items()}
    plan = corpus.plan(
        itertools.chain.from_iterable(_read(source, deid, files, sections) for source in sources),
        deid,
        name=name,
        options=options,
        held_out=HeldOutTexts(sets) if sets else None,
        fractions=split_fractions(splits),
    )
    return convert(plan, deid, shared)


def concepts(
    knowledge: Path,
    run: Flat[ShardRun],
    *,
    umls: Path | None = None,
    name: str = "concepts",
    splits: tuple[str, ...] = _FRACTIONS,
    samples_per_shard: int = 10_000,
) -> str:
    """Convert the facts of a knowledge graph, for pretraining a text encoder on them (recipes/kebert.py).

    Args:
        knowledge: graph of `medvl knowledge build`.
        run: output folder, budget, workers.
        umls: release of UMLS with MRDEF.RRF, for definitions; default relations alone.
        name: name of the corpus.
        splits: fractions of the splits, by concept.
        samples_per_shard: facts per shard.
    """
    from medvl.data.corpora import concepts as corpus
    from medvl.data.knowledge.graph import read_knowledge
    from medvl.data.knowledge.umls import read_definitions

    shared = ConversionOptions(run=run, options=ShardOptions(samples_per_shard=samples_per_shard))
    deid, graph = shared.deidentifier(), read_knowledge(knowledge)
    definitions = {} if umls is None else read_definitions(umls, graph.identifiers)
    plan = corpus.plan(graph, deid, definitions=definitions, name=name, fractions=split_fractions(splits))
    return convert(plan, deid, shared)


def _read(source: Path, deid: Deidentifier, files: DocumentFormat, sections: tuple[str, ...]) -> Iterator[Document]:
    from medvl.data.convert.shard_documents import read_shard_documents
    from medvl.data.corpora.common.documents import document_files, read_documents
    from medvl.data.shards.format import MANIFEST, split_folders

    if any((folder / MANIFEST).is_file() for folder in split_folders(source)):
        return read_shard_documents(source, deid, sections)
    return itertools.chain.from_iterable(read_documents(path, files) for path in document_files(source))
