"""DICOM file structure, parsed within limits; elements that could identify a patient stay unread.

pydicom reads a whole header before it can be checked: it inflates deflated files without a limit,
keeps every element, recurses as deep as sequences nest, and quotes header values in its warnings.
Therefore the elements are walked here: most are skipped, and those in `Tag` are read on demand.
The pixels are decoded by pydicom and its plugins (`medvl.data.dicom.pixels`).
Encodings: DICOM PS3.5 chapter 7 and annex A; files: PS3.10 chapter 7.
"""

import dataclasses
import io
import math
import re
import struct
import zlib
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

from medvl.data.dicom.tags import USUAL_VRS, Tag
from medvl.errors import DicomError

# Numbers and code words of header values, as other programs write them.
#
# A value is read where its meaning is certain: blanks, NUL bytes, signs and exponents, binary
# numbers in another VR than the standard's, an empty last value (`-1024\`), and a decimal comma.
# A comma is a decimal comma if the value has one comma, no point, and digits on both sides that
# cannot be a group of thousands: `0,5` and `0,500` are 0.5, `1,000` is refused. `0.14,0.15` is a
# list of two numbers. Everything else raises ValueError; nothing is guessed.

_BINARY = {"US": "H", "SS": "h", "UL": "L", "SL": "l", "UV": "Q", "SV": "q", "FL": "f", "FD": "d"}
_UNTYPED = ("", "UN", "OB", "OW", "OL")  # VRs that say nothing about the value
_NUMBER = re.compile(rb"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?")
_DECIMAL_COMMA = re.compile(rb"[+-]?\d+,\d+(?:[eE][+-]?\d+)?")
_THOUSANDS = re.compile(rb"[+-]?[1-9]\d{0,2},\d{3}")
_LONGEST = 64  # four times the longest of the standard
_BLANKS = b" \0\t\r\n"
_NOT_IN_CODES = re.compile(r"[^A-Z0-9]")


def parse_numbers(data: bytes, vr: str, usual_vr: str, endian: str) -> list[float | None]:
    """Return the numbers of an element, None for an empty value.

    Args:
        data: the stored bytes.
        vr: the value representation in the file; "" with implicit VR.
        usual_vr: the one of the standard, for files that do not state it.
        endian: byte order as a prefix for `struct`.

    Raises ValueError for anything that is not certainly a number.
    """
    if vr in _UNTYPED:
        # A word that is written as a long has zeros in its upper half.
        is_long = usual_vr == "US" and len(data) == 4 and data[2:] == b"\0\0" and endian == "<"
        vr = "UL" if is_long else usual_vr
    if vr not in _BINARY:
        return [number for part in data.split(b"\\") for number in _parse_text(part.strip(_BLANKS))]
    size = struct.calcsize(f"{endian}{_BINARY[vr]}")
    if len(data) % size:
        raise ValueError("the length does not fit the VR")
    return list(struct.unpack(f"{endian}{len(data) // size}{_BINARY[vr]}", data))


def _parse_text(part: bytes) -> list[float | None]:
    """Return the number of one value; two or more where it is a list with commas between numbers
    with points.
    """
    if not part:
        return [None]
    if len(part) > _LONGEST:
        raise ValueError("too long for a number")
    if _NUMBER.fullmatch(part):
        return [float(part)]
    if _DECIMAL_COMMA.fullmatch(part) and not _THOUSANDS.fullmatch(part):
        return [float(part.replace(b",", b"."))]
    pieces = [piece.strip(_BLANKS) for piece in part.split(b",")]
    if all(b"." in piece and _NUMBER.fullmatch(piece) for piece in pieces):
        return [float(piece) for piece in pieces]
    raise ValueError("not a number")


def only(numbers: list[float | None]) -> float | None:
    """Return the one number of an element; None if it has none. Raises ValueError for different
    or infinite ones.
    """
    present = {number for number in numbers if number is not None}
    if not present:
        return None
    if len(present) > 1 or not all(map(math.isfinite, present)):
        raise ValueError("several numbers, or not a finite one")
    return present.pop()


