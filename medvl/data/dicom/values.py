"""Numbers and code words of header values, as other programs write them.

A value is read where its meaning is certain: blanks, NUL bytes, signs and exponents, binary numbers in another VR than
the standard's, an empty last value (`-1024\\`), and a decimal comma. A comma is a decimal comma if the value has one
comma, no point, and digits on both sides that cannot be a group of thousands: `0,5` and `0,500` are 0.5, `1,000` is
refused. `0.14,0.15` is a list of two numbers. Everything else raises ValueError; nothing is guessed.
"""

import math
import re
import struct

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
    """Return the number of one value; two or more where it is a list with commas between numbers with points."""
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
    """Return the one number of an element; None if it has none. Raises ValueError for different or infinite ones."""
    present = {number for number in numbers if number is not None}
    if not present:
        return None
    if len(present) > 1 or not all(map(math.isfinite, present)):
        raise ValueError("several numbers, or not a finite one")
    return present.pop()


def parse_code(data: bytes) -> str | None:
    """Return the letters and digits of a code word in capitals: ` Linear_Exact\\0` is LINEAREXACT; None if empty.

    Raises ValueError for several different words and for bytes that are not ASCII.
    """
    parts = {_NOT_IN_CODES.sub("", part.strip(_BLANKS).decode("ascii").upper()) for part in data.split(b"\\")}
    parts.discard("")
    if len(parts) > 1:
        raise ValueError("several code words")
    return parts.pop() if parts else None
