"""DICOM files whose header values are written as other programs write them, or damaged.

Each case is a grey ramp with some elements replaced, and the shades that a viewer shows, or the
keyword of the element that has no certain meaning.
"""

import dataclasses
import io
import struct

import numpy as np
from helpers.dicom_builder import element, image_dataset

SIGNED, UNSIGNED = np.int16, np.uint16
RAMP = np.arange(4096, dtype=UNSIGNED).reshape(64, 64)
SIGNED_RAMP = (RAMP.astype(int) - 1024).astype(SIGNED)

CENTER, WIDTH, FUNCTION = (0x00281050, b"DS"), (0x00281051, b"DS"), (0x00281056, b"CS")
INTERCEPT, SLOPE, FRAMES = (0x00281052, b"DS"), (0x00281053, b"DS"), (0x00280008, b"IS")
SAMPLES, PHOTOMETRIC, ROWS = (0x00280002, b"US"), (0x00280004, b"CS"), (0x00280010, b"US")
STORED, HIGH, SIGN = (0x00280101, b"US"), (0x00280102, b"US"), (0x00280103, b"US")
PADDING, SHAPE = (0x00280120, b"US"), (0x20500020, b"CS")
SPACING, DETECTOR = (0x00280030, b"DS"), (0x00181164, b"DS")
MODALITY_LUT, VOI_LUT = 0x00283000, 0x00283010
KEYWORDS = {
    CENTER: "WindowCenter", WIDTH: "WindowWidth", FUNCTION: "VOILUTFunction",
    INTERCEPT: "RescaleIntercept", SLOPE: "RescaleSlope", FRAMES: "NumberOfFrames",
    SAMPLES: "SamplesPerPixel", ROWS: "Rows", PHOTOMETRIC: "PhotometricInterpretation",
    STORED: "BitsStored", HIGH: "HighBit", SIGN: "PixelRepresentation",
    PADDING: "PixelPaddingValue", SHAPE: "PresentationLUTShape",
}  # fmt: skip
Key = tuple[int, bytes]


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """A file and what is right for it."""

    name: str
    data: bytes
    shades: np.ndarray | None = None
    """From 0 to 1."""
    keyword: str | None = None
    """Of the element that is named where the file is refused."""


def words(*values: int) -> bytes:
    """Return 16-bit words, with or without a sign."""
    return struct.pack(f"<{len(values)}H", *(value % 65536 for value in values))


def file(elements: dict[Key, bytes | None], pixels: np.ndarray = RAMP) -> bytes:
    """Return a file with `elements` in place of those of the same tags; None leaves an element
    out.
    """
    data = image_dataset(pixels)
    tags = {tag for tag, _ in elements}
    for tag in tags & set(data.keys()):
        del data[tag]
    buffer = io.BytesIO()
    data.save_as(buffer, enforce_file_format=True)
    start = buffer.getvalue().index(element(0x7FE00010, b"OW", b"")[:6])
    head, pixel_data = buffer.getvalue()[:start], buffer.getvalue()[start:]
    added = [
        element(tag, vr, value)
        for (tag, vr), value in sorted(elements.items())
        if value is not None
    ]
    return head + b"".join(added) + pixel_data


def lut(
    tag: int,
    descriptor: tuple[int, int, int],
    data: bytes,
    vr: bytes = b"US",
    data_vr: bytes = b"OW",
) -> dict:
    """Return a sequence with one look-up table."""
    item = element(0x00283002, vr, words(*descriptor)) + element(0x00283006, data_vr, data)
    return {(tag, b"SQ"): struct.pack("<HHL", 0xFFFE, 0xE000, len(item)) + item}


def linear(values: np.ndarray, center: float, width: float, function: str = "LINEAR") -> np.ndarray:
    """Return the shades of a window (PS3.3 C.11.2.1.2)."""
    if function == "SIGMOID":
        return 1 / (1 + np.exp(-4 * (values - center) / width))
    shift, step = (0.5, 1) if function == "LINEAR" else (0, 0)
    return np.clip((values - (center - shift)) / (width - step) + 0.5, 0, 1)