def parse_code(data: bytes) -> str | None:
    """Return the letters and digits of a code word in capitals: ` Linear_Exact\\0` is LINEAREXACT;
    None if empty.

    Raises ValueError for several different words and for bytes that are not ASCII.
    """
    parts = {
        _NOT_IN_CODES.sub("", part.strip(_BLANKS).decode("ascii").upper())
        for part in data.split(b"\\")
    }
    parts.discard("")
    if len(parts) > 1:
        raise ValueError("several code words")
    return parts.pop() if parts else None


_KNOWN_TAGS = frozenset(Tag)
UNDEFINED = 0xFFFFFFFF
_ITEM = 0xFFFEE000
_ITEM_END = 0xFFFEE00D
_SEQUENCE_END = 0xFFFEE0DD
_PIXELS = {
    0x7FE00010: "PixelData",
    0x7FE00008: "FloatPixelData",
    0x7FE00009: "DoubleFloatPixelData",
}

IMPLICIT_LITTLE = "1.2.840.10008.1.2"
EXPLICIT_LITTLE = "1.2.840.10008.1.2.1"
DEFLATED = "1.2.840.10008.1.2.1.99"
EXPLICIT_BIG = "1.2.840.10008.1.2.2"

_LONG_VRS = frozenset(
    (b"OB", b"OD", b"OF", b"OL", b"OV", b"OW", b"SQ", b"SV", b"UC", b"UN", b"UR", b"UT", b"UV")
)
_SHORT_VRS = frozenset(
    # with a length of two bytes
    b"AE AS AT CS DA DS DT FD FL IS LO LT PN SH SL SS ST TM UI UL US".split()
)
_MAX_DEPTH = 32
_TRUNCATED_HEADER = "the file ends within its header: copy it again"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DicomLimits:
    """Limits for untrusted files. With the defaults, no file takes over 512 MB, or a second to
    be rejected.
    """

    file_bytes: int = 4 << 30
    """Size of the file. Only the requested frame of a large multi-frame file is read."""
    elements: int = 100_000
    """Elements, including those in sequences, and fragments of compressed pixel data."""
    value_bytes: int = 2 << 20
    """Longest header value that is read; look-up tables and frame offsets have up to 200 kB."""
    inflated_bytes: int = 80 << 20
    """Inflated size of a file in the deflated transfer syntax."""
    frames: int = 20_000
    frame_bytes: int = 64 << 20
    """Decoded size of a frame: rows x columns x samples x bytes. The default is 32 megapixels of
    16 bits.
    """
    encoded_bytes: int = 48 << 20
    """Compressed size of a frame."""


class Encoding(NamedTuple):
    """Encoding of elements."""

    implicit: bool
    little: bool

    @property
    def endian(self) -> str:
        """Byte order as a prefix for `struct`."""
        return "<" if self.little else ">"


class Location(NamedTuple):
    """Location of an element's value in the file."""

    vr: str
    """Value representation; "" with implicit VR."""
    offset: int
    length: int
    """`UNDEFINED` for sequences and compressed pixel data that end with a delimiter."""


