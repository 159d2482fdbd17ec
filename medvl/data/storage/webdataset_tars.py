"""Tars that other projects wrote for webdataset (`.jpg .txt .json`, no manifest), read by the webdataset library.

They are given by path or address, with webdataset's braces: `pmc/{00000..00042}.tar`. The library reads the members;
the bytes come from here, so that remote tars are read as shards are, no command is run (`pipe:` is refused), and
members that would fill the memory (sparse files, extended headers of gigabytes, compressed tars) never reach it.
"""

import dataclasses
import re
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from medvl.common.untrusted import parse_json
from medvl.data.storage.location import Location, RemotePath, is_address, locate
from medvl.data.storage.store import map_threads
from medvl.errors import ConfigError, MedvlError, ShardError

_MAX_TARS = 1_000_000
_MAX_MEMBER_BYTES, _MAX_EXTENDED_BYTES = 256 * 2**20, 2**20
_BLOCK, _PLAIN, _EXTENDED = 512, b"\x000157", b"xgLK"
"""Types of members: files, links, folders; extended headers. Links and folders have no content and are skipped."""
_RANGE = re.compile(r"\{([0-9]+)\.\.([0-9]+)\}")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TarFields:
    """Names of the members of a sample."""

    image: str = "jpg;jpeg;png"
    """Suffixes of the image, in order of preference."""
    text: str = "txt;json:caption"
    """Suffixes of the text; json:NAME takes a field of the JSON."""

    def image_of(self, members: Mapping[str, Any]) -> bytes | None:
        """Return the encoded image of a sample, None where it has none."""
        return next((members[name] for name in self.image.split(";") if name in members), None)

    def text_of(self, members: Mapping[str, Any]) -> str:
        """Return the text of a sample, empty where it has none. Raises ValueError where it cannot be read."""
        for name in self.text.split(";"):
            value = member_value(members, name)
            if value is not None and value.strip():
                return value.strip()
        return ""

    def suffixes(self, *others: str | None) -> set[str]:
        """Return the suffixes of the members to read; `others` are further members or fields."""
        names = [*self.image.split(";"), *self.text.split(";"), *(name for name in others if name)]
        return {name.partition(":")[0] for name in names}


def member_value(members: Mapping[str, Any], name: str) -> str | None:
    """Return the text of a member, or of a field of its JSON (`json:NAME`). Raises ValueError where it is damaged."""
    suffix, _, field = name.partition(":")
    if suffix not in members:
        return None
    if not field:
        return str(members[suffix].decode("utf-8-sig"))
    content = parse_json(members[suffix])
    value = content.get(field) if isinstance(content, dict) else None
    if isinstance(value, list | dict):
        raise ValueError("a list or an object is not a text")
    return None if value is None else str(value)


def is_tar_pattern(location: object) -> bool:
    """Return whether a setting names tars rather than a folder of shards."""
    return str(location).endswith(".tar")


def expand_tars(patterns: Sequence[str | Path]) -> list[Location]:
    """Return the tars that patterns with braces name, in order.

    Raises ConfigError for commands (`pipe:`), other schemes, more than a million names, and none.
    """
    import braceexpand  # webdataset's own

    found: list[Location] = []
    for pattern in map(str, patterns):
        if re.match(r"[A-Za-z][A-Za-z0-9+.-]*:|.*::", pattern) and not is_address(pattern):
            message = "expected tars by path or address (s3://, https://, ...); commands (pipe:) are never run"
            raise ConfigError(message, "unsupported", field="tars")
        names = 1
        for first, last in _RANGE.findall(pattern):
            names *= max(1, int(last) - int(first) + 1)
        if names > _MAX_TARS:
            raise ConfigError(f"expected at most {_MAX_TARS} tars, got {names}", "too_large", field="tars")
        found += [locate(name) for name in braceexpand.braceexpand(pattern)]
    if not found:
        raise ConfigError("expected one or more tars, got none", "missing", field="tars")
    return found


