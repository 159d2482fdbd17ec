"""Values of a column of bytes in a Parquet file, with their places in it, page by page.

pyarrow decodes all rows of a page at once, and does not tell where a value is. So pages are walked
here: a file is mapped, so that pages without compression take no memory, and others take that of
one page. Format: https://github.com/apache/parquet-format (Encodings.md, parquet.thrift).
"""

import collections
import dataclasses
import mmap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from medvl.common.untrusted import ANYWHERE
from medvl.data.storage.tars import release, unpack
from medvl.errors import CorpusError
from medvl.schema import PackedPage

_DATA, _INDEX, _DICTIONARY, _DATA_V2 = range(4)  # types of pages
_PLAIN = 0
_DICTIONARY_ENCODINGS = (2, 8)
_DELTA_LENGTHS = 6
_LIST, _STRUCT = 9, 12
_MAX_DEPTH = 8
_FREE_VALUES = 1 << 17
"""Values that any file may have in a column; a larger file, one for each of its bytes."""
_PAGE_VALUES = 1 << 21
_ROW_VALUES = 1 << 14
"""Values that a page, and a list of a row, may have."""
_VALUE_BYTES = 1 << 28
_FOOTER_BYTES = 1 << 26
"""Bytes that a value, and the footer of a file, may have."""


class PageSizeError(ValueError):
    """A compressed page or a value is larger than the limit."""


_CODECS = {0: None, 1: "snappy", 2: "gzip", 4: "brotli", 5: "lz4_raw", 6: "zstd", 7: "lz4_raw"}
"""Compression of a column -> its name. 5 had another form, which few files have."""


class Chunk(NamedTuple):
    """A column of a group of rows, as the footer of the file states it."""

    path: tuple[str, ...]
    """Name of the column, and of the fields that it is in."""
    codec: int
    values: int
    unpacked: int
    size: int
    """Bytes without and with compression."""
    start: int
    """Place of its first page."""
    is_outside: bool
    """Whether it is in another file."""


class Group(NamedTuple):
    """A group of rows."""

    rows: int
    chunks: list[Chunk]


def map_file(file: BinaryIO) -> memoryview:
    """Return the content of an open file, which is read when it is used."""
    return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def read_groups(file: memoryview) -> Iterator[Group]:
    """Yield the groups of rows of a Parquet file. pyarrow's own metadata end the process where the
    footer is damaged.

    Raises ValueError where it is damaged.
    """
    size = int.from_bytes(file[-8:-4], "little")
    if not 0 < size <= min(len(file) - 8, _FOOTER_BYTES):
        raise ValueError("its footer is damaged")
    reader = _Compact(file[-8 - size : -8])
    for name, kind in reader.fields():
        if name == 4 and kind == _LIST:
            for _ in range(reader.items()):
                yield _group(reader.struct())
        else:
            reader.value(kind, keep=False)


def _group(fields: dict[int, Any]) -> Group:
    chunks = fields.get(1)
    if not isinstance(chunks, list):
        raise ValueError("its footer is damaged")
    return Group(_integer(fields, 3), list(map(_chunk, chunks)))


def _chunk(fields: Any) -> Chunk:
    column: Any = fields.get(3) if isinstance(fields, dict) else None
    path = column.get(3) if isinstance(column, dict) else None
    if not (isinstance(path, list) and path and all(isinstance(x, memoryview) for x in path)):
        raise ValueError("its footer is damaged")
    starts = [_integer(column, name) for name in (9, 11) if name in column]
    return Chunk(
        tuple(bytes(part).decode(errors="replace") for part in path),
        _integer(column, 4),
        _integer(column, 5),
        _integer(column, 6),
        _integer(column, 7),
        min(filter(None, starts), default=0),
        bool(fields.get(1)),
    )


