"""A knowledge graph on disk: a folder with

    entities.tsv    identifier, tab, preferred name and synonyms separated by `|`; sorted by
                    identifier
    triples.tsv     identifier of the head, relation, identifier of the tail, separated by tabs;
                    sorted
    knowledge.json  version of the format, sha256 of both files, their counts, and what they were
                    made from
    entity_embeddings.safetensors     vectors of the entities (`medvl.data.knowledge.transe`), once
                                      they are trained

All files except the embeddings are text in UTF-8. Names may be licensed: those of UMLS must not be
redistributed.
"""

import dataclasses
import hashlib
import itertools
import json
import re
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from medvl.common.config_io import check_within
from medvl.common.files import write_atomic
from medvl.common.untrusted import ANYWHERE, parse_json
from medvl.data.knowledge.finder import EntityFinder, name_words
from medvl.errors import CorpusError

ENTITIES = "entities.tsv"
TRIPLES = "triples.tsv"
MANIFEST = "knowledge.json"
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
        """Return a finder of all names. If several entities share a name, one that prefers it
        takes precedence.
        """
        return EntityFinder.of(self._names_by_rank())

    def _names_by_rank(self) -> Iterator[tuple[str, int]]:
        yield from ((names[0], entity) for entity, names in enumerate(self.names))
        yield from ((name, entity) for entity, names in enumerate(self.names) for name in names[1:])


def write_knowledge(graph: KnowledgeGraph, folder: Path) -> KnowledgeGraph:
    """Write a graph into a new folder, or over an equal one, and return it with its hash.

    Raises CorpusError when the folder holds another graph or other files.
    """
    entities = "".join(
        f"{cui}\t{'|'.join(names)}\n"
        for cui, names in zip(graph.identifiers, graph.names, strict=True)
    )
    triples = "".join(
        f"{graph.identifiers[head]}\t{graph.relations[relation]}\t{graph.identifiers[tail]}\n"
        for head, relation, tail in graph.triples_N3.tolist()
    )
    contents = {ENTITIES: entities.encode(), TRIPLES: triples.encode()}
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    digest = _combine(hashes)
    if folder.is_dir() and any(folder.iterdir()) and _recorded(folder) != hashes:
        raise CorpusError(
            f"{folder} holds another graph or other files; give a new folder", "exists", field="out"
        )
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

    Raises CorpusError when a file is missing, damaged, of another version, or differs from its
    hash.
    """
    folder = Path(folder)
    manifest = _manifest(folder)
    if manifest.get("format") != _FORMAT:
        message = (
            f"{folder / MANIFEST}: expected format {_FORMAT}, got "
            f"{manifest.get('format')}; build the graph again"
        )
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


# Settings of reading UMLS and of training embeddings, which the command line shows.


@dataclasses.dataclass(frozen=True, kw_only=True)
class UMLSOptions:
    """Selection of concepts, names and relations. An empty selection of a kind keeps everything."""

    language: str = "ENG"
    """language of the names (column LAT)"""
    sources: tuple[str, ...] = ()
    """source vocabularies of names and relations (column SAB), such as SNOMEDCT_US; default all"""
    semantic_types: tuple[str, ...] = ()
    """semantic types of the concepts (TUI), such as T047 for diseases; default all"""
    relations: tuple[str, ...] = ()
    """relations (RELA, or the code REL of rows without one), such as finding_site_of; default
    all with a RELA
    """
    suppressible: bool = False
    """also read names and relations that UMLS marks as suppressible or obsolete"""
    min_mentions: int = 20
    """where texts are given: keep concepts that they mention more often than this"""
    keep_isolated: bool = False
    """keep concepts without a relation to another kept one"""

    def __post_init__(self) -> None:
        check_within(self, "[0, inf)", "min_mentions")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransEConfig:
    """Settings of a training; ARL's by default."""

    dim: int = 256
    margin: float = 5.0
    negatives: int = 25
    epochs: int = 1000
    batches: int = 100
    """batches of an epoch, or as many as there are triples"""
    lr: float = 1.0
    validate_share: float = 0.0
    """share of the related pairs of entities that are held out and predicted; 0 trains on all,
    as published
    """
    seed: int = 0

    def __post_init__(self) -> None:
        check_within(self, "(0, inf)", "dim", "margin", "negatives", "epochs", "batches", "lr")
        check_within(self, "[0, 1)", "validate_share")


# Knowledge graphs from a release of UMLS (https://uts.nlm.nih.gov), which needs a licence and is
# never part of medvl.
#
# The release is the folder with `MRCONSO.RRF` and `MRREL.RRF` (usually `META`), and `MRSTY.RRF`
# where semantic types are selected; or the same files of another vocabulary in this layout, such
# as `medvl phantom umls` writes.
#
# The files are read line by line. What stays in memory is 10 MB of flags, the kept concepts with
# their names, and while texts are counted 16 bytes for each name of the release (about 100 MB for
# all English names).

