"""JPEG and PNG files as other programs write them, and files that are small on disk and large in
memory.
"""

import dataclasses
import io
import struct
import zlib

import numpy as np
from PIL import Image

CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
"""Samples a pixel of the kinds of PNG."""
PASSES = (
    (0, 0, 8, 8),
    (4, 0, 8, 8),
    (0, 4, 4, 8),
    (2, 0, 4, 4),
    (0, 2, 2, 4),
    (1, 0, 2, 2),
    (0, 1, 1, 2),
)
"""Adam7: first column and row, and the steps between them."""
RAMP = np.add.outer(np.arange(24), np.arange(20)).astype(np.uint8) * 5
BOMB = zlib.compress(bytes(1 << 27), 9)


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """A file and the grey pixels, or the code of the error, that are right for it."""

    name: str
    data: bytes
    pixels: np.ndarray | None = None
    code: str | None = None


def chunk(kind: bytes, body: bytes) -> bytes:
    """Return a chunk of a PNG."""
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(
    width: int,
    height: int,
    bits: int,
    kind: int,
    rows: bytes,
    *before: bytes,
    interlaced: bool = False,
) -> bytes:
    """Return a PNG of filtered rows, with chunks before its pixels."""
    header = struct.pack(">IIBBBBB", width, height, bits, kind, 0, 0, int(interlaced))
    start = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + b"".join(before)
    return start + chunk(b"IDAT", zlib.compress(rows, 1)) + chunk(b"IEND", b"")


def rows_of(samples: np.ndarray) -> bytes:
    """Return unfiltered rows of samples (H, W, C)."""
    big_endian = samples.astype(samples.dtype.newbyteorder(">"))
    return b"".join(b"\0" + row.tobytes() for row in big_endian)


def interlaced(samples: np.ndarray) -> bytes:
    """Return the rows of the seven passes of an interlaced PNG."""
    return b"".join(
        rows_of(samples[row::down, column::across]) for column, row, across, down in PASSES
    )