class Value(NamedTuple):
    """A value and its place in the file: `size` bytes from `offset`, or the place in a page."""

    content: bytes | memoryview
    offset: int
    size: int
    page: PackedPage | None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ByteColumn:
    """A column of bytes of an open Parquet file."""

    file: memoryview
    """Its content."""
    index: int
    """Number of the column among those of the lowest level."""
    levels: tuple[int, int]
    """Highest repetition and definition level."""
    page_bytes: int
    """Bytes that a compressed page may have when it is unpacked."""

    @classmethod
    def find(cls, path: Path, name: str, page_bytes: int) -> "ByteColumn":
        """Return the column of images `name` of a file: bytes, a struct with `bytes`, or a list of
        either. The file is mapped as long as the column is used.

        Raises ValueError if there is no such column; OSError, CorpusError and pyarrow's errors
        where the file cannot be read.
        """
        import pyarrow.parquet

        with ANYWHERE.open(path, CorpusError) as file:
            mapped = map_file(file)
            opened = pyarrow.parquet.ParquetFile(file, pre_buffer=False)
            kind = opened.schema_arrow.field(name).type
            schema = opened.schema
        indices = [
            index for index in range(len(schema)) if _holds_bytes(schema.column(index), name, kind)
        ]
        if len(indices) != 1:
            raise ValueError(f"the bytes of {name} are not found")
        leaf = schema.column(indices[0])
        levels = leaf.max_repetition_level, leaf.max_definition_level
        return cls(file=mapped, index=indices[0], levels=levels, page_bytes=page_bytes)

    def rows(self) -> Iterator[list[Value | None]]:
        """Yield the values of each row, None for those that are missing: one for each entry of a
        list, and one for a missing or an empty list.

        Raises ValueError where the file is damaged, too large, or written in a form that is not
        read; its message says which.
        """
        allowed = max(_FREE_VALUES, len(self.file))
        for group in read_groups(self.file):
            if self.index >= len(group.chunks):
                raise ValueError("a group has too few columns")
            chunk = group.chunks[self.index]
            numbers = chunk.values, group.rows
            if min(numbers) < 0 or max(numbers) > allowed:
                raise ValueError(f"it says that a column has {max(numbers)} values")
            if chunk.is_outside:
                raise ValueError("a column is in another file")
            allowed -= chunk.values
            yield from self._rows_of(chunk, group.rows)
            release(self.file.obj)

    def _rows_of(self, chunk: Chunk, rows: int) -> Iterator[list[Value | None]]:
        row: list[Value | None] = []
        count = 0
        for starts_row, value in _Pages(self, chunk).values():
            if starts_row and count:
                yield row
                row = []
            count += starts_row
            if not count or count > rows:
                raise ValueError(f"expected {rows} rows in a group, got another number")
            if len(row) >= _ROW_VALUES:
                raise ValueError(f"a list has more than {_ROW_VALUES} values")
            # A copy, so that the page is not kept until the next row is read.
            row.append(value and value._replace(content=bytes(value.content)))
        if count != rows:
            raise ValueError(f"expected {rows} rows in a group, got {count}")
        if count:
            yield row


def _holds_bytes(leaf: Any, name: str, kind: Any) -> bool:
    """Return whether a column of the lowest level has the bytes of the column `name`."""
    from pyarrow import types

    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    is_struct = types.is_struct(kind.value_type if is_list else kind)
    parts = f"{leaf.path}.".removeprefix(f"{name}.").split(".")[:-1]
    if f"{leaf.path}.".startswith(f"{name}.") and leaf.physical_type == "BYTE_ARRAY":
        depths = (1, 2) if is_list else (0,)  # lists of old writers have one level less
        return len(parts) - is_struct in depths and (not is_struct or parts[-1] == "bytes")
    return False


class _Header(NamedTuple):
    """Header of a page, of which `body` are the compressed bytes from `offset`."""

    kind: int
    unpacked: int
    offset: int
    size: int
    values: int
    encoding: int
    level_encodings: tuple[int, int]
    """Encodings of the levels before the values of a page of version 1."""
    level_bytes: tuple[int, int]
    """Sizes of the repetition and definition levels of a page of version 2, which are not
    compressed.
    """
    is_packed: bool


