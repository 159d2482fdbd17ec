"""`medvl knowledge`: knowledge graphs from UMLS, and their embeddings. Each command returns the
text to print.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from medvl.cli.help import Flat
from medvl.data.knowledge.graph import TransEConfig, UMLSOptions
from medvl.schema import NEGATIVE, POSITIVE, UNCERTAIN, ConventionsName

_VALUES = {POSITIVE: "positive", NEGATIVE: "negative", UNCERTAIN: "uncertain", None: "history"}

_TRAIN = "--data.text.source file --data.text.file {out}"
"""Options of the recipes of RadZero, CARZero, MedKLIP, KAD and MAVL."""


def build(
    umls: Path,
    out: Path,
    options: Flat[UMLSOptions],
    *,
    shards: tuple[Path, ...] = (),
) -> str:
    """Build a knowledge graph from a release of UMLS.

    Args:
        umls: folder with MRCONSO.RRF and MRREL.RRF, or the folder above its META.
        out: new output folder; an equal graph may be there already.
        options: selection of concepts, names and relations.
        shards: folders of shards; only concepts that their texts mention often enough are kept.
    """
    from medvl.data.knowledge.graph import read_umls, write_knowledge

    graph = write_knowledge(read_umls(umls, options, _texts(shards) if shards else None), out)
    counts = f"{len(graph.identifiers)} entities with {sum(map(len, graph.names))} names"
    triples = f"{len(graph.triples_N3)} triples of {len(graph.relations)} relations"
    return f"Wrote {out}: {counts}, {triples}. Next: medvl knowledge train --knowledge {out}"


def train(knowledge: Path, config: Flat[TransEConfig], *, device: str = "cpu") -> str:
    """Train embeddings of a knowledge graph's entities by TransE.

    Args:
        knowledge: graph of `medvl knowledge build`, into whose folder the embeddings are written.
        config: settings; those of ARL by default.
        device: cpu or cuda.
    """
    from medvl.data.knowledge.graph import read_knowledge
    from medvl.data.knowledge.transe import save_embeddings, train_transe

    graph = read_knowledge(knowledge)

    def report(epoch: int, loss: float) -> None:
        if sys.stderr.isatty() and (epoch + 1) % max(1, config.epochs // 100) == 0:
            print(
                f"\repoch {epoch + 1} of {config.epochs}, loss {loss:.4f}",
                end="",
                file=sys.stderr,
                flush=True,
            )

    model, links = train_transe(graph, config, device=device, report=report)
    path = save_embeddings(model, graph, config, knowledge)
    if links is None:
        return f"Wrote {path}"
    scores = (
        f"MRR {links.mrr:.3f} (chance {links.chance_mrr:.3f}), hits at 10 {links.hits_at_10:.3f}"
    )
    return f"Wrote {path}. {links.triples} held-out triples: {scores}"


def find(knowledge: Path, text: str, *, conventions: ConventionsName = "chexpert") -> str:
    """List the entities that a text mentions, in its order, and whether they are positive, negative
    or uncertain.

    Args:
        knowledge: graph of `medvl knowledge build`.
        text: a report or a sentence.
        conventions: what counts as positive and as uncertain.
    """
    from medvl.data.knowledge.graph import read_knowledge
    from medvl.data.reports.labeler import conventions_named
    from medvl.data.reports.statements import mention_values

    graph = read_knowledge(knowledge)
    mentions = graph.finder().find(text)
    values = mention_values(text, mentions, conventions_named(conventions))
    rows = [
        "\t".join(
            (text[start:end], graph.identifiers[entity], graph.names[entity][0], _VALUES[value])
        )
        for (start, end, entity), value in zip(mentions, values, strict=True)
    ]
    return "\n".join(rows) or "no entity found"


def radgraph(
    file: Path,
    out: Path,
    *,
    salt_file: Path | None = None,
    named: Literal["mimic", "shards"] = "mimic",
) -> str:
    """Write statements from RadGraph's annotations, for the text policy of statements of a file.

    Args:
        file: JSON of annotations by report, of the released graphs or of the package radgraph.
        out: JSONL file of statements by study.
        salt_file: salt of the shards.
        named: mimic hashes patient and study of names such as p10/p10000032/s50414267.txt as the
            shards of MIMIC-CXR do; shards keeps names as they are.
    """
    from medvl.cli.shards.corpora import deidentifier
    from medvl.data.reports.statements import radgraph_statements, write_statements

    study = deidentifier(salt_file).study if named == "mimic" else None
    count = write_statements(radgraph_statements(file, study), out)
    options = f"{_TRAIN.format(out=out)} --data.text.relabel True"
    return f"Wrote {out}: statements of {count} studies. Train on them: {options}"


def statements(file: Path, out: Path, *, salt_file: Path | None = None) -> str:
    """Name the studies of a file of statements as the shards of MIMIC-CXR do, whose names are
    hashes.

    Args:
        file: JSONL with lines {"study": "p10/p10000032/s50414267", "statements": [TEXT, ...]}, such
            as a language model wrote from the reports. Studies with other names keep theirs.
        out: JSONL file with the names of the shards.
        salt_file: salt of the shards.
    """
    from medvl.cli.shards.corpora import deidentifier
    from medvl.data.reports.statements import name_in_shards, read_statements, write_statements

    study = deidentifier(salt_file).study
    known = read_statements(file)
    count = write_statements(
        ((name_in_shards(name, study), texts) for name, texts in known.items()), out
    )
    return f"Wrote {out}: statements of {count} studies. Train on them: {_TRAIN.format(out=out)}"


def _texts(folders: tuple[Path, ...]) -> Iterator[str]:
    """Yield the sections of all samples; images of one study share their report, which is read
    once.
    """
    from medvl.data.shards.source import ShardSource

    for folder in folders:
        yield from (text for sections in ShardSource(folder).texts_by_study() for text in sections)


COMMANDS: dict[str, Callable[..., str]] = {
    "build": build,
    "train": train,
    "find": find,
    "radgraph": radgraph,
    "statements": statements,
}
"""Name after `medvl knowledge` -> function."""
