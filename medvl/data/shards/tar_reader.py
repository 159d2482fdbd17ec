"""Reading the members of an untrusted tar in order and in bounded memory.

Only what shards contain is accepted: plain files with short names. Links, devices, sparse files and extended headers
are refused; Python's `tarfile` would load an extended header of gigabytes, expand sparse files and keep every member in
memory. Nothing is unpacked to disk.
"""

import re
import tarfile
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

from medvl.data.shards.format import IMAGE_SUFFIXES, MAX_MEMBER_BYTES, REGION_SUFFIX
from medvl.errors import ShardError

_NAME = re.compile(rf"[A-Za-z0-9_-]{{1,100}}\.(?:json|{'|'.join(IMAGE_SUFFIXES)}|{REGION_SUFFIX})")
_BLOCK = tarfile.BLOCKSIZE


class Readable(Protocol):
    """A byte stream: a file, a pipe or an HTTP response."""

    def read(self, size: int, /) -> bytes:
        """Return the next `size` bytes, fewer only at the end."""


class Member(NamedTuple):
    """One file of a tar."""

    name: str
    offset: int
    """Position of its first byte in the tar."""
    data: bytes


def read_members(stream: Readable, where: str) -> Iterator[Member]:
    """Yield the members of a tar from its start.

    Raises ShardError, naming `where`, at the first header that is damaged or does not belong to a sample's file, and
    where the tar is truncated. The members before it have been yielded.
    """
    offset = 0
    while True:
        block = _read(stream, _BLOCK, where)
        offset += _BLOCK
        if not block.strip(b"\0"):
            return
        header = _header(block, where)
        data = _read(stream, header.size, where)
        yield Member(header.name, offset, data)
        padding = -header.size % _BLOCK
        _read(stream, padding, where)
        offset += header.size + padding


def read_samples(stream: Readable, where: str) -> Iterator[dict[str, Any]]:
    """Yield the members of a tar grouped by sample: `__key__`, and the data of each member by suffix.

    Raises ShardError as `read_members` does.
    """
    sample: dict[str, Any] = {}
    for member in read_members(stream, where):
        key, _, suffix = member.name.rpartition(".")
        if sample and sample["__key__"] != key:
            yield sample
            sample = {}
        sample |= {"__key__": key, suffix: member.data}
    if sample:
        yield sample


def _header(block: bytes, where: str) -> tarfile.TarInfo:
    try:
        header = tarfile.TarInfo.frombuf(block, "ascii", "strict")
    except (tarfile.TarError, ValueError):
        raise ShardError(f"{where}: damaged tar header; copy it, or convert the corpus again", "malformed") from None
    if header.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or not 0 <= header.size <= MAX_MEMBER_BYTES:
        limit = f"a plain file of at most {MAX_MEMBER_BYTES >> 20} MiB"
        raise ShardError(f"{where}: a member is not {limit}; medvl did not write it", "unsupported")
    if not _NAME.fullmatch(header.name):
        raise ShardError(f"{where}: a member's name is not that of a sample; medvl did not write it", "unsupported")
    return header


def _read(stream: Readable, size: int, where: str) -> bytes:
    data = stream.read(size) if size else b""
    if len(data) != size:
        raise ShardError(f"{where}: unexpected end of the tar; copy it again, or check the network", "truncated")
    return data