class _Pages:
    """The pages of a column in a group of rows."""

    def __init__(self, column: ByteColumn, chunk: Chunk) -> None:
        self.file = column.file
        self.page_bytes = column.page_bytes
        self.max_repetition, self.max_definition = column.levels
        if chunk.codec not in _CODECS:
            raise ValueError(f"compression {chunk.codec} is not read")
        self.codec = _CODECS[chunk.codec]
        self.remaining = chunk.values
        self.position = chunk.start
        self.end = chunk.start + chunk.size
        self.dictionary: Sequence[Value] = ()
        if chunk.values and not 0 < self.position <= self.end <= len(self.file):
            raise ValueError("a column is outside of the file")

    def values(self) -> Iterator[tuple[bool, Value | None]]:
        """Yield (whether it begins a row, value)."""
        while self.remaining:
            if self.position >= self.end:
                raise ValueError(f"{self.remaining} values of a column are missing")
            header = self._header()
            self.position = header.offset + header.size
            if header.kind == _DICTIONARY:
                if header.encoding not in (_PLAIN, 2):
                    raise ValueError(f"encoding {header.encoding} of a dictionary is not read")
                body, page = self._body(header, 0)
                self.dictionary = list(self._plain(body, 0, header.values, header, page))
            elif header.kind in (_DATA, _DATA_V2):
                if header.values > self.remaining:
                    raise ValueError(f"a page says that it has {header.values} values")
                self.remaining -= header.values
                yield from self._data(header)
            elif header.kind != _INDEX:
                raise ValueError(f"a page has the unknown type {header.kind}")

    def _header(self) -> _Header:
        reader = _Compact(self.file[self.position : self.end])
        fields = reader.struct()
        kind = _integer(fields, 1)
        name = {_DATA: 5, _DICTIONARY: 7, _DATA_V2: 8}.get(kind)
        inner = fields.get(name, {}) if name is not None else {}
        if not isinstance(inner, dict):
            raise ValueError("a header is damaged")
        offset = self.position + reader.position
        size = _integer(fields, 3)
        unpacked = _integer(fields, 2)
        if not 0 <= size <= self.end - offset or unpacked < 0:
            raise ValueError("a page ends after its column")
        is_second = kind == _DATA_V2
        values = _integer(inner, 1)
        if not 0 <= values <= _PAGE_VALUES:
            raise ValueError(f"a page says that it has {values} values")
        levels = (_integer(inner, 6), _integer(inner, 5)) if is_second else (0, 0)
        return _Header(
            kind,
            unpacked,
            offset,
            size,
            values,
            _integer(inner, 4 if is_second else 2),
            (0, 0) if is_second else (_integer(inner, 4, 3), _integer(inner, 3, 3)),
            levels,
            self.codec is not None and bool(inner.get(7, True) if is_second else True),
        )

    def _body(self, header: _Header, skipped: int) -> tuple[memoryview, PackedPage | None]:
        """Return the content of a page from `skipped` bytes on, and its place if it is packed."""
        if not 0 <= skipped <= min(header.size, header.unpacked):
            raise ValueError("the levels of a page are longer than the page")
        body = self.file[header.offset + skipped : header.offset + header.size]
        size = header.unpacked - skipped
        if not size:  # a page without values, of which a codec may have written a byte
            return body[:0], None
        if not header.is_packed:
            if len(body) != size:
                raise ValueError("a page has another size than its header says")
            return body, None
        if size > self.page_bytes:
            limit = f"at most {self.page_bytes >> 20} MB in a compressed page"
            raise PageSizeError(f"expected {limit}, got {size >> 20} MB")
        codec = str(self.codec)
        return unpack(body, codec, size), PackedPage(codec, size, 0, 0)

    def _data(self, header: _Header) -> Iterator[tuple[bool, Value | None]]:
        count = header.values
        repetition, definition = header.level_bytes
        levels = repetition + definition
        body, page = self._body(header, levels)
        if header.kind == _DATA_V2:
            first = self.file[header.offset : header.offset + levels]
            repeated_N = _levels(first[:repetition], self.max_repetition, count)
            defined_N = _levels(first[repetition:], self.max_definition, count)
            start = 0
        else:
            highest = self.max_repetition, self.max_definition
            if any(
                most and encoding != 3
                for most, encoding in zip(highest, header.level_encodings, strict=True)
            ):
                raise ValueError("levels that are not run-length encoded are not read")
            start, repeated_N = _sized_levels(body, 0, self.max_repetition, count)
            start, defined_N = _sized_levels(body, start, self.max_definition, count)
        present_N = defined_N == self.max_definition
        number = int(present_N.sum())
        header = header._replace(offset=header.offset + levels, size=header.size - levels)
        values = self._encoded(body, start, number, header, page)
        starts_N = repeated_N == 0
        for starts_row, present in zip(starts_N.tolist(), present_N.tolist(), strict=True):
            if not present:
                yield starts_row, None
                continue
            yield starts_row, next(values)

    def _encoded(
        self,
        body: memoryview,
        start: int,
        count: int,
        header: _Header,
        page: PackedPage | None,
    ) -> Iterator[Value]:
        if header.encoding == _PLAIN:
            yield from self._plain(body, start, count, header, page)
        elif header.encoding in _DICTIONARY_ENCODINGS:
            if not count:
                return
            if start >= len(body):
                raise ValueError("a page ends before its values")
            for index in _hybrid(body[start + 1 :], body[start], count).tolist():
                if index >= len(self.dictionary):
                    raise ValueError("a value is not in the dictionary of its column")
                yield self.dictionary[index]
        elif header.encoding == _DELTA_LENGTHS:
            lengths_N, start = _deltas(body, start, count)
            for length in lengths_N.tolist():
                yield self._value(body, start, length, header, page)
                start += length
        else:
            message = f"encoding {header.encoding} of bytes is not read; write them as PLAIN"
            raise ValueError(message)

    def _plain(
        self, body: memoryview, start: int, count: int, header: _Header, page: PackedPage | None
    ) -> Iterator[Value]:
        for _ in range(count):
            if start + 4 > len(body):
                raise ValueError("a page has fewer values than its header says")
            length = int.from_bytes(body[start : start + 4], "little")
            yield self._value(body, start + 4, length, header, page)
            start += 4 + length

    def _value(
        self, body: memoryview, start: int, length: int, header: _Header, page: PackedPage | None
    ) -> Value:
        if not 0 <= length <= len(body) - start:
            raise ValueError("a value is longer than its page")
        if length > _VALUE_BYTES:
            limit = f"at most {_VALUE_BYTES >> 20} MB in a value"
            raise PageSizeError(f"expected {limit}, got {length >> 20} MB")
        content = body[start : start + length]
        if page is None:
            return Value(content, header.offset + start, length, None)
        return Value(content, header.offset, header.size, page._replace(start=start, size=length))