class BoundedStream(io.BufferedIOBase):
    """A readable file, also for pydicom's decoders, that raises DicomError when reads or bytes
    exceed the limits.
    """

    def __init__(self, file: BinaryIO, limits: DicomLimits) -> None:
        self._file = file
        self.limits = limits
        self.size = file.seek(0, io.SEEK_END)
        self._position = file.seek(0)
        # a header and a value, or the two halves of a long header
        self._reads_left = 2 * limits.elements
        self._bytes_left = 0
        self.limit_reads(8 * limits.value_bytes)

    def limit_reads(self, size: int) -> None:
        """Set the number of bytes that may be read from now on."""
        self._bytes_left = size

    def read(self, size: int | None = -1, /) -> bytes:
        """Read up to `size` bytes; fewer only at the end of the file."""
        self._reads_left -= 1
        if self._reads_left < 0:
            raise DicomError(
                f"more than {self.limits.elements} elements or fragments",
                "too_large",
                field="elements",
            )
        rest = max(0, self.size - self._position)
        size = rest if size is None or size < 0 else min(size, rest)
        if size > self._bytes_left:
            raise DicomError("more data to read than DicomLimits allows", "too_large")
        self._bytes_left -= size
        data = self._file.read(size)
        self._position += len(data)
        return data

    def read_exactly(self, size: int) -> bytes:
        """Read exactly `size` bytes. Raises DicomError when the file ends first."""
        data = self.read(size)
        if len(data) < size:
            raise DicomError(_TRUNCATED_HEADER, "truncated")
        return data

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Move to a position."""
        self._position = self._file.seek(offset, whence)
        return self._position

    def tell(self) -> int:
        """Return the position in bytes."""
        return self._position


def damaged(tag: Tag, reason: str = "is damaged or has no certain meaning") -> DicomError:
    """Return the error for a header value. It names the element, never its value."""
    from pydicom.datadict import keyword_for_tag  # takes half a second

    keyword = keyword_for_tag(int(tag))
    message = (
        f"{keyword} ({tag >> 16:04X},{tag & 0xFFFF:04X}) {reason}; correct it, or leave "
        f"the file out"
    )
    return DicomError(message, "malformed", field=keyword)


class Elements:
    """The elements of a dataset that are in `Tag`. Values are read on demand."""

    def __init__(
        self, stream: BoundedStream, encoding: Encoding, locations: dict[int, Location]
    ) -> None:
        self._stream = stream
        self._locations = locations
        self.encoding = encoding

    def vr(self, tag: int) -> str | None:
        """Return the value representation: "" with implicit VR, None when the element is absent."""
        return self._locations[tag].vr if tag in self._locations else None

    def raw(self, tag: int) -> bytes | None:
        """Return the stored value; None when it is absent or empty."""
        location = self._locations.get(tag)
        if location is None or not location.length:
            return None
        if location.length > self._stream.limits.value_bytes:
            message = (
                f"element ({tag >> 16:04X},{tag & 0xFFFF:04X}) has {location.length} "
                f"bytes, over the limit"
            )
            raise DicomError(message, "too_large", field="value_bytes")
        self._stream.seek(location.offset)
        return self._stream.read_exactly(location.length)

    def numbers(self, tag: Tag) -> list[float | None]:
        """Return the numbers of an element, None for an empty value. Raises DicomError when one
        is damaged.
        """
        data = self.raw(tag)
        if data is None:
            return []
        try:
            return parse_numbers(
                data, self.vr(tag) or "", USUAL_VRS.get(tag, "US"), self.encoding.endian
            )
        except ValueError:
            raise damaged(tag) from None

    def number(self, tag: Tag) -> float | None:
        """Return the only number of an element; None when it is absent. Raises DicomError when
        it is damaged.
        """
        try:
            return only(self.numbers(tag))
        except ValueError:
            raise damaged(tag) from None

    def integer(self, tag: Tag) -> int | None:
        """Return `number` as a whole number; DicomError for others."""
        value = self.number(tag)
        if value is None:
            return None
        if value != int(value):
            raise damaged(tag)
        return int(value)

    def word(self, tag: Tag) -> int | None:
        """Return `integer` of an element without negative numbers, of which some writers store
        16 bits as signed.
        """
        value = self.integer(tag)
        if value is not None and value < 0:
            if self.vr(tag) != "SS":
                raise damaged(tag)
            value += 1 << 16
        return value

    def code(self, tag: Tag) -> str | None:
        """Return the letters and digits of a code word in capitals; None when it is absent.

        Raises DicomError when it is damaged.
        """
        try:
            return parse_code(self.raw(tag) or b"")
        except ValueError:
            raise damaged(tag) from None

    def text(self, tag: int) -> str | None:
        """Return the first value of a text element; None when it is absent or not ASCII."""
        data = (self.raw(tag) or b"").split(b"\\")[0].strip(b" \0")
        return data.decode("ascii") if data and data.isascii() else None

    def item(self, tag: int, index: int = 0) -> "Elements | None":
        """Return item `index` of a sequence, or None."""
        location = self._locations.get(tag)
        if location is None:
            return None
        encoding = _item_encoding(location, self.encoding)
        for number, (offset, length) in enumerate(
            _items(self._stream, encoding, location, depth=1)
        ):
            if number == index:
                self._stream.seek(offset)
                return Elements(
                    self._stream, encoding, _walk(self._stream, encoding, length, depth=1).locations
                )
        return None

    def items(self, tag: int) -> "Iterator[Elements]":
        """Yield the items of a sequence, in one pass; none where it is absent."""
        location = self._locations.get(tag)
        if location is None:
            return
        encoding = _item_encoding(location, self.encoding)
        for offset, length in _items(self._stream, encoding, location, depth=1):
            self._stream.seek(offset)
            walked = _walk(self._stream, encoding, length, depth=1)
            yield Elements(self._stream, encoding, walked.locations)


class WalkResult(NamedTuple):
    """Locations of a dataset's known elements, and of the pixel data that ended the walk."""

    locations: dict[int, Location]
    pixels: tuple[str, Location] | None


