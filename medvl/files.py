"""Files that are whole or not there, whatever kills the process that writes them."""

import errno
import hashlib
import os
from pathlib import Path


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fsync(path: Path) -> None:
    """Flush a file, or a folder's list of names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot flush a folder
            raise
    finally:
        os.close(descriptor)


def write_atomic(path: Path, content: str | bytes) -> Path:
    """Write a file under a temporary name, flush it to the disk and rename it: old or new, never half. Its path."""
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
