"""Readers of text documents: one per line, paragraphs, JSON lines, and PubMed's XML. Each
streams its files.
"""

import csv
import dataclasses
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from xml.etree import ElementTree

import numpy as np

from medvl.common.untrusted import ANYWHERE, parse_json, parse_xml
from medvl.data.corpora.common.tables import malformed, open_text, read_json_lines, read_lines
from medvl.errors import ConfigError, CorpusError

# Texts of evaluation sets, to leave out documents that share a run of words with them.
#
# A run is 12 words, lower-cased and without punctuation. Runs are compared by 64-bit hashes,
# eight bytes of memory each.

RUN = 12
"""Words of a run."""
_WORD = re.compile(r"\w+")
_FACTOR = 0x9E3779B97F4A7C15
_POWERS_R = np.array([pow(_FACTOR, power, 2**64) for power in range(RUN)], np.uint64)
_JSON_LINES = (".jsonl", ".ndjson")
_JSON = (".json",)
_XML = (".xml",)
_TEXTS = (".txt", ".tokens")
_TABLES = (".tsv", ".csv", ".conll", ".iob", ".iob2")
_MERGE = 1 << 18


def words_of(text: str) -> list[str]:
    """Return the words of a text: lower-cased runs of letters and digits."""
    return _WORD.findall(text.lower())


def run_hashes(words: Sequence[str]) -> np.ndarray:
    """Return the hash of each run of 12 words, uint64; none for a shorter text."""
    if len(words) < RUN:
        return np.zeros(0, np.uint64)
    word_N = np.array([zlib.crc32(word.encode()) for word in words], np.uint64) * np.uint64(_FACTOR)
    word_N ^= word_N >> np.uint64(29)
    runs = len(words) - RUN + 1
    total_N = np.zeros(runs, np.uint64)
    for place, power in enumerate(_POWERS_R):
        total_N += word_N[place : place + runs] * power
    return total_N


class HashSet:
    """A set of 64-bit numbers in eight bytes each."""

    def __init__(self) -> None:
        self._sorted_N = np.zeros(0, np.uint64)
        self._new: set[int] = set()

    def add(self, number: int) -> bool:
        """Add a number; return whether it is new."""
        if number in self._new:
            return False
        place = int(np.searchsorted(self._sorted_N, np.uint64(number)))
        if place < len(self._sorted_N) and int(self._sorted_N[place]) == number:
            return False
        self._new.add(number)
        if len(self._new) == _MERGE:
            self._sorted_N = np.union1d(self._sorted_N, np.fromiter(self._new, np.uint64, _MERGE))
            self._new.clear()
        return True


class HeldOutTexts:
    """Runs of words of named evaluation sets.

    Args:
        texts: name of a set -> its texts.
    """

    def __init__(self, texts: Mapping[str, Iterable[str]]) -> None:
        self._runs: dict[str, np.ndarray] = {}
        for name, of_set in texts.items():
            hashes = [run_hashes(words_of(text)) for text in of_set]
            self._runs[name] = (
                np.unique(np.concatenate(hashes)) if hashes else np.zeros(0, np.uint64)
            )
            if not len(self._runs[name]):
                message = f"the evaluation set {name} has no text of {RUN} words; check its path"
                raise ConfigError(message, "empty", field="held_out")

    def find(self, words: Sequence[str]) -> str | None:
        """Return the name of the first set that shares a run with a text, given its words; None
        if there is none.
        """
        hash_N = run_hashes(words)
        for name, run_M in self._runs.items():
            place_N = np.searchsorted(run_M, hash_N).clip(max=len(run_M) - 1)
            if (run_M[place_N] == hash_N).any():
                return name
        return None


