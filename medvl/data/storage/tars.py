"""Reading files inside of larger files: members of tars, by random access, and cells of Parquet
files.

Tars are memory-mapped where they are local, and read by ranges where they are remote. A remote
shard in the cache is read like a local one. From a shard that is not, only the required bytes are
requested, while a thread of this process fetches the complete shard into the cache (at most two
shards at a time on a machine). A process that reads the samples of a shard in order
fetches the shard first. So the first batch needs one round of requests, and later ones are read
from the disk. The bytes of a sample are the same in all cases.

A `FilePart` says where the bytes of an image are. It is plain data, so that it can be sent to the
workers of a conversion; each opens the files itself.
"""

import collections
import mmap
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from medvl.common.untrusted import ANYWHERE
from medvl.data.storage import store
from medvl.data.storage.cache import Cache
from medvl.data.storage.location import Location, RemotePath, locate
from medvl.data.storage.store import map_threads
from medvl.errors import ImageError, MedvlError, StorageError
from medvl.schema import FilePart

# Random access to the bytes of the tars of a folder.


class MappedTars:
    """Tars that are memory-mapped on first use in each process, so that this can be passed to
    loader workers.

    Mapping is eight times faster than positioned reads, and all workers of a machine share the
    pages.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = tuple(paths)
        self.__setstate__({"paths": self.paths})

    def __getstate__(self) -> dict[str, Any]:
        return {"paths": self.paths}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.paths = state["paths"]
        self._mapped: dict[int, _MappedTar] = {}
        self._lock = threading.Lock()

    def read(
        self, number: int, offset: int, size: int, span: tuple[int, int] | None = None
    ) -> bytes:
        """Return bytes of a tar; `span` is for remote ones. Raises EOFError where it ends before
        them, OSError.
        """
        tar = self._open(number)
        # Reading a mapped file past its end kills the process, so check that it was not truncated
        # after it was opened.
        if os.fstat(tar.descriptor).st_size < offset + size:
            raise EOFError(f"{self.paths[number]} is truncated")
        return tar.content[offset : offset + size]

    def _open(self, number: int) -> "_MappedTar":
        if number not in self._mapped:
            with self._lock:
                if number not in self._mapped:
                    self._mapped[number] = _MappedTar(self.paths[number])
        return self._mapped[number]


class _MappedTar:
    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self.descriptor = os.dup(file.fileno())
        self.content = mmap.mmap(self.descriptor, 0, access=mmap.ACCESS_READ)

    def __del__(self) -> None:
        if hasattr(self, "content"):
            self.content.close()
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


_RECENT = 64
_DENSE = 24
"""A shard that got 24 of the last 64 reads is read one sample after another."""
_KEPT_BYTES = 256 * 2**20
# seconds between notes of a file's use; between attempts to add to a full cache
_CHECK = 15.0
_PAUSE = 60.0


class TarEntry(Protocol):
    """Entry of a tar in a manifest."""

    @property
    def bytes(self) -> int:
        """Size of the file."""

    @property
    def sha256(self) -> str:
        """Hash of the file, in hexadecimal digits."""


class Tars(Protocol):
    """Tars by number."""

    @property
    def paths(self) -> Sequence[Location]:
        """Place of each tar, local or remote."""

    def read(
        self, number: int, offset: int, size: int, span: tuple[int, int] | None = None
    ) -> bytes:
        """Return bytes of a tar. `span`: offset and size of a part that is likely to be read
        next, including them.
        """


class RemoteTar(NamedTuple):
    """A remote tar."""

    path: RemotePath
    sha256: str
    bytes: int


def open_tars(
    paths: Sequence[Location], entries: Iterable[TarEntry], cache: Cache | None = None
) -> Tars:
    """Return the tars of a folder; remote ones use `cache`, by default the cache of the
    environment.
    """
    local = [path for path in paths if not isinstance(path, RemotePath)]
    if len(local) == len(paths):
        return MappedTars(local)
    remote = [
        RemoteTar(path, entry.sha256, entry.bytes)
        for path, entry in zip(paths, entries, strict=True)
        if isinstance(path, RemotePath)
    ]
    return RemoteTars(remote, cache or Cache.from_environment())


class RemoteTars:
    """Remote tars. Everything is opened on first use in each process, so this can be passed to
    loader workers.
    """

    def __init__(self, tars: Sequence[RemoteTar], cache: Cache) -> None:
        self.tars = tuple(tars)
        self.cache = cache
        self.paths = tuple(tar.path for tar in tars)
        self._state: _State | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"tars": self.tars, "cache": self.cache, "paths": self.paths, "_state": None}

    def read(
        self, number: int, offset: int, size: int, span: tuple[int, int] | None = None
    ) -> bytes:
        """Return bytes of a tar, requested together with those of `span`.

        Raises StorageError, and FileNotFoundError where the tar does not exist any more.
        """
        state = self._state
        if state is None or state.process != os.getpid():
            state = self._state = _State()
        if state.error is not None:
            raise state.error.prefixed("")  # a new object, so that tracebacks do not pile up
        tar = self._cached(state, number)
        if tar is not None:
            return tar.read(0, offset, size)
        start, length = span or (offset, size)
        part = state.part(number, start)
        if part is None:
            state.recent.append(number)
            if self._should_add(state, number) and self._add(state, number):
                return self.read(number, offset, size, span)
            part = self.tars[number].path.read_range(start, length)
            state.keep_part(number, start, part)
        return part[offset - start : offset - start + size]

    def _cached(self, state: "_State", number: int) -> MappedTars | None:
        """Return the tar if the cache has it; its use is noted now and then, so that it is not
        replaced.
        """
        tar, checked = state.mapped.get(number, (None, 0.0))
        now = time.monotonic()
        if tar is not None and now - checked < _CHECK:
            return tar
        path = self.cache.find(self.tars[number].sha256)
        if path is None:
            state.mapped.pop(number, None)  # a mapped file takes space even after it was removed
            return None
        tar = tar or MappedTars([path])
        state.mapped[number] = tar, now
        return tar

    def _should_add(self, state: "_State", number: int) -> bool:
        """Return whether to fetch a tar now. Otherwise it is fetched in the background."""
        if time.monotonic() < state.full_until or self.tars[number].bytes > self.cache.limit:
            return False
        if state.recent.count(number) >= _DENSE or not store.sends_ranges(
            self.tars[number].path.url
        ):
            return True
        if state.begin(number):
            threading.Thread(
                target=self._work, args=(state,), daemon=True, name="medvl-shards"
            ).start()
        return False

    def _add(self, state: "_State", number: int, threads: int = 4) -> bool:
        """Fetch a tar into the cache. Returns whether it is there; if not, the next attempts
        wait.
        """
        tar = self.tars[number]
        url = tar.path.url
        path = self.cache.add(
            tar.sha256, tar.bytes, lambda: store.stream(url, tar.bytes, threads), name=url
        )
        if path is None:
            state.full_until = time.monotonic() + _PAUSE
        return path is not None

    def _work(self, state: "_State") -> None:
        """Fetch the tars that are waiting, in a thread."""
        while True:
            number = state.waiting.get()
            try:
                while not self._add_in_turn(state, number):
                    time.sleep(0.2)
            except StorageError as error:
                if error.code == "mismatch":
                    state.error = error  # the next read raises it
                # other errors occur in the reads too, which repeat them
                state.full_until = time.monotonic() + _PAUSE
            except OSError:
                state.full_until = time.monotonic() + _PAUSE
            state.queued.discard(number)

    def _add_in_turn(self, state: "_State", number: int) -> bool:
        """Fetch a tar if few others are being fetched on this machine. Returns whether it is
        settled.
        """
        if time.monotonic() < state.full_until:
            return True
        with self.cache.turn() as is_mine:
            if is_mine:
                self._add(state, number, threads=1)
            return is_mine


class _State:
    """State of remote tars in this process."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.mapped: dict[int, tuple[MappedTars, float]] = {}
        self.recent: collections.deque[int] = collections.deque(maxlen=_RECENT)
        self.full_until = 0.0
        self.error: MedvlError | None = None
        self.waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.queued: set[int] = set()
        self._has_thread = False
        self._lock = threading.Lock()
        self._parts: collections.OrderedDict[tuple[int, int], bytes] = collections.OrderedDict()
        self._bytes = 0

    def begin(self, number: int) -> bool:
        """Queue a tar for fetching. Returns whether the thread that does so must be started."""
        with self._lock:
            if number not in self.queued:
                self.queued.add(number)
                self.waiting.put(number)
            is_first = not self._has_thread
            self._has_thread = True
            return is_first

    def part(self, number: int, start: int) -> bytes | None:
        """Return a part that was requested before."""
        return self._parts.get((number, start))

    def keep_part(self, number: int, start: int, data: bytes) -> None:
        """Keep a part: the image of a sample is usually read after its JSON, which is in the
        same part.
        """
        with self._lock:
            self._bytes += len(data) - len(self._parts.pop((number, start), b""))
            self._parts[number, start] = data
            while self._bytes > _KEPT_BYTES:
                self._bytes -= len(self._parts.popitem(last=False)[1])


