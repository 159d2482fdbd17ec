"""Open-i: chest X-ray reports of Indiana University as XML, one file per report, in a folder or `NLMCXR_reports.tgz`.

3,955 reports; each has COMPARISON, INDICATION, FINDINGS and IMPRESSION (any may be empty), two lists of MeSH terms and
0 to 5 images. Text removed for privacy is masked as `XXXX`, which is kept.
"""

import dataclasses
import gzip
import io
import re
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from xml.etree import ElementTree

from medvl.common.untrusted import ANYWHERE, InputFolders, parse_xml, read_limited
from medvl.data.reports.cleaning import clean_text
from medvl.data.reports.lines import one_line
from medvl.data.reports.sentences import join_texts
from medvl.errors import CorpusError

MAX_XML_BYTES = 1 << 20
"""Largest accepted report; the longest of the collection has 25 kB."""
MAX_ARCHIVE_BYTES = 1 << 28
"""Largest accepted unpacked archive; that of the collection has 40 MB."""

_ID = re.compile(r"CXR\d{1,6}")
_IMAGE_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")  # used as a file name, so without dots and slashes


@dataclasses.dataclass(frozen=True, slots=True)
class OpeniImage:
    """One image of a report; its file is `{id}.png`."""

    id: str
    caption: str | None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OpeniReport:
    """One report."""

    id: str
    """`CXR` and a number; also used for patient and study, as the collection has no patient ids."""
    sections: Mapping[str, str]
    """findings, impression, indication, comparison; those without text are left out."""
    empty_sections: tuple[str, ...]
    mesh_major: tuple[str, ...]
    """Terms given by two readers, `Cardiomegaly/borderline`; `normal` for a normal image."""
    mesh_automatic: tuple[str, ...]
    """Terms assigned by a program."""
    images: tuple[OpeniImage, ...]


def iter_openi_reports(path: Path | str, *, folders: InputFolders = ANYWHERE) -> Iterator[OpeniReport]:
    """Yield the reports below a folder, sorted by file name, or in a `.tgz`, in its order, without unpacking to disk.

    Raises CorpusError when there is no report, a report is damaged, too large or has a document type (whose entities
    can expand a small file to gigabytes), or the archive contains links, paths outside it, or far too large files.
    """
    path = Path(path)
    count = 0
    for name, data in _archive_files(path, folders) if path.is_file() else _folder_files(path, folders):
        yield _parse(data, f"{path}: {name}")
        count += 1
    if not count:
        raise CorpusError(f"{path} has no XML reports: expected NLMCXR_reports.tgz, or the folder in it", "empty")


def _parse(data: bytes, where: str) -> OpeniReport:
    try:
        return _report(parse_xml(data))
    except ElementTree.ParseError as error:
        message = f"{where}, line {error.position[0]}: not well-formed XML: download it again"
        raise CorpusError(message, "malformed") from None
    except CorpusError as error:
        raise error.prefixed(f"{where} is not an Open-i report: ") from None
    except (ValueError, LookupError):
        raise CorpusError(f"{where} is not an Open-i report: unknown encoding", "unsupported") from None


def _report(root: ElementTree.Element) -> OpeniReport:
    id_element = root.find("uId")
    report_id = id_element.get("id", "") if id_element is not None else ""
    if not _ID.fullmatch(report_id):
        raise CorpusError("expected an id like CXR1 (uId)", "malformed", field="uId")
    sections: dict[str, str] = {}
    empty = []
    for element in root.iter("AbstractText"):
        name, text = element.get("Label", "").lower(), _text(element)
        if text:
            sections[name] = join_texts([sections.get(name, ""), text])
        else:
            empty.append(name)
    return OpeniReport(
        id=report_id,
        sections=sections,
        empty_sections=tuple(name for name in empty if name not in sections),
        mesh_major=_terms(root, "major"),
        mesh_automatic=_terms(root, "automatic"),
        images=tuple(_image(element) for element in root.iter("parentImage")),
    )


def _image(element: ElementTree.Element) -> OpeniImage:
    image_id = element.get("id", "")
    if not _IMAGE_ID.fullmatch(image_id):
        raise CorpusError("expected a file name as the id of an image (parentImage)", "malformed", field="parentImage")
    return OpeniImage(image_id, _text(element.find("caption")) or None)


def _terms(root: ElementTree.Element, kind: str) -> tuple[str, ...]:
    return tuple(filter(None, (_text(element) for element in root.iterfind(f"MeSH/{kind}"))))


def _text(element: ElementTree.Element | None) -> str:
    return "" if element is None else one_line(clean_text("".join(element.itertext())))


def _folder_files(folder: Path, folders: InputFolders) -> Iterator[tuple[str, bytes]]:
    if not folder.is_dir():
        raise CorpusError(f"{folder} does not exist: give NLMCXR_reports.tgz, or the folder in it", "not_found")
    paths = sorted(folder.rglob("*.xml"), key=lambda path: (len(path.name), path.name))  # 2.xml before 10.xml
    for path in paths:
        yield path.name, _read_bounded(path, folders)


def _archive_files(path: Path, folders: InputFolders) -> Iterator[tuple[str, bytes]]:
    try:
        with (
            folders.open(path, CorpusError) as file,
            gzip.GzipFile(fileobj=file) as unpacked,
            tarfile.open(fileobj=_Bounded(unpacked), mode="r|") as archive,
        ):
            for member in archive:
                name = PurePosixPath(member.name)
                if member.isdir():
                    continue
                if not member.isfile() or name.is_absolute() or ".." in name.parts:
                    raise CorpusError(f"{path} contains a link or an outside path: not NLMCXR_reports.tgz", "malformed")
                if member.size > MAX_XML_BYTES:
                    raise CorpusError(f"{path} has a file of {member.size} bytes: not NLMCXR_reports.tgz", "too_large")
                content = archive.extractfile(member)
                if name.suffix == ".xml" and content is not None:
                    yield name.name, content.read()
    except (tarfile.TarError, gzip.BadGzipFile, EOFError, OSError) as error:
        message = f"{path} is not a complete .tgz archive ({type(error).__name__}): download it again"
        raise CorpusError(message, "malformed") from error


class _Bounded(io.BufferedIOBase):
    """Stream for tarfile that limits the unpacked size, including headers."""

    def __init__(self, file: gzip.GzipFile) -> None:
        self._file = file
        self._left = MAX_ARCHIVE_BYTES

    def read(self, size: int | None = -1, /) -> bytes:
        """Return up to `size` unpacked bytes. Raises CorpusError beyond the limit and for an unknown size."""
        if size is None or not 0 <= size <= self._left:
            raise CorpusError("the archive is far larger than the collection: not NLMCXR_reports.tgz", "too_large")
        self._left -= size
        return self._file.read(size)


def _read_bounded(path: Path, folders: InputFolders) -> bytes:
    try:
        with folders.open(path, CorpusError) as file:
            return read_limited(file, MAX_XML_BYTES, CorpusError)
    except OSError as error:
        raise CorpusError(f"{path} cannot be read ({error.strerror})", "unreadable") from None