def read_texts(path: Path) -> Iterator[str]:
    """Yield all texts of an evaluation set: a file, or all files in a folder.

    From JSON and JSON lines, every string, and lists of strings joined by spaces (given words);
    from tables (.tsv, .csv, .conll, .iob, .iob2), every column from top to bottom; from .xml, all
    text and the attributes of every element (DDI's sentences); from .txt and .tokens (EBM PICO),
    the whole text. All of them also gzipped.

    Raises CorpusError when a file is damaged, or there is none.
    """
    paths = sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]
    readers = {
        **dict.fromkeys(_JSON_LINES, _read_json_lines),
        **dict.fromkeys(_JSON, _read_json_texts),
    }
    readers |= {**dict.fromkeys(_TABLES, _read_columns), **dict.fromkeys(_TEXTS, _read_whole)}
    readers |= dict.fromkeys(_XML, _read_xml)
    known = [(each, readers[suffix]) for each in paths if (suffix := plain_suffix(each)) in readers]
    if not known:
        message = (
            f"{path} has no text of an evaluation set: expected {', '.join(readers)}, also as .gz"
        )
        raise CorpusError(message, "not_found", field="held_out")
    for each, read in known:
        yield from read(each)


def plain_suffix(path: Path) -> str:
    """Return the suffix of a file's name in lower case, of `x.jsonl.gz` that before `.gz`."""
    return Path(path.name.removesuffix(".gz")).suffix.lower()


def _read_json_lines(path: Path) -> Iterator[str]:
    for number, line in enumerate(read_lines(path, ANYWHERE), start=1):
        if line.strip():
            yield from _strings(_parse(line, f"{path}, row {number}"))


def _read_json_texts(path: Path) -> Iterator[str]:
    with open_text(path, ANYWHERE) as file:
        yield from _strings(_parse(file.read(), str(path)))


def _read_columns(path: Path) -> Iterator[str]:
    columns: dict[int, list[str]] = {}
    for row in _read_csv(path) if plain_suffix(path) == ".csv" else _read_cells(path):
        for number, cell in enumerate(row):
            columns.setdefault(number, []).append(cell)
    yield from (" ".join(cells) for cells in columns.values())


def _read_csv(path: Path) -> Iterator[list[str]]:
    try:
        yield from csv.reader(read_lines(path, ANYWHERE))
    except csv.Error as error:
        raise malformed(path, f"not readable as a table ({error})") from error


def _read_cells(path: Path) -> Iterator[list[str]]:
    """Yield the cells of each line; a quotation mark is a word. Words and tags can also be
    separated by spaces.
    """
    spaced = plain_suffix(path) != ".tsv"
    for line in read_lines(path, ANYWHERE):
        yield line.split() if spaced and "\t" not in line else line.split("\t")


def _read_xml(path: Path) -> Iterator[str]:
    with open_text(path, ANYWHERE) as file:
        text = file.read()
    try:
        root = parse_xml(text.encode())
    except ElementTree.ParseError as error:
        raise malformed(path, f"not well-formed XML ({error})") from error
    yield " ".join(root.itertext())
    for element in root.iter():
        yield from element.attrib.values()


def _read_whole(path: Path) -> Iterator[str]:
    yield " ".join(read_lines(path, ANYWHERE))


def _parse(data: str, where: str) -> Any:
    try:
        return parse_json(data)
    except ValueError as error:
        raise CorpusError(
            f"{where}: cannot be read as JSON ({type(error).__name__})", "malformed"
        ) from error


