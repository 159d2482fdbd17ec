"""Atomic writes, hashes, and the marker of a complete checkpoint."""

import contextlib
import errno
import hashlib
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from medvl.common.untrusted import read_json
from medvl.errors import CheckpointError, ConfigError

MARKER = "complete.json"
"""File of a checkpoint that is written last: size and sha256 of all others."""


def sha256(path: Path) -> str:
    """Return the hex digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_marker(folder: Path, *, exclude: str | None = None) -> None:
    """Compare the files of a checkpoint with its marker, optionally without those of one subfolder.

    Raises CheckpointError that names the first file that differs.
    """
    marker = folder / MARKER
    try:
        recorded = read_json(marker, CheckpointError)["files"]
        for name, entry in recorded.items():
            path = folder / name
            if exclude is not None and name.startswith(f"{exclude}/"):
                continue
            if not path.is_file() or path.stat().st_size != entry["bytes"] or sha256(path) != entry["sha256"]:
                raise CheckpointError(f"{path} differs from {MARKER}: the checkpoint is damaged", "mismatch")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{marker} is damaged ({type(error).__name__})", "malformed") from error


def fsync(path: Path) -> None:
    """Flush a file, or the directory entries of a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot flush a folder
            raise
    finally:
        os.close(descriptor)


def follow_umask(path: Path) -> None:
    """Give a file the permissions of a newly created file; those of safetensors are readable by their owner only."""
    probe = temporary_name(path)
    with (
        contextlib.suppress(OSError),  # some network file systems have no permissions to change
        os.fdopen(_create(probe, 0o666)) as new,
        os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW)) as file,
    ):
        os.fchmod(file.fileno(), stat.S_IMODE(os.fstat(new.fileno()).st_mode))
    probe.unlink(missing_ok=True)


@contextlib.contextmanager
def new_file(path: Path, *, permissions: int = 0o666, durable: bool = True) -> Iterator[BinaryIO]:
    """Yield a file that is flushed and renamed to `path` on success, and removed on an error.

    The temporary name is random, and the file is created exclusively: a link that somebody has put into the folder is
    never followed. A link under the name `path` itself is replaced; the file that it points to keeps its content.

    Args:
        path: final name.
        permissions: mode of the file before the umask; 0o600 for files that only their owner may read.
        durable: wait until the disk has the content. Without it, a crash of the machine can leave an empty file.
    """
    temporary = temporary_name(path)
    with os.fdopen(_create(temporary, permissions), "w+b") as file:
        try:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def new_path(path: Path) -> Iterator[Path]:
    """Yield a temporary name for a library that writes a file by its name; then act as `new_file` does."""
    temporary = temporary_name(path)
    try:
        yield temporary
        follow_umask(temporary)
        fsync(temporary)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_atomic(path: Path, content: str | bytes, *, permissions: int = 0o666, durable: bool = True) -> Path:
    """Write a file by `new_file`, so that it is never partial and no link is followed; return its path."""
    with new_file(path, permissions=permissions, durable=durable) as file:
        file.write(content.encode() if isinstance(content, str) else content)
    return path


def open_own(path: Path, *, permissions: int = 0o666, buffering: int = -1) -> BinaryIO:
    """Open a file to read and append, created if it does not exist.

    Raises ConfigError where the name is a link, a second name of another file (a hard link), or no regular file:
    writing would change something outside of the folder.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, permissions)
    except OSError as error:
        # The two that O_NOFOLLOW gives for a link, a folder, and a pipe or device without a reader.
        if error.errno in (errno.ELOOP, errno.EMLINK, errno.EISDIR, errno.ENXIO, errno.ENODEV):
            raise _not_own(path) from None
        raise
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        os.close(descriptor)
        raise _not_own(path)
    return os.fdopen(descriptor, "a+b", buffering)


def _not_own(path: Path) -> ConfigError:
    advice = "remove it, or name another folder"
    return ConfigError(f"{path} is a link, or no regular file; {advice}", "not_a_file")


def temporary_name(path: Path) -> Path:
    """Return a name beside `path` that nobody can guess; `medvl.common.folders.sweep` removes files of such names."""
    # The start of the name says what the file is; a long one with the addition could be over the limit of 255 bytes.
    return path.with_name(f".{path.name[:40]}.{secrets.token_hex(8)}.partial")


def _create(path: Path, permissions: int) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, permissions)
