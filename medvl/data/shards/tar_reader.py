"""Members of a shard's tar, one after the other, in bounded memory, whoever wrote it.

Shards hold plain files with short names, so nothing else is read: no links, devices or sparse files, no extended
headers. Python's `tarfile` would read an extended header of gigabytes whole, write out the zeros of a sparse file and
remember a million members. Nothing is ever unpacked to the disk.
"""

import re
import tarfile
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

from medvl.data.shards.format import IMAGE_SUFFIXES, MAX_MEMBER_BYTES
from medvl.errors import ShardError

_NAME = re.compile(rf"[A-Za-z0-9_-]{{1,100}}\.(?:json|{'|'.join(IMAGE_SUFFIXES)})")
_BLOCK = tarfile.BLOCKSIZE


class Readable(Protocol):
    """A file, a pipe, an answer of a server."""

    def read(self, size: int, /) -> bytes:
        """The next `size` bytes; fewer only at the end."""


class Member(NamedTuple):
    """One file of a tar."""

    name: str
    offset: int
    """Of its first byte, from the start of the tar."""
    data: bytes


def members(stream: Readable, where: str) -> Iterator[Member]:
    """The members of a tar that is read from its start.

    Raises ShardError, naming `where`, at the first header that is damaged or is not that of a sample's file, and where
    the tar ends too early. What comes before has been yielded by then.
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
        rest = -header.size % _BLOCK
        _read(stream, rest, where)
        offset += header.size + rest


def samples(stream: Readable, where: str) -> Iterator[dict[str, Any]]:
    """The members of a tar by sample: `__key__`, and the bytes of each member by its suffix. Raises as `members`."""
    sample: dict[str, Any] = {}
    for member in members(stream, where):
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
        raise ShardError(f"{where} has a damaged header: copy it again, or make the shards again") from None
    if header.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or not 0 <= header.size <= MAX_MEMBER_BYTES:
        raise ShardError(f"{where} holds what is no plain file of a sane size: medvl did not write it, it is not read")
    if not _NAME.fullmatch(header.name):
        raise ShardError(f"{where} holds a name that no sample has: medvl did not write it, it is not read")
    return header


def _read(stream: Readable, size: int, where: str) -> bytes:
    data = stream.read(size) if size else b""
    if len(data) != size:
        raise ShardError(f"{where} broke off: copy it again, or check network and access")
    return data