def read_tar(tar: Location, suffixes: set[str]) -> Iterator[dict[str, Any]]:
    """Yield the samples of a tar as webdataset groups them: `__key__`, and the bytes of each member by suffix.

    Raises ShardError where the tar is missing, damaged, compressed, or has a member over 256 MiB; StorageError.
    """
    from webdataset import tariterators

    def is_wanted(name: str) -> bool:
        return (tariterators.base_plus_ext(name)[1] or "").lower() in suffixes

    try:
        with tar.open("rb") as stream:
            checked = _CheckedStream(stream, str(tar))
            source = [{"url": str(tar), "stream": checked}]
            yield from tariterators.group_by_keys(tariterators.tar_file_expander(source, select_files=is_wanted))
            checked.require_end()
    except MedvlError as error:  # the library adds to the arguments of every error
        raise type(error)(str(error.args[0]), error.code, field=error.field) from None
    except FileNotFoundError:
        raise ShardError(f"{tar} does not exist", "not_found") from None
    except (tarfile.TarError, EOFError) as error:
        raise ShardError(
            f"{tar} is damaged or ends early ({type(error).__name__}); copy it again", "truncated"
        ) from None
    except ValueError as error:
        if type(error) is not ValueError:
            raise
        raise ShardError(f"{tar} has two members of one name; repack it", "malformed") from None
    except OSError as error:
        raise ShardError(f"cannot read {tar} ({error.strerror})", "unreadable") from None


class _CheckedStream:
    """Stream of a tar file that checks every header before the webdataset library sees it."""

    def __init__(self, stream: BinaryIO, where: str) -> None:
        self._stream, self._where = stream, where
        self._content, self._header = 0, b""  # bytes until the next header; the part of it that was seen
        self._extended: bytearray | None = None
        self._ended = False

    def require_end(self) -> None:
        """Raise ShardError unless the end of the archive was read: tarfile accepts a tar that ends after any member."""
        if not self._ended:
            raise self._refused("it ends early; copy it again", "truncated")

    def read(self, size: int) -> bytes:
        """Return up to `size` bytes of the tar file. Raises ShardError when a header among them is not allowed."""
        data = self._stream.read(size)
        place = 0
        while place < len(data):
            if self._content:
                step = min(self._content, len(data) - place)
                if self._extended is not None:
                    self._extended += data[place : place + step]
                self._content -= step
            else:
                if self._extended is not None:
                    self._check_extended()
                step = min(_BLOCK - len(self._header), len(data) - place)
                self._header += data[place : place + step]
                if len(self._header) == _BLOCK:
                    self._check_header()
                    self._header = b""
            place += step
        return data

    def _check_header(self) -> None:
        if not self._header.strip(b"\0"):
            self._ended = True
            return
        kind, digits = self._header[156:157], self._header[124:136].strip(b"\0 ")
        if not re.fullmatch(rb"[0-7]{1,12}", digits):
            raise self._refused("its header is damaged, or it is compressed: unpack it first", "malformed")
        size = int(digits, 8)
        if kind not in _PLAIN and kind not in _EXTENDED:
            raise self._refused("a member is not a regular file", "unsupported")
        if size > (_MAX_EXTENDED_BYTES if kind in _EXTENDED else _MAX_MEMBER_BYTES):
            raise self._refused(f"a member of {size} bytes is over the limit", "too_large")
        self._content = -(-size // _BLOCK) * _BLOCK if kind not in b"15" else 0
        self._extended = bytearray() if kind in b"xg" else None

    def _check_extended(self) -> None:
        assert self._extended is not None
        if b"GNU.sparse" in self._extended or re.search(rb"(?:^|\n)[0-9]+ size=", self._extended):
            raise self._refused("a member is a sparse file, or its size is hidden in an extended header", "unsupported")
        self._extended = None

    def _refused(self, problem: str, code: str) -> ShardError:
        return ShardError(f"{self._where}: {problem}", code)


def describe_tars(tars: Sequence[Location]) -> str:
    """Return the first and the last of some tars, for messages."""
    return str(tars[0]) if len(tars) == 1 else f"{tars[0]} ... {tars[-1]} ({len(tars)} tars)"


def check_tars(tars: Sequence[Location]) -> None:
    """Raise ShardError where a tar does not exist, StorageError where a store cannot be reached."""

    def exists(tar: Location) -> bool:
        return tar.exists()

    is_remote = any(isinstance(tar, RemotePath) for tar in tars)
    for tar, found in zip(tars, map_threads(exists, tars) if is_remote else map(exists, tars), strict=True):
        if not found:
            raise ShardError(f"{tar} does not exist", "not_found")
