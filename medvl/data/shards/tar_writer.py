"""Writing tars whose bytes depend on their content alone."""

import contextlib
import hashlib
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from medvl.common.files import new_file

_BLOCK = tarfile.BLOCKSIZE


class TarWriter:
    """Tar with fixed member headers, so that equal content gives equal bytes.

    Attributes:
        offset: bytes written so far.
        hash: sha256 of them.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.offset = 0
        self.hash = hashlib.sha256()

    def member(self, name: str, data: bytes) -> tuple[int, int]:
        """Append a file. Returns the offset of its first byte, and its size."""
        header = tarfile.TarInfo(name)  # its defaults: owner 0, time 0, mode 0644
        header.size = len(data)
        self._write(header.tobuf(tarfile.USTAR_FORMAT))
        place = (self.offset, len(data))
        self._write(data)
        self._write(bytes(-len(data) % _BLOCK))
        return place

    def close(self) -> None:
        """Write the end of the archive."""
        self._write(bytes(2 * _BLOCK))

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self.hash.update(data)
        self.offset += len(data)


@contextlib.contextmanager
def new_tar(path: Path) -> Iterator[TarWriter]:
    """Yield the writer of a tar that is complete, flushed and renamed to `path` at the end of the block.

    No partial tar is left on an error. Write the index inside the block: a tar under its name then has one.
    """
    with new_file(path) as file:
        yield TarWriter(file)