@dataclasses.dataclass(frozen=True, slots=True)
class DicomFile:
    """A file parsed up to its pixel data."""

    stream: BoundedStream
    elements: Elements
    transfer_syntax: str | None
    pixels: tuple[str, Location] | None
    """(PixelData or one of its floating-point forms, location)."""


def starts_like_dicom(data: bytes) -> bool:
    """Return whether a file has DICOM's preamble, or begins with an element of group 2 or 8."""
    return data[128:132] == b"DICM" or data[:2] in (b"\x02\0", b"\x08\0", b"\0\x08")


def open_dicom(file: BinaryIO, limits: DicomLimits) -> DicomFile:
    """Parse the elements up to the pixel data.

    Raises DicomError with the code "not_dicom", "truncated", "malformed" or "too_large".
    """
    stream = BoundedStream(file, limits)
    if stream.size > limits.file_bytes:
        raise DicomError(
            f"the file has {stream.size} bytes, over the limit", "too_large", field="file_bytes"
        )
    if stream.read(132)[128:] != b"DICM":  # without preamble, elements start at byte 0
        stream.seek(0)
        if stream.read(2) not in (b"\x02\0", b"\x08\0", b"\0\x08"):
            raise DicomError("not a DICOM file", "not_dicom")
        stream.seek(0)
    syntax = _read_transfer_syntax(stream)
    if syntax == DEFLATED:
        stream = _inflate(stream)
    encoding = _encoding_of(stream, syntax)
    locations, pixels = _walk(stream, encoding, UNDEFINED, depth=0)
    return DicomFile(stream, Elements(stream, encoding, locations), syntax, pixels)


def _read_transfer_syntax(stream: BoundedStream) -> str | None:
    """Read the transfer syntax and skip the file meta information (group 2, explicit little
    endian).
    """
    start = stream.tell()
    syntax = None
    while len(head := stream.read(8)) == 8 and head[:2] == b"\x02\0":
        stream.seek(start)
        tag, location = _read_header(stream, Encoding(implicit=False, little=True))
        if tag == Tag.TRANSFER_SYNTAX:
            syntax = (
                stream.read_exactly(min(location.length, 64))
                .strip(b" \0")
                .decode("ascii", "replace")
            )
        _check_inside(stream, location)
        start = stream.seek(location.offset + location.length)
    stream.seek(start)
    return syntax


def _inflate(stream: BoundedStream) -> BoundedStream:
    """Return the rest of a deflated file, inflated in steps so that a zip bomb stops at the
    limit.
    """
    limit = stream.limits.inflated_bytes
    stream.limit_reads(limit)  # deflated data are at most a few bytes longer than inflated data
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    inflated = io.BytesIO()
    while not inflater.eof:
        packed = inflater.unconsumed_tail or stream.read(1 << 16)
        if not packed:
            raise DicomError("the deflated part ends too early: copy the file again", "truncated")
        try:
            inflated.write(inflater.decompress(packed, 1 << 20))
        except zlib.error:
            raise DicomError("the deflated part is damaged", "malformed") from None
        if inflated.tell() > limit:
            raise DicomError(
                f"the file inflates to more than {limit} bytes", "too_large", field="inflated_bytes"
            )
    return BoundedStream(inflated, stream.limits)