# The files of a folder that are read when it is opened: all at once where the folder is remote.

T = TypeVar("T")
R = TypeVar("R")


class FolderFiles:
    """Sizes and contents of the files of a folder. A remote folder is listed once."""

    def __init__(self, folder: Location, cache: Cache | None = None) -> None:
        self.folder = folder
        self.cache = cache
        self._sizes = folder.sizes() if isinstance(folder, RemotePath) else {}

    def map(self, function: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
        """Yield `function(item)` of each item, in threads if the folder is remote."""
        is_remote = isinstance(self.folder, RemotePath)
        yield from store.map_threads(function, items) if is_remote else map(function, items)

    def size(self, path: Location) -> int:
        """Return the size of a file. Raises FileNotFoundError, StorageError."""
        known = self._sizes.get(path.name)
        return path.stat().st_size if known is None else known

    def verified(self, path: Location, sha256: str) -> bytes | None:
        """Return the content of a remote file, compared with its hash, through the cache; None for
        a local one.

        Raises FileNotFoundError, StorageError.
        """
        if not isinstance(path, RemotePath):
            return None
        cache = self.cache or Cache.from_environment()
        return cache.read(sha256, path.read_bytes, name=str(path))


Content = bytes | ImageError | OSError
"""The bytes of a part, or the error of reading it."""


def read_part(part: FilePart) -> bytes:
    """Return the bytes of an image.

    Raises:
        ImageError: the file ends before them, or they cannot be unpacked; the message names the
            file and the part.
        FileNotFoundError: the file does not exist.
        StorageError: a remote store cannot be reached.
    """
    content = read_parts([part])[part]
    if isinstance(content, Exception):
        raise content
    return content


def read_parts(parts: Iterable[FilePart]) -> dict[FilePart, Content]:
    """Return the content of each part. Files are read from start to end, and pages that parts
    share are unpacked once.

    Raises StorageError when a remote store cannot be reached.
    """
    contents: dict[FilePart, Content] = {}
    files: dict[str, dict[tuple[int, int], list[FilePart]]] = {}
    for part in parts:
        files.setdefault(part.file, {}).setdefault((part.offset, part.size), []).append(part)
    for file, places in sorted(files.items()):
        ordered = sorted(places)
        location = locate(file)
        ranges = (
            _remote_ranges(location, ordered)
            if isinstance(location, RemotePath)
            else _local_ranges(location, ordered)
        )
        for place, data in zip(ordered, ranges, strict=True):
            contents.update(_contents(places[place], data))
    return contents


def unpack(data: Any, codec: str, size: int) -> memoryview:
    """Return the content of a compressed page of `size` bytes. Raises ValueError where it is
    damaged.
    """
    import pyarrow

    if codec == "snappy" and _snappy_size(data) != size:  # pyarrow leaves the rest as it was
        raise ValueError("a page has another size than its header says")
    try:
        unpacked = pyarrow.decompress(data, decompressed_size=size, codec=codec)
        return memoryview(unpacked).cast("B")
    except MemoryError:  # an ArrowException, too
        raise
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"a page cannot be unpacked with {codec}") from error


