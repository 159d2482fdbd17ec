"""Addresses of remote folders and files: `s3://bucket/mimic-cxr/train`, `https://host/roco/test`.

Wherever medvl takes a folder of shards it takes an address too, as a string or as the `Path` that a
command line converts it to (`Path("s3://bucket/x")` has one slash less, which is put back).
`locate` distinguishes the two.
"""

import contextlib
import fnmatch
import io
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple

from medvl.data.storage import store
from medvl.errors import ConfigError, StorageError

_SCHEME = re.compile(rf"({'|'.join(store.PACKAGES)}):/{{1,2}}(?=[^/])")
_FORBIDDEN = re.compile(r"[\x00-\x1f\x7f?#*\[\]{}\\<>|\"'`$;&]|(?:^|/)\.\.(?:/|$)")


class RemoteStat(NamedTuple):
    """Status of a remote file."""

    st_size: int


class RemotePath:
    """A remote file or folder, with the reading methods of `pathlib.Path` that medvl uses.

    Failed requests are repeated with growing pauses. Every method raises StorageError when the
    store cannot be reached or refuses access, and FileNotFoundError if there is nothing.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    def __str__(self) -> str:
        return self.url

    def __repr__(self) -> str:
        return f"RemotePath({self.url!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and other.url == self.url

    def __lt__(self, other: "RemotePath") -> bool:
        return self.url < other.url

    def __hash__(self) -> int:
        return hash(self.url)

    def __truediv__(self, name: str) -> "RemotePath":
        return RemotePath(f"{self.url}/{name}")

    @property
    def name(self) -> str:
        """Last part of the address."""
        return self.url.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """Suffix of the name, with its dot."""
        return PurePosixPath(self.name).suffix

    @property
    def parent(self) -> "RemotePath":
        """Address of the folder."""
        return RemotePath(self.url.rpartition("/")[0])

    @property
    def can_list(self) -> bool:
        """Whether the store lists its files; web servers do not."""
        return not self.url.startswith(("http://", "https://"))

    @property
    def can_write(self) -> bool:
        """Whether files can be uploaded, which web servers do not support."""
        return self.can_list

    def with_suffix(self, suffix: str) -> "RemotePath":
        """Return the address with another suffix."""
        return self.parent / PurePosixPath(self.name).with_suffix(suffix).name

    def read_bytes(self) -> bytes:
        """Return the content of a small file."""
        return store.read(self.url)

    def read_range(self, offset: int, size: int) -> bytes:
        """Return `size` bytes from `offset`. Raises StorageError `truncated` where the file ends
        before them.
        """
        return store.read(self.url, offset, size)

    def sends_ranges(self) -> bool:
        """Return whether the server sends parts of the file, after asking for one."""
        if self.stat().st_size > 1:
            self.read_range(0, 1)
        return store.sends_ranges(self.url)

    def download(self, target: Path) -> None:
        """Copy the file to a local one, which is partial where this raises."""
        size = self.stat().st_size
        with target.open("wb") as file:
            file.writelines(store.stream(self.url, size))

    def stat(self) -> RemoteStat:
        """Return the size."""
        return RemoteStat(store.size(self.url))

    def exists(self) -> bool:
        """Return whether there is a file of this address."""
        try:
            self.stat()
        except FileNotFoundError:
            return False
        return True

    def is_file(self) -> bool:
        """Return whether there is a file of this address."""
        return self.exists()

    def is_dir(self) -> bool:
        """Return whether there is a file below this address."""
        return self.can_list and bool(store.list_files(self.url))

    def sizes(self) -> dict[str, int]:
        """Return the size of every file below this folder by its path relative to it, of stores
        that list files.
        """
        return store.list_files(self.url) if self.can_list else {}

    def glob(self, pattern: str) -> Iterator["RemotePath"]:
        """Yield the files and folders whose relative path has the parts of `pattern`; none on
        web servers.
        """
        pattern_parts = pattern.split("/")
        names = set()
        for name in self.sizes():
            parts = name.split("/")[: len(pattern_parts)]
            if len(parts) == len(pattern_parts) and all(
                map(fnmatch.fnmatchcase, parts, pattern_parts)
            ):
                names.add("/".join(parts))
        yield from (self / name for name in sorted(names))

    def open(self, mode: str = "rb") -> BinaryIO:
        """Return a buffered stream of the content, read in blocks."""
        if mode != "rb":
            raise ValueError(f"expected mode 'rb', got {mode!r}")
        stream = io.BufferedReader(_BlockStream(self), buffer_size=store.BLOCK)
        stream.peek(1)
        if store.sends_ranges(self.url):
            return stream
        return io.BytesIO(b"".join(store.stream(self.url, self.stat().st_size)))


Location = Path | RemotePath
"""A local path or a remote one."""


@contextlib.contextmanager
def local_copy(folder: Location, names: Sequence[str]) -> Iterator[Path]:
    """Yield a folder with some files of `folder`: itself, or temporary copies of those that
    exist in the store.
    """
    if not isinstance(folder, RemotePath):
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="medvl-") as temporary:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                (folder / name).download(Path(temporary) / name)
        yield Path(temporary)


def is_address(location: Any) -> bool:
    """Return whether a string or path is the address of a remote folder."""
    return isinstance(location, RemotePath) or _SCHEME.match(str(location)) is not None


def locate(location: str | Path | RemotePath) -> Location:
    """Return the path, or the remote path if `location` is an address.

    Raises ConfigError where an address has credentials, a query or special characters. Addresses
    are stored in checkpoints and logs, so credentials come from the environment.
    """
    if isinstance(location, RemotePath):
        return location
    text = str(location)
    match = _SCHEME.match(text)
    if match is None:
        scheme, separator, _ = text.partition("://")
        if separator and scheme.isalpha():
            expected = ", ".join(f"{name}://" for name in store.PACKAGES)
            message = f"expected a folder or an address of {expected}, got one of {scheme}://"
            raise ConfigError(message, "unsupported", field="address")
        return Path(location)
    scheme = match[1]
    rest = text[match.end() :]
    has_user = scheme in ("http", "https") and "@" in rest.partition("/")[0]
    if has_user or _FORBIDDEN.search(rest):
        advice = (
            "without user, password, query or special characters (credentials come from "
            "the environment)"
        )
        message = (
            f"expected an address {advice}, got one of {scheme}://; see the guide on remote shards"
        )
        raise ConfigError(message, "malformed", field="address")
    return RemotePath(f"{scheme}://{rest}")


def require_local(location: str | Path | RemotePath, field: str) -> Path:
    """Return a local path. Raises ConfigError, naming `field`, where it is an address."""
    if is_address(location):
        message = f"expected a local folder, got the address {locate(location)}"
        raise ConfigError(message, "unsupported", field=field)
    return Path(str(location))


class _BlockStream(io.RawIOBase):
    """A remote file read from its start in blocks, each repeated on its own when it fails."""

    def __init__(self, path: RemotePath) -> None:
        self._path = path
        self._size = path.stat().st_size
        self._offset = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer and return the number of bytes; 0 at the end. Raises StorageError when
        the file is gone.
        """
        size = min(len(buffer), self._size - self._offset)
        if not size:
            return 0
        try:
            buffer[:size] = self._path.read_range(self._offset, size)
        except FileNotFoundError:
            raise StorageError(
                f"{self._path} was removed while it was read; start again", "mismatch"
            ) from None
        self._offset += size
        return size