_CONCEPTS = "MRCONSO.RRF"
_RELATIONS = "MRREL.RRF"
_TYPES = "MRSTY.RRF"
_DEFINITIONS = "MRDEF.RRF"
_COLUMNS = {_CONCEPTS: 18, _RELATIONS: 16, _TYPES: 6, _DEFINITIONS: 8}
"""File -> number of columns."""
_CUI = re.compile(r"C\d{7}")
_CUIS = 10**7
_LONGEST_LINE = 1 << 17


def read_umls(
    folder: Path | str, options: UMLSOptions | None = None, texts: Iterable[str] | None = None
) -> KnowledgeGraph:
    """Read a knowledge graph from a release of UMLS.

    A row of MRREL gives the relation of its second concept to its first: (CUI2, RELA, CUI1).
    Relations of a concept with itself are left out.

    Args:
        folder: the release, or the folder above its `META`.
        options: see `UMLSOptions`.
        texts: texts of a corpus, to keep only the concepts that they mention more than
            `min_mentions` times; None keeps all. ARL keeps those with more than 20.

    Raises CorpusError when a file is missing, is not a file of UMLS or ends early, and when nothing
    is selected.
    """
    options = options or UMLSOptions()
    release = _Release(_meta(Path(folder)), options)
    concepts = release.concepts() if texts is None else release.mentioned(texts)
    if 1 not in concepts:
        counted = "" if texts is None else f", mentioned more than {options.min_mentions} times,"
        raise CorpusError(f"no concept of {folder}{counted} has {release.selected}", "empty")
    relations, triples_N3 = release.triples(concepts)
    if not len(triples_N3):
        raise CorpusError(
            f"no two kept concepts of {folder} have a relation with {release.selected}", "empty"
        )
    if not options.keep_isolated:
        related = bytearray(_CUIS)
        for cui in np.unique(triples_N3[:, [0, 2]]).tolist():
            related[cui] = 1
        concepts = related
    names = release.names(concepts)
    cui_E = np.array(sorted(names), np.int64)
    numbered_N3 = np.stack(
        [
            np.searchsorted(cui_E, triples_N3[:, 0]),
            triples_N3[:, 1],
            np.searchsorted(cui_E, triples_N3[:, 2]),
        ],
        axis=1,
    )
    return KnowledgeGraph(
        identifiers=[f"C{cui:07d}" for cui in cui_E.tolist()],
        names=[names[cui] for cui in cui_E.tolist()],
        relations=relations,
        triples_N3=numbered_N3[np.lexsort(numbered_N3.T[::-1])],
        made_from={"umls": {**dataclasses.asdict(options), "counted_texts": texts is not None}},
    )


def read_definitions(
    folder: Path | str, identifiers: Iterable[str], options: UMLSOptions | None = None
) -> dict[str, list[str]]:
    """Return the definitions of some concepts from `MRDEF.RRF` of a release: CUI -> distinct texts.

    Of the options, sources and `suppressible` apply. Raises CorpusError as `read_umls` does.
    """
    release = _Release(_meta(Path(folder)), options or UMLSOptions())
    concepts = set(identifiers)
    definitions: dict[str, dict[str, None]] = {}
    for row in release.rows(_DEFINITIONS):
        text = " ".join(row[5].split())
        if row[0] in concepts and text and release.selects(row[4], row[6]):
            definitions.setdefault(row[0], {})[text] = None
    return {identifier: list(texts) for identifier, texts in definitions.items()}


