"""Reading images inside of larger files: members of tars, cells of Parquet files.

A `FilePart` says where the bytes are. It is plain data, so that it can be sent to the workers of a
conversion; each opens the files itself.
"""

import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from medvl.common.untrusted import ANYWHERE
from medvl.data.storage.location import RemotePath, locate
from medvl.data.storage.store import map_threads
from medvl.errors import ImageError
from medvl.schema import FilePart

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