def window(center: bytes, width: bytes, function: bytes | None = None) -> dict[Key, bytes | None]:
    """Return the elements of a window."""
    return {CENTER: center, WIDTH: width, **({} if function is None else {FUNCTION: function})}


SHOWN = window(b"1000", b"3000")
FULL = window(b"2048", b"4096")


def read_cases() -> list[Case]:
    """Return the files that have one certain meaning."""
    stored = RAMP.astype(float)
    plain = linear(stored, 1000, 3000)
    cases = []
    for text, slope in (
        (b"0,5", 0.5), (b"0,500", 0.5), (b"0,500000", 0.5), (b"+0.5", 0.5), (b" 0.5 ", 0.5), (b"5.0e-1", 0.5),
        (b"5E-1", 0.5), (b".5", 0.5), (b"0.5\\", 0.5), (b"\\0.5", 0.5), (b"0.5\\0.5", 0.5), (b"0.5\\0.50", 0.5),
        (b"0.5\0\0\0", 0.5), (b"0,5\\", 0.5), (b"1.", 1), (b"1.0e0", 1), (b"", 1), (b"  ", 1), (b"-1,5", -1.5),
        (b"0.5\r\n", 0.5), (b"1,000000", 1), (b"0.5,0.5", 0.5),
    ):  # fmt: skip
        cases.append(
            Case(
                f"slope {text!r}",
                file({SLOPE: text, INTERCEPT: b"0", **SHOWN}),
                linear(stored * slope, 1000, 3000),
            )
        )
    for text, intercept in (
        (b"-1024\\", -1024), (b"-1024 ", -1024), (b"-1024,0", -1024), (b"-1,024e3", -1024), (b"-0", 0),
        (b"-1024.00000", -1024), (b"", 0), (b"\\", 0), (b"-0,5", -0.5),
    ):  # fmt: skip
        shades = linear(stored + intercept, 1000, 3000)
        cases.append(
            Case(f"intercept {text!r}", file({SLOPE: b"1", INTERCEPT: text, **SHOWN}), shades)
        )
    binary = {
        (SLOPE[0], b"FD"): struct.pack("<d", 0.5),
        (INTERCEPT[0], b"SL"): struct.pack("<l", -100),
    }
    cases.append(
        Case("binary rescale", file(binary | SHOWN), linear(stored * 0.5 - 100, 1000, 3000))
    )
    unknown = {(SLOPE[0], b"UN"): b"0.5 ", (INTERCEPT[0], b"LO"): b"-100"}
    cases.append(
        Case("rescale of unknown VR", file(unknown | SHOWN), linear(stored * 0.5 - 100, 1000, 3000))
    )
    for center, width, expected in (
        (b"127,5", b"255", (127.5, 255)), (b"1000,5", b"3000,5", (1000.5, 3000.5)), (b"1000\\40", b"3000\\400", (1000, 3000)),
        (b"1000\\40", b"3000", (1000, 3000)), (b"1000\\", b"3000\\", (1000, 3000)), (b"40\\1000", b"0\\3000", (1000, 3000)),
        (b"\\1000", b"\\3000", (1000, 3000)), (b"1000.0,40.0", b"3000.0,400.0", (1000, 3000)), (b"+1.0e3", b"3E3", (1000, 3000)),
        (b" 1000", b"3000\0", (1000, 3000)),
    ):  # fmt: skip
        cases.append(
            Case(f"window {center!r}", file(window(center, width)), linear(stored, *expected))
        )
    small = linear(stored, 100, 0.5, "LINEAR_EXACT")
    cases.append(Case("width below 1", file(window(b"100", b"0.5")), small))
    for text, function in (
        (b"sigmoid", "SIGMOID"), (b" SIGMOID ", "SIGMOID"), (b"Sigmoid\0", "SIGMOID"), (b"linear_exact", "LINEAR_EXACT"),
        (b"LINEAR EXACT", "LINEAR_EXACT"), (b"LINEAR-EXACT", "LINEAR_EXACT"), (b"LinearExact", "LINEAR_EXACT"),
        (b"linear", "LINEAR"), (b"", "LINEAR"), (b"  ", "LINEAR"), (b"SIGMOID\\", "SIGMOID"), (b"LINEAR\\LINEAR", "LINEAR"),
    ):  # fmt: skip
        data = file(window(b"1000", b"3000", text))
        cases.append(Case(f"function {text!r}", data, linear(stored, 1000, 3000, function)))
    frames = (b"0", b"", b"1\\", b" 1", b"1 ", b"1.0", b"+1", b"01", b"1\\1", b"\0\0")
    cases += [Case(f"frames {text!r}", file({FRAMES: text, **SHOWN}), plain) for text in frames]
    cases.append(Case("frames as a word", file({(FRAMES[0], b"US"): words(1), **SHOWN}), plain))
    for text, inverted in (
        (b"monochrome1", True), (b" MONOCHROME1", True), (b"Monochrome1 ", True), (b"MONOCHROME1\0", True),
        (b"MONOCHROME1\\", True), (b"MONOCHROME 1", True), (b"MONOCHROME_2", False), (b"monochrome2", False),
    ):  # fmt: skip
        shades = 1 - plain if inverted else plain
        cases.append(Case(f"photometric {text!r}", file({PHOTOMETRIC: text, **SHOWN}), shades))
    for photometric, shape, inverted in (
        (b"MONOCHROME1", b"INVERSE", True), (b"MONOCHROME1", b"inverse ", True), (b"MONOCHROME2", b"inverse", True),
        (b"MONOCHROME2", b" Identity", False), (b"MONOCHROME1", b"IDENTITY", True), (b"MONOCHROME2", b"", False),
    ):  # fmt: skip
        shades = 1 - plain if inverted else plain
        data = file({PHOTOMETRIC: photometric, SHAPE: shape, **SHOWN})
        cases.append(Case(f"{photometric!r} {shape!r}", data, shades))
    cases.append(Case("no samples per pixel", file({SAMPLES: None, **SHOWN}), plain))
    for vr, value in (
        (b"IS", b"64"), (b"DS", b"64.0"), (b"UL", struct.pack("<L", 64)), (b"SS", words(64)), (b"UN", words(64)),
        (b"UN", struct.pack("<L", 64)), (b"US", words(64, 64)), (b"LO", b" 64 "),
    ):  # fmt: skip
        cases.append(
            Case(f"rows as {vr!r} {value!r}", file({(ROWS[0], vr): value, **SHOWN}), plain)
        )
    return cases + bits_cases() + table_cases()


