"""The local cache of remote files: bounded, verified, and shared by all processes of a machine.

A file enters under its sha256, after its bytes were compared with it, by one rename. A name is no
proof: the mark of a file in `verified/` records which file was compared (inode, size, times), and a
file that is not the marked one is compared again before its first use, and removed where it
differs. Marks count because the folder is private: one that others can write is closed to them and
all of its marks are dropped, and one of another user is not used.

The least recently used files make room for new ones; those used within the last minute stay, so
that a data set larger than the cache does not replace the same files over and over. Locks are
record locks of the operating system, so those of a killed process are gone, and its partial files
are removed by the next one.

    MEDVL_CACHE        folder; default ~/.cache/medvl/shards
    MEDVL_CACHE_SIZE   limit, such as 200GB; 0 for no cache; default 100 GB, at most half of the
                       free space
"""

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import logging
import os
import re
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Self

from medvl.common.files import (
    open_own,
    private_folder,
    sha256 as sha256_of,
    subfolder,
    write_atomic,
)
from medvl.errors import ConfigError, StorageError

PROTECTED = 60.0
"""Seconds after its last use for which a file is not replaced."""
_DEFAULT_LIMIT = 100 * 10**9
_TOUCH = 15.0
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_HASH = re.compile(r"[0-9a-f]{64}")
_MARKS = "verified"

_log = logging.getLogger(__name__)
_locks: dict[tuple[int, str], threading.Lock] = {}
"""Lock of each file of locks: record locks do not exclude threads of one process."""


