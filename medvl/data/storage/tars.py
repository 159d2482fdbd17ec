"""Random access to the bytes of tars: memory-mapped where they are local, by ranges where they are
remote.

A remote shard in the cache is read like a local one. From a shard that is not, only the required
bytes are requested, while a thread of this process fetches the complete shard into the cache (at
most two shards at a time on a machine). A process that reads the samples of a shard in order
fetches the shard first. So the first batch needs one round of requests, and later ones are read
from the disk. The bytes of a sample are the same in all cases.
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

from medvl.data.storage import store
from medvl.data.storage.cache import Cache
from medvl.data.storage.location import Location, RemotePath
from medvl.errors import MedvlError, StorageError

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
        found, checked = state.mapped.get(number, (None, 0.0))
        now = time.monotonic()
        if found is not None and now - checked < _CHECK:
            return found
        path = self.cache.find(self.tars[number].sha256)
        if path is None:
            state.mapped.pop(number, None)  # a mapped file takes space even after it was removed
            return None
        found = found or MappedTars([path])
        state.mapped[number] = found, now
        return found

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
                state.full_until = (
                    time.monotonic() + _PAUSE
                )  # other errors occur in the reads too, which repeat them
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
