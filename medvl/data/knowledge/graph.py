"""A knowledge graph on disk: a folder with

    entities.tsv    identifier, tab, preferred name and synonyms separated by `|`; sorted by identifier
    triples.tsv     identifier of the head, relation, identifier of the tail, separated by tabs; sorted
    knowledge.json  version of the format, sha256 of both files, their counts, and what they were made from
    entity_embeddings.safetensors     vectors of the entities (`medvl.data.knowledge.transe`), once they are trained

All files except the embeddings are text in UTF-8. Names may be licensed: those of UMLS must not be redistributed.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from medvl.common.files import write_atomic
from medvl.common.untrusted import ANYWHERE, parse_json
from medvl.data.knowledge.finder import EntityFinder
from medvl.errors import CorpusError

ENTITIES, TRIPLES, MANIFEST = "entities.tsv", "triples.tsv", "knowledge.json"
_FORMAT = 1


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class KnowledgeGraph:
    """Entities with names, and relations between them. E entities, N triples."""

    identifiers: Sequence[str]
    """(E,): for example the CUIs of UMLS."""
    names: Sequence[Sequence[str]]
    """(E, any number): the preferred name, then synonyms."""
    relations: Sequence[str]
    triples_N3: np.ndarray
    """int64: head, relation and tail, as indices of entities and relations."""
    made_from: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Source and settings; JSON values only."""
    sha256: str = ""
    """Hash of entities and triples, from `write_knowledge` or `read_knowledge`."""

    def finder(self) -> EntityFinder:
        """Return a finder of all names. If several entities share a name, one that prefers it takes precedence."""
        return EntityFinder.of(self._names_by_rank())

    def _names_by_rank(self) -> Iterator[tuple[str, int]]:
        yield from ((names[0], entity) for entity, names in enumerate(self.names))
        yield from ((name, entity) for entity, names in enumerate(self.names) for name in names[1:])


def write_knowledge(graph: KnowledgeGraph, folder: Path) -> KnowledgeGraph:
    """Write a graph into a new folder, or over an equal one, and return it with its hash.

    Raises CorpusError when the folder holds another graph or other files.
    """
    entities = "".join(f"{cui}\t{'|'.join(names)}\n" for cui, names in zip(graph.identifiers, graph.names, strict=True))
    triples = "".join(
        f"{graph.identifiers[head]}\t{graph.relations[relation]}\t{graph.identifiers[tail]}\n"
        for head, relation, tail in graph.triples_N3.tolist()
    )
    contents = {ENTITIES: entities.encode(), TRIPLES: triples.encode()}
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    digest = _combine(hashes)
    if folder.is_dir() and any(folder.iterdir()) and _recorded(folder) != hashes:
        raise CorpusError(f"{folder} holds another graph or other files; give a new folder", "exists", field="out")
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        write_atomic(folder / name, content)
    manifest = {
        "format": _FORMAT,
        "sha256": hashes,
        "entities": len(graph.identifiers),
        "names": sum(map(len, graph.names)),
        "relations": len(graph.relations),
        "triples": len(graph.triples_N3),
        "made_from": dict(graph.made_from),
    }
    write_atomic(folder / MANIFEST, json.dumps(manifest, indent=1, sort_keys=True) + "\n")
    return dataclasses.replace(graph, sha256=digest)


def read_knowledge(folder: Path | str) -> KnowledgeGraph:
    """Read the graph in a folder.

    Raises CorpusError when a file is missing, damaged, of another version, or differs from its hash.
    """
    folder = Path(folder)
    manifest = _manifest(folder)
    if manifest.get("format") != _FORMAT:
        message = f"{folder / MANIFEST}: expected format {_FORMAT}, got {manifest.get('format')}; build the graph again"
        raise CorpusError(message, "version")
    hashes = manifest["sha256"]
    lines = {name: _lines(folder / name, hashes) for name in (ENTITIES, TRIPLES)}
    try:
        entities = [line.split("\t") for line in lines[ENTITIES]]
        number = {identifier: index for index, (identifier, _) in enumerate(entities)}
        triples = [line.split("\t") for line in lines[TRIPLES]]
        relations = sorted({relation for _, relation, _ in triples})
        place = {relation: index for index, relation in enumerate(relations)}
        rows = [(number[head], place[relation], number[tail]) for head, relation, tail in triples]
    except (KeyError, ValueError) as error:
        raise CorpusError(
            f"{folder} is damaged ({type(error).__name__}); build the graph again", "malformed"
        ) from error
    return KnowledgeGraph(
        identifiers=list(number),
        names=[names.split("|") for _, names in entities],
        relations=relations,
        triples_N3=np.array(rows, np.int64).reshape(-1, 3),
        made_from=manifest.get("made_from", {}),
        sha256=_combine(hashes),
    )


def _manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest = parse_json((folder / MANIFEST).read_bytes())
        if not isinstance(manifest, dict) or not isinstance(manifest.get("sha256"), dict):
            raise ValueError("not a manifest")
    except (FileNotFoundError, NotADirectoryError):
        message = f"{folder} has no {MANIFEST}: build a graph with `medvl knowledge build`"
        raise CorpusError(message, "not_found") from None
    except (OSError, ValueError) as error:
        message = f"{folder / MANIFEST} cannot be read ({type(error).__name__}): it is damaged"
        raise CorpusError(message, "malformed") from error
    return manifest


def _recorded(folder: Path) -> Any:
    return _manifest(folder)["sha256"] if (folder / MANIFEST).is_file() else None


def _lines(path: Path, hashes: Mapping[str, Any]) -> list[str]:
    try:
        with ANYWHERE.open(path, CorpusError) as file:
            content = file.read()
    except FileNotFoundError:
        raise CorpusError(f"{path} is missing; build the graph again", "not_found") from None
    if hashlib.sha256(content).hexdigest() != hashes.get(path.name):
        raise CorpusError(f"{path} differs from {MANIFEST}; build the graph again", "mismatch")
    return [line for line in content.decode().split("\n") if line]


def _combine(hashes: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(dict(hashes), sort_keys=True).encode()).hexdigest()
