"""Atomic writes, hashes, and the marker of a complete checkpoint."""

import contextlib
import errno
import hashlib
import os
import stat
from pathlib import Path

from medvl.common.untrusted import parse_json
from medvl.errors import CheckpointError

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
        recorded = parse_json(marker.read_text())["files"]
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
    probe = path.with_name(f".{path.name}.mode")
    with contextlib.suppress(OSError):  # some network file systems have no permissions to change
        probe.touch()
        path.chmod(stat.S_IMODE(probe.stat().st_mode))
    probe.unlink(missing_ok=True)


def write_atomic(path: Path, content: str | bytes) -> Path:
    """Write a file under a temporary name, flush and rename it, so that it is never partial; return its path."""
    temporary = path.with_name(f".{path.name}.partial")
    data = content.encode() if isinstance(content, str) else content
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return path