class _Compact:
    """Reader of thrift's compact protocol."""

    def __init__(self, data: memoryview) -> None:
        self.data = data
        self.position = 0

    def fields(self) -> Iterator[tuple[int, int]]:
        """Yield number and type of the fields of a struct; the caller reads their values."""
        name = 0
        while head := self._byte():
            name = name + (head >> 4) if head >> 4 else self._integer()
            yield name, head & 15

    def struct(self, depth: int = 0, *, keep: bool = True) -> dict[int, Any]:
        """Read a struct: field -> number, truth, bytes, list or struct; empty without `keep`."""
        values = {}
        for name, kind in self.fields():
            value = kind == 1 if kind in (1, 2) else self.value(kind, depth, keep=keep)
            if keep:
                values[name] = value
        return values

    def items(self) -> int:
        """Return the number of structs in a list. Raises ValueError for other lists."""
        count, kind = self._list()
        if kind != _STRUCT:
            raise ValueError("a header is damaged")
        return count

    def value(self, kind: int, depth: int = 0, *, keep: bool = True) -> Any:
        """Read a value."""
        if depth > _MAX_DEPTH:
            raise ValueError("a header is nested too deep")
        if kind in (1, 2, 3):  # truth values of lists; a byte
            return self._byte()
        if kind in (4, 5, 6):
            return self._integer()
        if kind == 7:
            return self._bytes(8)
        if kind == 8:
            return self._bytes(self._varint())
        if kind in (_LIST, _LIST + 1):
            count, entry = self._list()
            values = (self.value(entry, depth + 1, keep=keep) for _ in range(count))
            return list(values) if keep else collections.deque(values, maxlen=0)
        if kind == _STRUCT:
            return self.struct(depth + 1, keep=keep)
        raise ValueError("a header is damaged")

    def _list(self) -> tuple[int, int]:
        head = self._byte()
        return (self._varint() if head >> 4 == 15 else head >> 4), head & 15

    def _byte(self) -> int:
        if self.position >= len(self.data):
            raise ValueError("a header ends early")
        self.position += 1
        return self.data[self.position - 1]

    def _varint(self) -> int:
        value, self.position = _varint(self.data, self.position)
        return value

    def _integer(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)

    def _bytes(self, size: int) -> memoryview:
        if size > len(self.data) - self.position:
            raise ValueError("a header ends early")
        self.position += size
        return self.data[self.position - size : self.position]