def bits_cases() -> list[Case]:
    """Return files with odd bits, signs and padding."""
    stored = RAMP.astype(float)
    plain, full = linear(stored, 1000, 3000), linear(stored, 2048, 4096)
    twelve = {STORED: words(12), HIGH: words(11)}
    cases = [
        Case(
            "high bit of the word, samples below",
            file({STORED: words(12), HIGH: words(15), **SHOWN}),
            plain,
        ),
        Case("high bit below the stored ones", file({HIGH: words(11), **SHOWN}), plain),
        Case("high bit behind the word", file({HIGH: words(16), **SHOWN}), plain),
        Case(
            "high bit as text",
            file({**twelve, (HIGH[0], b"IS"): b"11", HIGH: None, **SHOWN}),
            plain,
        ),
        Case(
            "shifted samples", file({STORED: words(12), HIGH: words(15), **SHOWN}, RAMP << 4), plain
        ),
        Case("no high bit", file({HIGH: None, **SHOWN}), plain),
        Case("no sign and no samples that could have one", file({SIGN: None, **SHOWN}), plain),
        Case("sign as text", file({(SIGN[0], b"IS"): b"0", **SHOWN}), plain),
        Case(
            "signed samples below a wrong high bit",
            file({STORED: words(12), HIGH: words(15), **SHOWN}, SIGNED_RAMP // 2),
            linear((SIGNED_RAMP // 2).astype(float), 1000, 3000),
        ),
        Case("padding of the other sign", file({(PADDING[0], b"SS"): words(-1), **SHOWN}), plain),
        Case("padding of zeros", file({PADDING: words(0), **FULL}), np.where(RAMP == 0, 0, full)),
        Case(
            "negative padding stored without a sign",
            file({PADDING: words(-1024), **FULL}, SIGNED_RAMP),
            np.where(SIGNED_RAMP == -1024, 0, linear(SIGNED_RAMP.astype(float), 2048, 4096)),
        ),
        Case(
            "padding as text",
            file({(PADDING[0], b"IS"): b"4095", **FULL}),
            np.where(RAMP == 4095, 0, full),
        ),
    ]
    wide = (RAMP.astype(np.uint32) | 0xAB000000).reshape(64, 64)
    bits = {STORED: words(24), HIGH: words(23)}
    return [*cases, Case("unused bits of 32", file({**bits, **SHOWN}, wide), plain)]


def table_cases() -> list[Case]:
    """Return files with look-up tables."""
    entries = np.arange(0, 4096, dtype=np.uint16)[::-1]
    signed = SIGNED_RAMP.astype(float)
    falling = entries.astype(float).reshape(64, 64)
    data = entries.astype("<u2").tobytes()
    low = (entries >> 4).astype(np.uint8)
    by_bytes = {"values": low.tobytes(), "shades": low.reshape(64, 64) / 255}
    unsigned = (4096, -1024, 16)
    modality = lut(MODALITY_LUT, unsigned, data)
    return [
        Case(
            "LUT of signed samples, without a sign",
            file({**modality, **FULL}, SIGNED_RAMP),
            linear(falling, 2048, 4096),
        ),
        Case(
            "LUT of signed samples, with a sign",
            file({**lut(MODALITY_LUT, unsigned, data, b"SS"), **FULL}, SIGNED_RAMP),
            linear(falling, 2048, 4096),
        ),
        Case(
            "VOI LUT of signed samples",
            file(lut(VOI_LUT, (4096, -1024, 12), data), SIGNED_RAMP),
            falling / 4095,
        ),
        Case(
            "VOI LUT of rescaled samples",
            file({**lut(VOI_LUT, (4096, -1024, 12), data), INTERCEPT: b"-1024,0"}),
            falling / 4095,
        ),
        Case(
            "LUT of high samples, with a sign",
            file(lut(VOI_LUT, (4096, 40000, 12), data, b"SS"), (RAMP + 40000).astype(UNSIGNED)),
            falling / 4095,
        ),
        Case(
            "LUT of bytes", file(lut(VOI_LUT, (4096, 0, 8), by_bytes["values"])), by_bytes["shades"]
        ),
        Case(
            "LUT of bytes, as OB",
            file(lut(VOI_LUT, (4096, 0, 8), by_bytes["values"], data_vr=b"OB")),
            by_bytes["shades"],
        ),
        Case(
            "LUT of bytes that claims words",
            file(lut(VOI_LUT, (4096, 0, 16), by_bytes["values"])),
            by_bytes["shades"],
        ),
        Case(
            "LUT of words, as US",
            file(lut(VOI_LUT, (4096, 0, 12), data, data_vr=b"US")),
            falling / 4095,
        ),
        Case(
            "LUT of 65,536 entries",
            file(
                lut(VOI_LUT, (0, 0, 16), np.arange(65536, dtype="<u2")[::-1].tobytes()), RAMP * 16
            ),
            1 - (RAMP.astype(float) * 16) / 65535,
        ),
        Case(
            "LUT of signed samples beside the window",
            file({**SHOWN}, SIGNED_RAMP),
            linear(signed, 1000, 3000),
        ),
    ]


def refused_cases() -> list[Case]:
    """Return files with a value that changes pixels and has no certain meaning."""
    texts: list[tuple[Key, tuple[bytes, ...], dict]] = [
        (SLOPE, (
            b"1,000", b"1.024,5", b"1,024.5", b"0.5\\2", b"abc", b"nan", b"NaN", b"inf", b"1e999",
            b"0", b"0,0", b"1_0", b"0x1", b"--1", b"1 000", b"0.5.1", b"\xff\xfe", b"0,5,5",
            b"1" * 80, b"0.5f", b"=1", b"1/2",
        ), SHOWN),
        (INTERCEPT, (b"-1,024", b"-1024\\-1000", b"-1024 HU", b"nan", b"-", b"-1.024,0"), SHOWN),
        (CENTER, (b"abc\\40", b"1,024", b"nan", b"1000 HU", b"40,400", b"4;5"),
        {WIDTH: b"3000\\400"}), (WIDTH, (b"-5", b"abc", b"nan", b"inf", b"1,024", b"-400\\400"),
        {CENTER: b"1000\\400"}), (FUNCTION, (b"GAMMA", b"LINEAR\\SIGMOID", b"\xc3\xa9", b"LINEA"),
        SHOWN), (FRAMES, (b"1A", b"-1", b"1.5", b"1\\2", b"1,5", b"nan", b"one"), SHOWN),
        (PHOTOMETRIC, (b"MONOCHROME", b"MONOCHROME3", b"\xff", b"GREY",
        b"MONOCHROME1\\MONOCHROME2"), SHOWN),
    ]  # fmt: skip
    damaged = [(key, text, others) for key, parts, others in texts for text in parts]
    damaged += [(STORED, words(value), SHOWN) for value in (0, 17, 20, 255)]
    damaged += [(SIGN, words(value), SHOWN) for value in (2, 65535)]
    damaged += [(SHAPE, text, SHOWN) for text in (b"NEGATIVE", b"\xff", b"IDENTITY\\INVERSE")]
    damaged += [
        ((ROWS[0], b"IS"), b"6 4", SHOWN),
        ((ROWS[0], b"SH"), b"many", SHOWN),
        (ROWS, words(64, 32), SHOWN),
    ]
    damaged += [((PADDING[0], b"LO"), b"none", SHOWN), (PADDING, words(1, 2), SHOWN)]
    keywords = {tag: keyword for (tag, _), keyword in KEYWORDS.items()}
    cases = [
        Case(
            f"{keywords[key[0]]} {value!r}"[:50],
            file({**others, key: value}),
            keyword=keywords[key[0]],
        )
        for key, value, others in damaged
    ]
    signs = (RAMP * 16).astype(UNSIGNED)
    short = np.arange(100, dtype="<u2").tobytes()
    several = np.concatenate([RAMP, RAMP])
    return [
        *cases,
        Case(
            "no sign, samples may be negative",
            file({SIGN: None, **SHOWN}, signs),
            keyword="PixelRepresentation",
        ),
        Case(
            "two places of the sign",
            file({STORED: words(16), HIGH: words(11), **SHOWN}, RAMP.astype(SIGNED)),
            keyword="HighBit",
        ),
        Case("no rows", file({ROWS: None, **SHOWN}), keyword="Rows"),
        Case("0 rows", file({ROWS: words(0), **SHOWN}), keyword="Rows"),
        Case("LUT that ends early", file(lut(VOI_LUT, (4096, 0, 12), short)), keyword="LUTData"),
        Case(
            "LUT of other samples",
            file(lut(VOI_LUT, (16, 30000, 12), short) | {STORED: words(12), HIGH: words(11)}),
            keyword="LUTDescriptor",
        ),
        Case(
            "no frames, pixels of two",
            file({FRAMES: b"0", ROWS: words(64)}, several),
            keyword="NumberOfFrames",
        ),
    ]