class _Release:
    """The files of a release, and the options of reading them."""

    def __init__(self, meta: Path, options: UMLSOptions) -> None:
        self.meta = meta
        self.options = options
        self.typed = self._typed() if options.semantic_types else None
        selections = {
            name: getattr(options, name) for name in ("sources", "semantic_types", "relations")
        }
        described = [f"{name} {' '.join(values)}" for name, values in selections.items() if values]
        self.selected = ", ".join([f"language {options.language}", *described])

    def concepts(self) -> bytearray:
        """Return the flags of all concepts with a usable name."""
        flags = bytearray(_CUIS)
        for cui, name, _ in self._names():
            if name_words(name):
                flags[cui] = 1
        return flags

    def mentioned(self, texts: Iterable[str]) -> bytearray:
        """Return the flags of the concepts that the texts mention more often than
        `min_mentions`.
        """
        preferred = ((name, cui) for cui, name, first in self._names() if first)
        others = ((name, cui) for cui, name, first in self._names() if not first)
        finder = EntityFinder.of(itertools.chain(preferred, others))
        counts: Counter[int] = Counter()
        for text in texts:
            counts.update(mention.entity for mention in finder.find(text))
        flags = bytearray(_CUIS)
        for cui, count in counts.items():
            flags[cui] = count > self.options.min_mentions
        return flags

    def triples(self, concepts: bytearray) -> tuple[list[str], np.ndarray]:
        """Return the names of relations and the distinct triples of CUIs (N, 3) among the kept
        concepts.
        """
        relation_names = set(self.options.relations)
        numbers = dict[str, int]()
        values = array("q")
        for row in self.rows(_RELATIONS):
            relation = row[7] or (row[3] if relation_names else "")
            if (
                not relation
                or (relation_names and relation not in relation_names)
                or not self.selects(row[10], row[14])
            ):
                continue
            tail = _number(row[0])
            head = _number(row[4])
            if head != tail and concepts[head] and concepts[tail]:
                values.extend((head, numbers.setdefault(relation, len(numbers)), tail))
        triples_N3 = np.unique(np.frombuffer(values, np.int64).reshape(-1, 3), axis=0)
        relations = sorted(numbers)
        order = np.array([relations.index(relation) for relation in numbers], np.int64)
        if len(triples_N3):
            triples_N3[:, 1] = order[triples_N3[:, 1]]
        return relations, triples_N3

    def names(self, concepts: bytearray) -> dict[int, list[str]]:
        """Return the distinct names of the kept concepts, each one's preferred name first."""
        names: dict[int, dict[str, str]] = {}
        preferred: dict[int, str] = {}
        for cui, name, first in self._names():
            if concepts[cui]:
                names.setdefault(cui, {}).setdefault(name.lower(), name)
                if first:
                    preferred.setdefault(cui, name)
        for cui, name in preferred.items():
            names[cui] = {name.lower(): name} | names[cui]
        return {cui: list(of_cui.values()) for cui, of_cui in names.items()}

    def _names(self) -> Iterator[tuple[int, str, bool]]:
        """Yield concept, name and whether it is the preferred one, of the selected rows."""
        for row in self.rows(_CONCEPTS):
            if row[1] != self.options.language or not self.selects(row[11], row[16]):
                continue
            cui = _number(row[0])
            name = " ".join(row[14].split())
            if name and (self.typed is None or self.typed[cui]):
                yield cui, name, (row[2], row[4], row[6]) == ("P", "PF", "Y")

    def selects(self, source: str, suppress: str) -> bool:
        """Return whether rows with this source and this suppression flag are read."""
        of_source = not self.options.sources or source in self.options.sources
        return of_source and (self.options.suppressible or suppress in ("N", ""))

    def _typed(self) -> bytearray:
        flags = bytearray(_CUIS)
        semantic_types = set(self.options.semantic_types)
        for row in self.rows(_TYPES):
            if row[1] in semantic_types:
                flags[_number(row[0])] = 1
        return flags

    def rows(self, name: str) -> Iterator[list[str]]:
        """Yield the columns of a file's rows. Raises CorpusError naming the line that is not one
        of this file.
        """
        path = self.meta / name
        columns = _COLUMNS[name]
        try:
            file = ANYWHERE.open(path, CorpusError)
        except FileNotFoundError:
            raise CorpusError(
                f"{path} is missing: give the folder of a UMLS release", "not_found"
            ) from None
        with file:
            for number, line in enumerate(iter(lambda: file.readline(_LONGEST_LINE), b""), start=1):
                try:
                    row = line.decode().rstrip("\r\n").split("|")
                except UnicodeDecodeError:
                    raise CorpusError(
                        f"{path}, line {number}: expected UTF-8", "undecodable"
                    ) from None
                if (
                    len(row) != columns + 1
                    or not _CUI.fullmatch(row[0])
                    or not line.endswith(b"\n")
                ):
                    what = f"{columns} columns ending in |, the first a CUI such as C0032227"
                    message = f"{path}, line {number}: expected {what}, got {len(row) - 1} columns"
                    raise CorpusError(message, "malformed", field="columns")
                yield row


def _number(cui: str) -> int:
    """Return the number of a CUI. Raises CorpusError, whose message does not quote the value."""
    if not _CUI.fullmatch(cui):
        raise CorpusError(
            "expected a CUI such as C0032227 in column CUI2", "malformed", field="CUI2"
        )
    return int(cui[1:])


def _meta(folder: Path) -> Path:
    return (
        folder
        if (folder / _CONCEPTS).exists() or not (folder / "META").is_dir()
        else folder / "META"
    )
