"""Reading of untrusted files: regular files inside the folders that the user named, JSON and XML
of limited size.
"""

import codecs
import collections
import contextlib
import dataclasses
import io
import json
import lzma
import math
import os
import pickletools
import re
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO, Self
from xml.etree import ElementTree

from medvl.errors import ConfigError, CorpusError, MedvlError

MAX_JSON_DEPTH = 64
"""Largest nesting of JSON; the deepest file that medvl reads has seven levels."""
MAX_JSON_BYTES = 1 << 26
"""Largest JSON file that `read_json` takes unless its caller gives another limit."""

_FIELD_NAME = re.compile(r"[A-Za-z_][A-Za-z_. -]{0,39}")
"""Keys that messages may quote: those with digits can be identifiers of patients."""
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


@dataclasses.dataclass(frozen=True, slots=True)
class InputFolders:
    """Folders whose files may be read. Without any, links may lead anywhere."""

    real: tuple[str, ...] = ()
    """Real paths, each with a separator at its end."""

    @classmethod
    def of(cls, *folders: Path | str, follow_links: bool = False) -> Self:
        """Return the folders with their links resolved; with `follow_links`, files outside of them
        may be read too.

        Raises ConfigError when a path is invalid: too long, a loop of links, or with a NUL.
        """
        real = tuple(dict.fromkeys(map(_real_folder, folders)))
        return cls(() if follow_links else real)

    @classmethod
    def holding(cls, files: Iterable[Path | None]) -> Self:
        """Return the folder that contains all these files by their names, before links are
        followed.
        """
        folders = {path.absolute().parent for path in files if path is not None}
        return cls.of(os.path.commonpath(folders)) if folders else cls()

    def open(self, path: Path | str, kind: type[MedvlError]) -> BinaryIO:
        """Open a regular file whose real path is inside one of the folders.

        Raises FileNotFoundError when it does not exist, and `kind` with the code "outside_folder"
        (a link that leads out of the folders), "not_a_file" (a folder, pipe, device or socket),
        "unreadable", or "malformed" (the path cannot be that of a file).
        """
        try:
            real = os.path.realpath(path)
            if self.real and not real.startswith(self.real):
                advice = (
                    "copy the file there, or convert with --follow-links if you trust all links"
                )
                raise kind(
                    f"{path} is a link out of {' and '.join(self.real)}; {advice}", "outside_folder"
                )
            file = io.BufferedReader(io.FileIO(real, opener=_open_at_once))
        except FileNotFoundError as error:
            raise FileNotFoundError(error.errno, error.strerror, str(path)) from None
        except IsADirectoryError:
            raise kind(f"{path} is a folder; expected a file", "not_a_file") from None
        except OSError as error:
            raise kind(f"{path} cannot be read ({error.strerror})", "unreadable") from None
        except ValueError:  # a NUL, or a lone surrogate
            raise kind(
                f"{str(path)!a} cannot be the path of a file; correct the table", "malformed"
            ) from None
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            file.close()
            raise kind(f"{path} is a pipe, device or socket; expected a file", "not_a_file")
        return file


ZIP_ERRORS = (
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    EOFError,
    NotImplementedError,
    OSError,
    OverflowError,
    RuntimeError,
    ValueError,
    struct.error,
)
"""What `zipfile` raises for archives that are damaged, encrypted (RuntimeError), or of an unknown
version or compression.
"""

ANYWHERE = InputFolders()
"""Any regular file: for files that the user names."""


def read_limited(file: BinaryIO, limit: int, kind: type[MedvlError]) -> bytes:
    """Return the content of an open regular file. Raises `kind` with the code "too_large" above
    `limit` bytes.
    """
    size = os.fstat(file.fileno()).st_size
    if size > limit:
        raise kind(f"{file.name} has {size} bytes, over the limit of {limit}", "too_large")
    return file.read(size)


