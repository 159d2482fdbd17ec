"""The files of a folder that are read when it is opened: all at once where the folder is remote."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from medvl.data.storage import store
from medvl.data.storage.cache import Cache
from medvl.data.storage.location import Location, RemotePath

T = TypeVar("T")
R = TypeVar("R")


class FolderFiles:
    """Sizes and contents of the files of a folder. A remote folder is listed once."""

    def __init__(self, folder: Location, cache: Cache | None = None) -> None:
        self.folder, self.cache = folder, cache
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
        """Return the content of a remote file, compared with its hash, through the cache; None for a local one.

        Raises FileNotFoundError, StorageError.
        """
        if not isinstance(path, RemotePath):
            return None
        cache = self.cache or Cache.from_environment()
        return cache.read(sha256, path.read_bytes, name=str(path))