def release(mapped: Any) -> None:
    """Give the memory of a mapped file back; what is read again comes from the file."""
    if isinstance(mapped, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):  # not everywhere
        mapped.madvise(mmap.MADV_DONTNEED)


def _snappy_size(data: Any) -> int:
    """Return the size that a snappy block states in its first bytes."""
    size = 0
    for place, byte in enumerate(bytes(data[:5])):
        size |= (byte & 127) << 7 * place
        if byte < 128:
            return size
    return -1


def _remote_ranges(
    location: RemotePath, places: Sequence[tuple[int, int]]
) -> Iterator[bytes | Exception]:
    def read(place: tuple[int, int]) -> bytes | Exception:
        try:
            return location.read_range(*place)
        except FileNotFoundError as error:
            return error

    return map_threads(read, places)


def _local_ranges(
    path: Path, places: Sequence[tuple[int, int]]
) -> Iterator[bytes | memoryview | Exception]:
    try:
        with ANYWHERE.open(path, ImageError) as file:
            size = os.fstat(file.fileno()).st_size
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else None
    except (ImageError, OSError) as error:
        yield from (error for _ in places)
        return
    for offset, length in places:
        if offset + length > size:
            yield ImageError(f"the file ends after {size} bytes; copy it again", "truncated")
        elif mapped is None or not length:
            yield b""
        else:
            yield memoryview(mapped)[offset : offset + length]
            release(mapped)


def _contents(
    parts: Sequence[FilePart], data: bytes | memoryview | Exception
) -> Iterator[tuple[FilePart, Content]]:
    """Yield the content of parts in one range of bytes, of the same page if it is packed."""
    pages: dict[tuple[str, int], memoryview] = {}
    for part in parts:
        try:
            yield part, _content(part, data, pages)
        except ImageError as error:
            yield part, error.prefixed(f"{part}: ")
        except OSError as error:
            yield part, error


def _content(
    part: FilePart, data: bytes | memoryview | Exception, pages: dict[tuple[str, int], memoryview]
) -> bytes:
    if isinstance(data, Exception):
        raise data
    try:
        if part.page is None:
            return bytes(data)
        codec, size, start, length = part.page
        if (codec, size) not in pages:
            pages[codec, size] = unpack(data, codec, size)
        return bytes(pages[codec, size][start : start + length])
    except ValueError as error:
        raise ImageError(str(error), "malformed") from error
    except MemoryError:
        raise ImageError("not enough memory to read the image", "too_large") from None