def _integer(fields: dict[int, Any], name: int, default: int = 0) -> int:
    value = fields.get(name, default)
    if not isinstance(value, int):
        raise ValueError("a header is damaged")
    return value


def _varint(data: memoryview, position: int) -> tuple[int, int]:
    """Return an unsigned number of at most 64 bits, and the position after it."""
    value = 0
    for shift in range(0, 70, 7):
        if position >= len(data):
            raise ValueError("a page ends within a number")
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
    raise ValueError("a number of a page has more than 64 bits")


def _sized_levels(body: memoryview, start: int, highest: int, count: int) -> tuple[int, np.ndarray]:
    """Return the position after levels that begin with their size, and the levels."""
    if not highest:
        return start, np.zeros(count, np.int64)
    first = start + 4
    size = int.from_bytes(body[start:first], "little")
    if first + size > len(body):
        raise ValueError("the levels of a page are longer than the page")
    return first + size, _levels(body[first : first + size], highest, count)


def _levels(data: memoryview, highest: int, count: int) -> np.ndarray:
    if not highest:
        return np.zeros(count, np.int64)
    return _hybrid(data, highest.bit_length(), count)


def _hybrid(data: memoryview, width: int, count: int) -> np.ndarray:
    """Return `count` numbers of `width` bits in runs of equal and of packed numbers."""
    if width > 32:
        raise ValueError(f"numbers of {width} bits are not read")
    numbers_N = np.empty(count, np.int64)
    offset = 0
    position = 0
    while offset < count:
        head, position = _varint(data, position)
        if head & 1:
            size = (head >> 1) * width
            taken = min((head >> 1) * 8, count - offset)
            needed = -(-taken * width // 8)  # the last bytes of a page may be left out
            packed = data[position : position + size]
            if len(packed) < needed:
                raise ValueError("a page ends within its numbers")
            numbers_N[offset : offset + taken] = _unpack_bits(packed[:needed], width, taken)
            position += size
        else:
            size = -(-width // 8)
            taken = min(head >> 1, count - offset)
            if position + size > len(data):
                raise ValueError("a page ends within its numbers")
            value = int.from_bytes(data[position : position + size], "little")
            numbers_N[offset : offset + taken] = value
            position += size
        if not taken:
            raise ValueError("a run of a page is empty")
        offset += taken
    return numbers_N


def _unpack_bits(data: memoryview, width: int, count: int) -> np.ndarray:
    """Return `count` numbers of `width` bits, least significant bit first."""
    if not width:
        return np.zeros(count, np.int64)
    bits_N = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")[: count * width]
    bits_NW = bits_N.reshape(count, width).astype(np.int64)
    return bits_NW @ (1 << np.arange(width, dtype=np.int64))


def _deltas(body: memoryview, position: int, count: int) -> tuple[np.ndarray, int]:
    """Return `count` numbers that are packed as differences, and the position after them."""

    def signed(position: int) -> tuple[int, int]:
        value, position = _varint(body, position)
        return (value >> 1) ^ -(value & 1), position

    block, position = _varint(body, position)
    parts, position = _varint(body, position)
    stated, position = _varint(body, position)
    value, position = signed(position)
    if stated != count or not 0 < parts <= block <= 1 << 16 or block % parts:
        raise ValueError("the lengths of a page are damaged")
    numbers = [value] if count else []
    while len(numbers) < count:
        least, position = signed(position)
        widths = bytes(body[position : position + parts])
        position += parts
        for width in widths:
            if len(numbers) >= count:
                break
            size = block // parts * width // 8
            if width > 32 or position + size > len(body):
                raise ValueError("the lengths of a page are damaged")
            deltas_N = _unpack_bits(body[position : position + size], width, block // parts)
            for delta in deltas_N.tolist():
                value += least + delta
                numbers.append(value)
            position += size
        if len(widths) < parts:
            raise ValueError("the lengths of a page are damaged")
    lengths = numbers[:count]
    if any(not 0 <= length <= len(body) for length in lengths):
        raise ValueError("a value is longer than its page")
    return np.array(lengths, np.int64), position