def decode_text(data: bytes) -> str:
    """Return a text in UTF-8, or in UTF-16 with a byte-order mark. Raises UnicodeDecodeError for
    other encodings.
    """
    is_utf16 = data[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    return data.decode("utf-16" if is_utf16 else "utf-8-sig")


class DuplicateKeyError(ValueError):
    """An object of a JSON text has the same key twice, so that one of the values would be lost."""


class NonFiniteNumberError(ValueError):
    """A JSON text has NaN, Infinity, or a number beyond the range of float64."""


def parse_json(data: str | bytes, *, nan: bool = False) -> Any:
    """Parse JSON in UTF-8, with or without a byte-order mark; with `nan`, the bare word NaN is a
    missing number, as programs with pandas write it.

    Raises ValueError when it is damaged, nested deeper than `MAX_JSON_DEPTH`, repeats a key of an
    object, has a number that is not finite, or half of a surrogate pair, which cannot be written or
    tokenized.
    """
    text = data.removeprefix("\ufeff") if isinstance(data, str) else data.decode("utf-8-sig")
    try:
        value = json.loads(
            text,
            object_pairs_hook=_unique_keys,
            parse_float=_finite_number,
            parse_constant=_nan_alone if nan else _refuse_constant,
        )
    except RecursionError:
        raise ValueError(f"nested deeper than {MAX_JSON_DEPTH} levels") from None
    if text.count("[") + text.count("{") > MAX_JSON_DEPTH and isinstance(value, list | dict):
        _check_depth(value)
    if _SURROGATE.search(text):
        json.dumps(value, ensure_ascii=False).encode()  # a UnicodeEncodeError is a ValueError
    return value


def read_json(path: Path, kind: type[MedvlError], *, limit: int = MAX_JSON_BYTES) -> Any:
    """Read a JSON file of at most `limit` bytes with `parse_json`.

    Raises FileNotFoundError when it does not exist, and `kind` with the codes of
    `InputFolders.open`, "too_large" or "malformed".
    """
    data = read_file(path, limit, kind)
    try:
        return parse_json(data)
    except ValueError as error:
        raise kind(
            f"{path} is not JSON that medvl reads ({error}): correct it or copy it again",
            "malformed",
        ) from None


def read_file(path: Path, limit: int, kind: type[MedvlError]) -> bytes:
    """Return the content of a regular file of at most `limit` bytes. Raises as `read_json`."""
    with ANYWHERE.open(path, kind) as file:
        return read_limited(file, limit, kind)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        duplicate = collections.Counter(key for key, _ in pairs).most_common(1)[0][0]
        name = f"the key {duplicate!r}" if _FIELD_NAME.fullmatch(duplicate) else "a key"
        raise DuplicateKeyError(f"an object has {name} twice")
    return value


def _finite_number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise NonFiniteNumberError("a number is beyond the range of float64")
    return value


def _nan_alone(name: str) -> float:
    if name != "NaN":
        _refuse_constant(name)
    return math.nan


def _refuse_constant(name: str) -> None:
    raise NonFiniteNumberError(f"{name} is no number of JSON; write null for a missing value")


class _PlainTreeBuilder(ElementTree.TreeBuilder):
    """Tree builder that refuses document types."""

    def doctype(self, name: str, pubid: str | None, system: str | None) -> None:
        raise CorpusError("a document type is not allowed", "unsupported")


def parse_xml(data: bytes) -> ElementTree.Element:
    """Parse XML without a document type, and therefore without entities.

    Raises ElementTree.ParseError when it is not well-formed, CorpusError for a document type.
    """
    root: ElementTree.Element = ElementTree.fromstring(
        data, ElementTree.XMLParser(target=_PlainTreeBuilder())
    )
    return root


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_JSON_DEPTH):
        children = (
            child for part in level for child in (part.values() if isinstance(part, dict) else part)
        )
        level = [child for child in children if isinstance(child, list | dict)]
        if not level:
            return
    raise ValueError(f"nested deeper than {MAX_JSON_DEPTH} levels")


def _real_folder(folder: Path | str) -> str:
    try:
        # readers name what is missing
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            Path(folder).stat()
    except (OSError, ValueError):
        raise ConfigError(
            f"{str(folder)!a} cannot be read as a folder; name another one", "unreadable"
        ) from None
    return os.path.realpath(folder).rstrip(os.sep) + os.sep


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # opening a pipe would wait for its writer