def parse_bytes(text: str) -> int:
    """Return the number of bytes of `200GB`, `1.5 TB` or `1000`. Raises ConfigError."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)b?\s*", text.lower())
    if match is None:
        message = f"expected a size such as 200GB, got {text!r}; correct MEDVL_CACHE_SIZE"
        raise ConfigError(message, "malformed", field="MEDVL_CACHE_SIZE")
    return int(float(match[1]) * _UNITS[match[2]])


@dataclasses.dataclass(frozen=True, slots=True)
class CacheUse:
    """Content of a cache."""

    files: int
    bytes: int


class Cache:
    """A folder of files by sha256, with a limit of bytes.

    Args:
        folder: created on first use.
        limit: largest sum of sizes, files in progress included; 0 keeps nothing.
        protected: seconds after its last use for which a file is not replaced.
    """

    def __init__(self, folder: Path | str, limit: int, *, protected: float = PROTECTED) -> None:
        self.folder = Path(folder)
        self.limit = limit
        self.protected = protected
        self._touched: dict[str, float] = {}
        self._is_private = False

    @classmethod
    def from_environment(cls) -> Self:
        """Return the cache that MEDVL_CACHE and MEDVL_CACHE_SIZE describe."""
        folder = Path(os.environ.get("MEDVL_CACHE") or Path.home() / ".cache/medvl/shards")
        stated = os.environ.get("MEDVL_CACHE_SIZE")
        if stated:
            return cls(folder, parse_bytes(stated))
        parent = next(
            parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.is_dir()
        )
        used = sum(size for _, _, size in cls(folder, 0)._entries())
        return cls(folder, min(_DEFAULT_LIMIT, (shutil.disk_usage(parent).free + used) // 2))

    def find(self, sha256: str) -> Path | None:
        """Return the path of a file, and note its use; None if the cache does not have it, or
        has other bytes there.
        """
        path = self._path(sha256)
        now = time.time()
        if path.is_symlink() or not path.is_file() or not self._usable():
            return None
        if now - self._touched.get(sha256, 0.0) > _TOUCH:
            try:
                if not self._is_verified(path):
                    return None
                os.utime(self._mark(sha256), (now, now))
            except OSError:
                return None
            self._touched[sha256] = now
        return path

    def add(
        self,
        sha256: str,
        size: int,
        fetch: Callable[[], Iterable[bytes]],
        *,
        name: str,
        wait: bool = True,
    ) -> Path | None:
        """Return the path of a file, fetched if the cache does not have it; None if there is no
        room for it.

        Args:
            sha256: hash of the content.
            size: its bytes.
            fetch: returns the content in blocks.
            name: address of the file, for errors.
            wait: wait for another process or thread that fetches the same file; otherwise return
                None.

        Raises StorageError `mismatch` where the content has another size or hash: it does not enter
        the cache.
        """
        if size > self.limit:
            return None
        try:
            with self._lock(sha256[:16], wait=wait) as locked:
                entry = self.find(sha256)
                if entry is not None or not locked:
                    return entry
                partial = self._path(sha256).with_name(f"{sha256}.partial")
                partial.unlink(missing_ok=True)
                if not self._reserve(partial, size):
                    return None
                try:
                    self._fill(partial, sha256, size, fetch, name)
                    path = partial.replace(self._path(sha256))
                    write_atomic(self._mark(sha256), _identity(path), durable=False)
                    return path
                finally:
                    partial.unlink(missing_ok=True)
        except ConfigError as error:
            _warn_once(f"{error}; until then, shards are read without the cache")
            return None
        except OSError as error:
            if isinstance(error, FileNotFoundError) and error.filename == name:
                raise
            _warn_once(
                f"the cache {self.folder} cannot be used ({error.strerror}): shards are read "
                f"without it"
            )
            return None

    def read(self, sha256: str, fetch: Callable[[], bytes], *, name: str) -> bytes:
        """Return the content of a small file, fetched if the cache does not have it. Raises
        StorageError `mismatch`.
        """
        path = self.find(sha256)
        if path is not None:
            with contextlib.suppress(FileNotFoundError):  # removed by another process
                return path.read_bytes()
        data = fetch()
        if hashlib.sha256(data).hexdigest() != sha256:
            raise _differs(name, "another sha256 than its manifest")
        self.add(sha256, len(data), lambda: [data], name=name, wait=False)
        return data

    @contextlib.contextmanager
    def turn(self) -> Iterator[bool]:
        """Hold one of the two slots of this machine for fetching in the background. Yields
        whether one was free.
        """
        with self._lock("turn-0", wait=False) as first:
            if first:
                yield True
                return
            with self._lock("turn-1", wait=False) as second:
                yield second

    def use(self) -> CacheUse:
        """Return the number and size of the files."""
        entries = list(self._entries())
        return CacheUse(len(entries), sum(size for _, _, size in entries))

    def clear(self) -> CacheUse:
        """Remove every file that no process is fetching. Returns the removed number of files and
        bytes.
        """
        removed = self.use()
        for _, path, _ in self._entries():
            self._remove(path)
        self._touched.clear()
        return removed

    def make_private(self) -> Path:
        """Return the folder, created and closed to other users. Raises ConfigError where it is
        not this user's.
        """
        if not self._is_private:
            is_open = self.folder.is_dir() and stat.S_IMODE(self.folder.stat().st_mode) & 0o022
            private_folder(self.folder)
            if is_open:  # others may have written its marks
                shutil.rmtree(self.folder / _MARKS, ignore_errors=True)
            subfolder(self.folder, _MARKS)
            self._is_private = True
        return self.folder

    def _usable(self) -> bool:
        try:
            self.make_private()
        except (ConfigError, OSError) as error:
            _warn_once(f"{error}; until then, shards are read without the cache")
            return False
        return True

    def _mark(self, sha256: str) -> Path:
        return self.folder / _MARKS / sha256

    def _is_verified(self, path: Path) -> bool:
        """Return whether a file has the hash that its name states; remove it where it has not."""
        mark = self._mark(path.name)
        identity = _identity(path)
        if mark.is_file() and mark.read_text() == identity:
            return True
        if sha256_of(path) == path.name:
            write_atomic(mark, identity, durable=False)
            return True
        _log.warning(
            "%s has another content than its name states: it was damaged, or put there; removed",
            path,
        )
        self._remove(path)
        return False

    def _remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self._mark(path.name).unlink(missing_ok=True)

    def _path(self, sha256: str) -> Path:
        if not _HASH.fullmatch(sha256):
            raise StorageError(
                "a manifest has an entry that is not a sha256; convert the corpus again",
                "malformed",
            )
        return self.folder / sha256

    def _entries(self) -> Iterator[tuple[float, Path, int]]:
        """Yield (time of last use, path, size) of every file."""
        with contextlib.suppress(FileNotFoundError), os.scandir(self.folder) as entries:
            for entry in entries:
                if _HASH.fullmatch(entry.name):
                    with contextlib.suppress(FileNotFoundError):
                        found_file = entry.stat(follow_symlinks=False)
                        try:
                            used = self._mark(entry.name).stat().st_mtime
                        except FileNotFoundError:
                            used = found_file.st_mtime
                        yield used, Path(entry.path), found_file.st_size

    def _reserve(self, partial: Path, size: int) -> bool:
        """Create the partial file with its full size, after making room. Returns whether there
        is room.
        """
        with self._lock("cache"):
            reserved = sum(self._pending())
            entries = sorted(self._entries())
            total = reserved + sum(entry[2] for entry in entries)
            replaceable = [entry for entry in entries if time.time() - entry[0] > self.protected]
            if total - sum(entry[2] for entry in replaceable) + size > self.limit:
                return False
            for _, path, freed in replaceable:
                if total + size <= self.limit:
                    break
                self._remove(path)
                total -= freed
            with partial.open("xb") as file:
                file.truncate(size)
            return True

    def _pending(self) -> Iterator[int]:
        """Yield the sizes of files in progress; those of processes that were killed are removed."""
        for path in self.folder.glob("*.partial"):
            with self._lock(path.name[:16], wait=False) as is_abandoned:
                if is_abandoned:
                    path.unlink(missing_ok=True)
                    continue
            with contextlib.suppress(FileNotFoundError):
                yield path.stat().st_size

    def _fill(
        self, partial: Path, sha256: str, size: int, fetch: Callable[[], Iterable[bytes]], name: str
    ) -> None:
        written = 0
        content = hashlib.sha256()
        with partial.open("r+b") as file:
            for block in fetch():
                written += len(block)
                if written > size:
                    break
                content.update(block)
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        if written != size or content.hexdigest() != sha256:
            mismatch = (
                f"{written} bytes of {size}"
                if written != size
                else "another sha256 than its manifest"
            )
            raise _differs(name, mismatch)

    @contextlib.contextmanager
    def _lock(self, name: str, *, wait: bool = True) -> Iterator[bool]:
        """Exclude other processes and threads from a part of the cache. Yields whether the lock
        was taken.
        """
        self.make_private()
        folder = subfolder(self.folder, "locks")
        lock = _locks.setdefault((os.getpid(), str(folder / name)), threading.Lock())
        if not lock.acquire(blocking=wait):
            yield False
            return
        try:
            with open_own(folder / name) as file:
                try:
                    fcntl.lockf(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
                except OSError as error:
                    if wait or error.errno not in (errno.EACCES, errno.EAGAIN):
                        raise
                    yield False
                    return
                yield True
        finally:
            lock.release()


def _differs(name: str, mismatch: str) -> StorageError:
    message = (
        f"{name} has {mismatch}: it was replaced or damaged in the store; upload it again, "
        f"or convert again"
    )
    return StorageError(message, "mismatch")


def _identity(path: Path) -> str:
    """Return what identifies the bytes of a file: a new file has another inode, and a changed
    one another time.
    """
    info = path.lstat()
    return f"{info.st_dev} {info.st_ino} {info.st_size} {info.st_mtime_ns} {info.st_ctime_ns}\n"


_warned: set[str] = set()


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        _log.warning(message)
