"""Reading of untrusted files: regular files inside the folders that the user named, JSON and XML of limited size."""

import contextlib
import dataclasses
import io
import json
import os
import re
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO, Self
from xml.etree import ElementTree

from medvl.errors import ConfigError, CorpusError, MedvlError

MAX_JSON_DEPTH = 64
"""Largest nesting of JSON; the deepest file that medvl reads has seven levels."""

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


@dataclasses.dataclass(frozen=True, slots=True)
class InputFolders:
    """Folders whose files may be read. Without any, links may lead anywhere."""

    real: tuple[str, ...] = ()
    """Real paths, each with a separator at its end."""

    @classmethod
    def of(cls, *folders: Path | str, follow_links: bool = False) -> Self:
        """Return the folders with their links resolved; with `follow_links`, files outside of them may be read too.

        Raises ConfigError when a path is invalid: too long, a loop of links, or with a NUL.
        """
        real = tuple(dict.fromkeys(map(_real_folder, folders)))
        return cls(() if follow_links else real)

    @classmethod
    def holding(cls, files: Iterable[Path | None]) -> Self:
        """Return the folder that contains all these files by their names, before links are followed."""
        folders = {path.absolute().parent for path in files if path is not None}
        return cls.of(os.path.commonpath(folders)) if folders else cls()

    def open(self, path: Path | str, kind: type[MedvlError]) -> BinaryIO:
        """Open a regular file whose real path is inside one of the folders.

        Raises FileNotFoundError when it does not exist, and `kind` with the code "outside_folder" (a link that leads
        out of the folders), "not_a_file" (a folder, pipe, device or socket), "unreadable", or "malformed" (the path
        cannot be that of a file).
        """
        try:
            real = os.path.realpath(path)
            if self.real and not real.startswith(self.real):
                advice = "copy the file there, or convert with --follow-links if you trust all links"
                raise kind(f"{path} is a link out of {' and '.join(self.real)}; {advice}", "outside_folder")
            file = io.BufferedReader(io.FileIO(real, opener=_open_at_once))
        except FileNotFoundError as error:
            raise FileNotFoundError(error.errno, error.strerror, str(path)) from None
        except IsADirectoryError:
            raise kind(f"{path} is a folder; expected a file", "not_a_file") from None
        except OSError as error:
            raise kind(f"{path} cannot be read ({error.strerror})", "unreadable") from None
        except ValueError:  # a NUL, or a lone surrogate
            raise kind(f"{str(path)!a} cannot be the path of a file; correct the table", "malformed") from None
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            file.close()
            raise kind(f"{path} is a pipe, device or socket; expected a file", "not_a_file")
        return file


ANYWHERE = InputFolders()
"""Any regular file: for files that the user names."""


def read_limited(file: BinaryIO, limit: int, kind: type[MedvlError]) -> bytes:
    """Return the content of an open regular file. Raises `kind` with the code "too_large" above `limit` bytes."""
    size = os.fstat(file.fileno()).st_size
    if size > limit:
        raise kind(f"{file.name} has {size} bytes, over the limit of {limit}", "too_large")
    return file.read(size)


def parse_json(data: str | bytes, object_pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """Parse JSON in UTF-8.

    Raises ValueError when it is damaged, nested deeper than `MAX_JSON_DEPTH`, or has half of a surrogate pair, which
    cannot be written or tokenized.
    """
    text = data if isinstance(data, str) else data.decode("utf-8-sig")
    try:
        value = json.loads(text, object_pairs_hook=object_pairs_hook)
    except RecursionError:
        raise ValueError(f"nested deeper than {MAX_JSON_DEPTH} levels") from None
    if text.count("[") + text.count("{") > MAX_JSON_DEPTH and isinstance(value, list | dict):
        _check_depth(value)
    if _SURROGATE.search(text):
        json.dumps(value, ensure_ascii=False).encode()  # a UnicodeEncodeError is a ValueError
    return value


class _PlainTreeBuilder(ElementTree.TreeBuilder):
    """Tree builder that refuses document types."""

    def doctype(self, name: str, pubid: str | None, system: str | None) -> None:
        raise CorpusError("a document type is not allowed", "unsupported")


def parse_xml(data: bytes) -> ElementTree.Element:
    """Parse XML without a document type, and therefore without entities.

    Raises ElementTree.ParseError when it is not well-formed, CorpusError for a document type.
    """
    root: ElementTree.Element = ElementTree.fromstring(data, ElementTree.XMLParser(target=_PlainTreeBuilder()))
    return root


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_JSON_DEPTH):
        children = (child for part in level for child in (part.values() if isinstance(part, dict) else part))
        level = [child for child in children if isinstance(child, list | dict)]
        if not level:
            return
    raise ValueError(f"nested deeper than {MAX_JSON_DEPTH} levels")


def _real_folder(folder: Path | str) -> str:
    try:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # readers name what is missing
            Path(folder).stat()
    except (OSError, ValueError):
        raise ConfigError(f"{str(folder)!a} cannot be read as a folder; name another one", "unreadable") from None
    return os.path.realpath(folder).rstrip(os.sep) + os.sep


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # opening a pipe would wait for its writer