# Interpreter for pickles of plain data, which runs nothing.
#
# A pickle is a program: unpickling an untrusted file executes untrusted code. `pickletools` lists
# the instructions of such a file without executing any; the few that build lists, dictionaries,
# texts and numbers are interpreted here, and any other one is an error. Checkpoints of torch are
# read by a subclass (`medvl.encoders.torch_files`).

_MARK = object()
_TEXTS = ("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "UNICODE")
_NUMBERS = ("BININT", "BININT1", "BININT2", "INT", "LONG", "LONG1", "LONG4", "BINFLOAT", "FLOAT")
_VALUES = frozenset((*_TEXTS, *_NUMBERS))
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY = {"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_TUPLE": tuple}
_PUTS = frozenset(["PUT", "BINPUT", "LONG_BINPUT"])
_GETS = frozenset(["GET", "BINGET", "LONG_BINGET"])
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def _checked(value: Any) -> Any:
    """Return a text or a number. Raises ValueError for half of a surrogate pair, and for an
    integer over 1024 bits.
    """
    if isinstance(value, str):
        value.encode()
    elif isinstance(value, int) and value.bit_length() > 1024:
        raise ValueError("an integer over 1024 bits")
    return value


class PickleReader:
    """Interpreter for the pickle instructions that build plain data; subclasses handle more in
    `handle_opcode`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stack: list[Any] = []
        self.memo: dict[str, Any] = {}  # protocol 0 uses text keys, the others numbers

    def read(self, data: bytes | BinaryIO) -> Any:
        """Return the object that the pickle builds; a file is left behind the pickle's end.

        Raises CorpusError for instructions that are not supported. A damaged pickle raises
        ValueError, IndexError, KeyError, TypeError or AttributeError.
        """
        for opcode, argument, _ in pickletools.genops(data):
            name = opcode.name
            if name == "STOP":
                return self.stack.pop()
            if name in ("PROTO", "FRAME"):
                continue
            if name in _VALUES:
                self.stack.append(_checked(argument))
            elif name in _CONSTANTS:
                self.stack.append(_CONSTANTS[name])
            elif name in _EMPTY:
                self.stack.append(_EMPTY[name]())
            elif name in _PUTS:
                self.memo[str(argument)] = self.stack[-1]
            elif name in _GETS:
                self.stack.append(self.memo[str(argument)])
            elif not self._build(name):
                self.handle_opcode(name, argument)
        raise ValueError("no STOP")

    def handle_opcode(self, name: str, argument: Any) -> None:
        """Raise CorpusError: the instruction does not build plain data."""
        advice = "a pickle can run any program. Get the file from its publisher, or as JSON"
        raise CorpusError(
            f"{self.path} is not read, as it contains {name}: {advice}", "unsupported"
        )

    def pop_to_mark(self) -> list[Any]:
        """Remove and return the items above the last mark, and remove the mark."""
        start = len(self.stack) - 1 - self.stack[::-1].index(_MARK)
        items = self.stack[start + 1 :]
        del self.stack[start:]
        return items

    def _build(self, name: str) -> bool:
        """Execute an instruction that combines plain values; return False for any other
        instruction.
        """
        if name == "MARK":
            self.stack.append(_MARK)
        elif name == "MEMOIZE":
            self.memo[str(len(self.memo))] = self.stack[-1]
        elif name in ("APPEND", "APPENDS"):
            items = [self.stack.pop()] if name == "APPEND" else self.pop_to_mark()
            self.stack[-1].extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            items = (
                [self.stack.pop(-2), self.stack.pop()] if name == "SETITEM" else self.pop_to_mark()
            )
            self.stack[-1].update(zip(items[::2], items[1::2], strict=True))
        elif name in ("LIST", "TUPLE", "DICT"):
            items = self.pop_to_mark()
            pairs = dict(zip(items[::2], items[1::2], strict=True)) if name == "DICT" else None
            self.stack.append(
                pairs if pairs is not None else items if name == "LIST" else tuple(items)
            )
        elif name in _TUPLES:
            count = _TUPLES[name]
            self.stack[-count:] = [tuple(self.stack[-count:])]
        else:
            return False
        return True