def of_kind(kind: int, bits: int, *before: bytes, interlace: bool = False) -> bytes:
    """Return the ramp as a PNG of a kind, with an alpha channel that hides a part of it."""
    samples = RAMP.astype(np.uint16) * 257 if bits == 16 else RAMP
    samples_HWC = np.repeat(samples[:, :, None], CHANNELS[kind], axis=2)
    if kind in (4, 6):
        samples_HWC[:, :10, -1] = 0
    rows = interlaced(samples_HWC) if interlace else rows_of(samples_HWC)
    return png(20, 24, bits, kind, rows, *before, interlaced=interlace)


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    """Return the file of a PIL image."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def turned(image: np.ndarray, orientation: int) -> tuple[bytes, np.ndarray]:
    """Return EXIF data with an orientation in the last of many entries, and the ramp as it is
    seen.
    """
    entries = b"".join(struct.pack(">HHII", tag, 4, 1, tag) for tag in range(0x0100, 0x0108))
    entries += struct.pack(">HHIHH", 0x0112, 3, 1, orientation, 0)
    exif = b"MM\0*" + struct.pack(">IH", 8, 9) + entries + bytes(4)
    return exif, {1: image, 3: image[::-1, ::-1], 6: np.rot90(image, -1), 8: np.rot90(image)}[
        orientation
    ]


def resized_jpeg(data: bytes, side: int, precision: int = 8) -> bytes:
    """Return a JPEG that claims a size and a number of bits."""
    start = max(data.find(b"\xff\xc0"), data.find(b"\xff\xc2"))
    return data[: start + 4] + struct.pack(">BHH", precision, side, side) + data[start + 9 :]


def png_cases() -> list[Case]:
    """Return PNG files that every viewer shows."""
    plain = of_kind(2, 8)
    cases = [
        Case(
            f"kind {kind}, {bits} bits, interlaced {interlace}",
            of_kind(kind, bits, interlace=interlace),
            RAMP,
        )
        for kind in (0, 2, 4, 6)
        for bits in (8, 16)
        for interlace in (False, True)
    ]
    palette = chunk(b"PLTE", bytes(np.repeat(np.arange(256, dtype=np.uint8), 3)))
    transparent = chunk(b"tRNS", bytes(256))
    for kind, name in ((b"zTXt", "a"), (b"iCCP", "a")):
        cases.append(
            Case(f"a bomb in {name} {kind!r}", of_kind(2, 8, chunk(kind, b"a\0\0" + BOMB)), RAMP)
        )
    cases.append(Case("a bomb in iTXt", of_kind(2, 8, chunk(b"iTXt", b"a\0\1\0\0\0" + BOMB)), RAMP))
    many = chunk(b"tEXt", b"a\0b") * 10_000
    animated = chunk(b"acTL", struct.pack(">II", 2, 0))
    animated += chunk(b"fcTL", struct.pack(">IIIIIHHBB", 0, 20, 24, 0, 0, 1, 1, 0, 0))
    later = chunk(b"fcTL", struct.pack(">IIIIIHHBB", 1, 20, 24, 0, 0, 1, 1, 0, 0))
    later += chunk(
        b"fdAT", struct.pack(">I", 2) + zlib.compress(rows_of(np.zeros((24, 20, 3), np.uint8)))
    )
    end = chunk(b"IEND", b"")
    exif, seen = turned(RAMP, 6)
    return [
        *cases,
        Case("a palette", of_kind(3, 8, palette), RAMP),
        Case("a palette, interlaced", of_kind(3, 8, palette, interlace=True), RAMP),
        Case("a palette, all transparent", of_kind(3, 8, palette, transparent), RAMP),
        Case("10,000 texts", of_kind(2, 8, many), RAMP),
        Case(
            "a text with a wrong checksum", of_kind(2, 8, chunk(b"tEXt", b"a\0b")[:-1] + b"?"), RAMP
        ),
        Case("an animation", of_kind(2, 8, animated).removesuffix(end) + later + end, RAMP),
        Case("no end", plain.removesuffix(end), RAMP),
        Case("bytes behind the end", plain + bytes(1000), RAMP),
        Case(
            "gamma and profile",
            of_kind(0, 8, chunk(b"gAMA", struct.pack(">I", 100_000)), chunk(b"sRGB", b"\0")),
            RAMP,
        ),
        Case("EXIF data", of_kind(0, 8, chunk(b"eXIf", exif)), seen),
        Case(
            "EXIF data behind 100 kB of text",
            of_kind(0, 8, chunk(b"tEXt", bytes(100_000)), chunk(b"eXIf", exif)),
            seen,
        ),
        Case(
            "EXIF data behind the pixels",
            of_kind(0, 8).removesuffix(end) + chunk(b"eXIf", exif) + end,
            seen,
        ),
        Case("a text about eXIf", of_kind(0, 8, chunk(b"tEXt", b"eXIf\0" + exif)), RAMP),
    ]


def jpeg_cases() -> list[Case]:
    """Return JPEG files that every viewer shows."""
    image = Image.fromarray(RAMP)
    plain = saved(image, "JPEG", quality=100)
    profile = b"\xff\xe2" + struct.pack(">H", 60_002) + bytes(60_000)
    exif, seen = turned(RAMP, 8)
    segment = b"\xff\xe1" + struct.pack(">H", len(exif) + 8) + b"Exif\0\0" + exif
    return [
        Case(
            "progressive",
            saved(image.convert("RGB"), "JPEG", quality=100, progressive=True, subsampling=0),
            RAMP,
        ),
        Case("CMYK", saved(image.convert("RGB").convert("CMYK"), "JPEG", quality=100), RAMP),
        Case("300 kB of profile", plain[:2] + profile * 5 + plain[2:], RAMP),
        Case("EXIF data", plain[:2] + segment + plain[2:], seen),
        Case(
            "EXIF data behind 300 kB of profile",
            plain[:2] + profile * 5 + segment + plain[2:],
            seen,
        ),
        Case("fill bytes before EXIF data", plain[:2] + b"\xff\xff" + segment + plain[2:], seen),
        Case("EXIF data among the pixels alone", plain + segment, RAMP),
    ]


def refused_cases() -> list[Case]:
    """Return files that are refused, by their code."""
    image = Image.fromarray(RAMP)
    plain = of_kind(2, 8)
    start = plain.index(b"IDAT")
    jpeg = saved(image.convert("RGB"), "JPEG")
    progressive = saved(image.convert("RGB"), "JPEG", progressive=True, subsampling=0)
    cases = [
        Case(f"{kind} named .png", saved(image, kind), code="unknown_format")
        for kind in ("WEBP", "TIFF", "BMP", "GIF")
    ]
    return [
        *cases,
        Case(
            "pixels with a wrong checksum",
            plain[: start + 8] + b"?" + plain[start + 9 :],
            code="malformed",
        ),
        Case("cut off within the pixels", plain[: start + 20], code="truncated"),
        Case("cut off before the pixels", plain[: start - 4], code="truncated"),
        Case("200,000 chunks", of_kind(2, 8, chunk(b"tEXt", b"") * 200_000), code="too_large"),
        Case("16-bit colour of 67 megapixels", png(8192, 8192, 16, 2, b""), code="too_large"),
        Case(
            "16-bit colour and alpha of 67 megapixels",
            png(8192, 8192, 16, 6, b""),
            code="too_large",
        ),
        Case("a side of two million", png(2_000_000, 4, 8, 0, b""), code="too_large"),
        Case("a JPEG of 12 bits", resized_jpeg(jpeg, 24, precision=12), code="unsupported"),
        Case(
            "a progressive JPEG of 67 megapixels", resized_jpeg(progressive, 8192), code="too_large"
        ),
    ]


def large_cases() -> list[Case]:
    """Return files that are readable and take much memory: zeros, so that they are small on
    disk.
    """
    sides = {
        "16-bit grey": (8192, 16, 0),
        "16-bit colour": (5700, 16, 2),
        "colour and alpha": (8192, 8, 6),
    }
    return [
        Case(
            name, png(side, side, bits, kind, bytes((side * CHANNELS[kind] * bits // 8 + 1) * side))
        )
        for name, (side, bits, kind) in sides.items()
    ]