def _strings(value: Any) -> Iterator[str]:
    """Yield the strings of a JSON value; a list of strings is one text."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _strings(part)
    elif isinstance(value, list):
        if value and all(isinstance(part, str) for part in value):
            yield " ".join(value)
        else:
            for part in value:
                yield from _strings(part)


_CHUNK = 1 << 20
_LONGEST_ARTICLE = 1 << 24
_ARTICLE_START = re.compile(r"<PubmedArticle[\s>]")
_ARTICLE_END = "</PubmedArticle>"
_FILE_END = "</PubmedArticleSet>"

Layout = Literal["lines", "paragraphs"]
"""Layout of plain text files: "lines" has one document per line; "paragraphs" has one sentence per
line and a blank line after each document.
"""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """A text with its id, patient and split, where they are known."""

    text: str
    id: str | None = None
    """Unique id, such as PubMed's; None: the text identifies the document."""
    patient: str | None = None
    """Hashed patient, of a report that is in shards already."""
    split: str | None = None
    """Split of that patient; None: by hash of the document."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DocumentFormat:
    """Format of the files of documents."""

    layout: Layout = "lines"
    """Layout of .txt files, see `Layout`."""
    text_field: str = "text"
    """Field of JSON lines with the text."""
    id_field: str | None = None
    """Field of JSON lines with the document's id, null if unknown; default none: documents of
    one text are one.
    """


def document_files(path: Path) -> list[Path]:
    """Return the files of documents in a folder, sorted; a file itself.

    Raises CorpusError when there is none of a known kind.
    """
    paths = sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]
    known = [each for each in paths if plain_suffix(each) in (".txt", ".jsonl", ".xml")]
    if not known:
        state = "does not exist" if not path.exists() else "has no documents"
        raise CorpusError(
            f"{path} {state}: expected .txt, .jsonl or .xml (PubMed), also as .gz", "not_found"
        )
    return known


def read_documents(path: Path, options: DocumentFormat) -> Iterator[Document]:
    """Yield the documents of a file. Raises CorpusError when it is damaged."""
    kind = plain_suffix(path)
    if kind == ".jsonl":
        return _read_json(path, options)
    if kind == ".xml":
        return read_pubmed(path)
    return _read_paragraphs(path) if options.layout == "paragraphs" else _read_lines(path)


def _read_lines(path: Path) -> Iterator[Document]:
    for line in read_lines(path, ANYWHERE):
        if line.strip():
            yield Document(text=line.strip())


def _read_paragraphs(path: Path) -> Iterator[Document]:
    sentences: list[str] = []
    for line in read_lines(path, ANYWHERE):
        if line.strip():
            sentences.append(line.strip())
        elif sentences:
            yield Document(text="\n".join(sentences))
            sentences = []
    if sentences:
        yield Document(text="\n".join(sentences))


def _read_json(path: Path, options: DocumentFormat) -> Iterator[Document]:
    fields = [options.text_field, *([] if options.id_field is None else [options.id_field])]
    for number, row in read_json_lines(path, fields, ANYWHERE):
        text = row[options.text_field]
        if not isinstance(text, str):
            raise malformed(
                f"{path}, row {number}", f"{options.text_field} is not text", options.text_field
            )
        identity = None if options.id_field is None else row[options.id_field]
        yield Document(text=text.strip(), id=None if identity is None else str(identity))


def read_pubmed(path: Path) -> Iterator[Document]:
    """Yield title and abstract of each article of PubMed's XML (baseline or update files), by its
    PubMed id.

    Articles are cut out of the file and parsed one by one. The text of an article without an
    abstract is empty. Raises CorpusError when the file is damaged, incomplete or of another kind.
    """
    pending = ""
    with open_text(path, ANYWHERE) as file:
        while chunk := file.read(_CHUNK):
            pending += chunk
            while (end := pending.find(_ARTICLE_END)) >= 0:
                end += len(_ARTICLE_END)
                start = _ARTICLE_START.search(pending, 0, end)
                if start is None:
                    raise malformed(path, "an article ends that has not begun")
                yield _article(pending[start.start() : end], path)
                pending = pending[end:]
            if len(pending) > _LONGEST_ARTICLE:
                raise malformed(path, f"an article has more than {_LONGEST_ARTICLE} characters")
    if _FILE_END not in pending or _ARTICLE_START.search(pending):
        raise CorpusError(f"{path} does not end with {_FILE_END}; download it again", "truncated")


def _article(xml: str, path: Path) -> Document:
    try:
        root = parse_xml(xml.encode())
    except ElementTree.ParseError as error:
        raise malformed(path, f"an article is not well-formed XML ({error})") from error
    number = root.findtext("MedlineCitation/PMID")
    if not number:
        raise malformed(path, "an article has no PMID", "PMID")
    abstract = _texts(root.findall("MedlineCitation/Article/Abstract/AbstractText"))
    title = _texts(root.findall("MedlineCitation/Article/ArticleTitle")) if abstract else []
    return Document(text=" ".join([*title, *abstract]), id=f"PMID {number}")


def _texts(elements: Sequence[ElementTree.Element]) -> list[str]:
    texts = (" ".join("".join(element.itertext()).split()) for element in elements)
    return [text for text in texts if text]
