"""Readers of text documents: one per line, paragraphs, JSON lines, and PubMed's XML. Each streams its files."""

import dataclasses
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal
from xml.etree import ElementTree

from medvl.common.untrusted import ANYWHERE, parse_xml
from medvl.data.corpora.common.tables import malformed, open_text, read_json_lines, read_lines
from medvl.data.corpora.common.text_overlap import plain_suffix
from medvl.errors import CorpusError

_CHUNK = 1 << 20
_LONGEST_ARTICLE = 1 << 24
_ARTICLE_START = re.compile(r"<PubmedArticle[\s>]")
_ARTICLE_END, _FILE_END = "</PubmedArticle>", "</PubmedArticleSet>"

Layout = Literal["lines", "paragraphs"]
"""Layout of plain text files: "lines" has one document per line; "paragraphs" has one sentence per line and a
blank line after each document."""


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
    """Field of JSON lines with the document's id, null if unknown; default none: documents of one text are one."""


def document_files(path: Path) -> list[Path]:
    """Return the files of documents in a folder, sorted; a file itself.

    Raises CorpusError when there is none of a known kind.
    """
    found = sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]
    known = [each for each in found if plain_suffix(each) in (".txt", ".jsonl", ".xml")]
    if not known:
        state = "does not exist" if not path.exists() else "has no documents"
        raise CorpusError(f"{path} {state}: expected .txt, .jsonl or .xml (PubMed), also as .gz", "not_found")
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
            raise malformed(f"{path}, row {number}", f"{options.text_field} is not text", options.text_field)
        identity = None if options.id_field is None else row[options.id_field]
        yield Document(text=text.strip(), id=None if identity is None else str(identity))


def read_pubmed(path: Path) -> Iterator[Document]:
    """Yield title and abstract of each article of PubMed's XML (baseline or update files), by its PubMed id.

    Articles are cut out of the file and parsed one by one. The text of an article without an abstract is empty. Raises
    CorpusError when the file is damaged, incomplete or of another kind.
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