def _encoding_of(stream: BoundedStream, syntax: str | None) -> Encoding:
    """Return the encoding of the transfer syntax (else of the first group number), corrected by
    the first element.
    """
    start = stream.tell()
    head = stream.read(6)
    stream.seek(start)
    little = syntax != EXPLICIT_BIG if syntax else head[:1] != b"\0"
    if syntax in ("1.2.840.113619.5.2", "1.3.46.670589.33.1.4.1"):
        raise DicomError("private transfer syntaxes are not supported", "unsupported")
    return Encoding(implicit=head[4:6] not in _LONG_VRS | _SHORT_VRS, little=little)


def _walk(stream: BoundedStream, encoding: Encoding, length: int, depth: int) -> WalkResult:
    """Parse the elements in the next `length` bytes or, if undefined, to the end of the item or
    file.
    """
    end = stream.size if length == UNDEFINED else stream.tell() + length
    locations: dict[int, Location] = {}
    while end - stream.tell() >= 8:
        tag, location = _read_header(stream, encoding)
        if tag == _ITEM_END:
            break
        if tag in _PIXELS and depth == 0:
            return WalkResult(locations, (_PIXELS[tag], location))
        if tag in _KNOWN_TAGS:
            locations[tag] = location
        _skip_value(stream, encoding, location, depth)
    return WalkResult(locations, None)


def _read_header(stream: BoundedStream, encoding: Encoding) -> tuple[int, Location]:
    """Read a tag and the location of its value, and move to the value."""
    head = stream.read_exactly(8)
    group, element = struct.unpack(f"{encoding.endian}HH", head[:4])
    tag = group << 16 | element
    vr = head[4:6]
    # Some writers use implicit VR within sequences, so the VR is checked too.
    if encoding.implicit or group == 0xFFFE or not (vr.isalpha() and vr.isupper()):
        return tag, Location("", stream.tell(), struct.unpack(f"{encoding.endian}L", head[4:])[0])
    if vr in _LONG_VRS:
        length = struct.unpack(f"{encoding.endian}L", stream.read_exactly(4))[0]
    else:
        length = struct.unpack(f"{encoding.endian}H", head[6:])[0]
    return tag, Location(vr.decode(), stream.tell(), length)


def _skip_value(stream: BoundedStream, encoding: Encoding, location: Location, depth: int) -> None:
    if location.length == UNDEFINED:
        for _ in _items(stream, _item_encoding(location, encoding), location, depth + 1):
            pass
    else:
        _check_inside(stream, location)
        stream.seek(location.offset + location.length)


def _item_encoding(location: Location, encoding: Encoding) -> Encoding:
    """Return the encoding of a sequence's items: implicit for sequences of unknown VR (PS3.5,
    6.2.2).
    """
    return Encoding(implicit=True, little=True) if location.vr == "UN" else encoding


def _items(
    stream: BoundedStream, encoding: Encoding, location: Location, depth: int
) -> Iterator[tuple[int, int]]:
    """Yield (offset, length) of a sequence's items, then move behind it. Callers may move the
    stream.
    """
    if depth > _MAX_DEPTH:
        raise DicomError(f"sequences nest more than {_MAX_DEPTH} deep", "malformed")
    _check_inside(stream, location)
    end = stream.size if location.length == UNDEFINED else location.offset + location.length
    offset = location.offset
    while end - offset >= 8:
        stream.seek(offset)
        tag, item = _read_header(stream, encoding)
        if tag == _SEQUENCE_END:
            return
        if tag != _ITEM:
            raise DicomError("a sequence contains something other than items", "malformed")
        yield item.offset, item.length
        stream.seek(item.offset)
        if item.length == UNDEFINED:
            _walk(stream, encoding, UNDEFINED, depth)
        else:
            _check_inside(stream, item)
            stream.seek(item.offset + item.length)
        offset = stream.tell()
    if location.length == UNDEFINED:
        raise DicomError("the file ends within a sequence: copy it again", "truncated")


def _check_inside(stream: BoundedStream, location: Location) -> None:
    if location.length != UNDEFINED and location.offset + location.length > stream.size:
        raise DicomError(_TRUNCATED_HEADER, "truncated")
