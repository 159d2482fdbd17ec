"""Decoding of one DICOM frame by pydicom and its plugins, after all sizes have been checked."""

import dataclasses
import math
import struct
import zlib
from collections.abc import Callable, Generator, Iterable
from io import BytesIO
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from PIL import Image

from medvl.data.dicom import codestream
from medvl.data.dicom.codestream import Codestream
from medvl.data.dicom.parser import (
    DEFLATED,
    EXPLICIT_BIG,
    EXPLICIT_LITTLE,
    IMPLICIT_LITTLE,
    UNDEFINED,
    DicomFile,
    DicomLimits,
    Elements,
    Location,
    damaged,
)
from medvl.data.dicom.tags import Tag
from medvl.errors import DicomError

if TYPE_CHECKING:
    from pydicom.uid import UID

_DEFLATED_FRAMES = "1.2.840.10008.1.2.8.1"
_NATIVE = (None, IMPLICIT_LITTLE, EXPLICIT_LITTLE, EXPLICIT_BIG, DEFLATED)
_RLE = "1.2.840.10008.1.2.5"
_JPEG_LOSSLESS = ("1.2.840.10008.1.2.4.57", "1.2.840.10008.1.2.4.70")
_JPEG = ("1.2.840.10008.1.2.4.50", "1.2.840.10008.1.2.4.51", *_JPEG_LOSSLESS)
_JPEG_LS = ("1.2.840.10008.1.2.4.80", "1.2.840.10008.1.2.4.81")
_JPEG_2000 = (
    "1.2.840.10008.1.2.4.90",
    "1.2.840.10008.1.2.4.91",
    "1.2.840.10008.1.2.4.201",
    "1.2.840.10008.1.2.4.202",
    "1.2.840.10008.1.2.4.203",
)
"""Transfer syntaxes, as strings: pydicom, whose import takes half a second and 20 MB in every
process, is imported where compressed pixels are decoded. Other images have no use for it.
"""

_MAX_PARTS = 1 << 18  # at the usual 64 x 64 samples, of an image of a gigapixel

_PHOTOMETRIC = {
    "MONOCHROME1": "MONOCHROME1",
    "MONOCHROME2": "MONOCHROME2",
    "PALETTECOLOR": "PALETTE COLOR",
    "RGB": "RGB",
    "YBRFULL": "YBR_FULL",
    "YBRFULL422": "YBR_FULL_422",
    "YBRICT": "YBR_ICT",
    "YBRRCT": "YBR_RCT",
}
"""Letters and digits of the supported photometric interpretations."""
_RETIRED = ("HSV", "ARGB", "CMYK", "YBRPARTIAL422", "YBRPARTIAL420", "XYB")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PixelLayout:
    """Layout of the samples in the pixel data (Image Pixel module, DICOM PS3.3 C.7.6.3)."""

    keyword: str
    """PixelData, FloatPixelData or DoubleFloatPixelData."""
    vr: str
    rows: int
    columns: int
    frames: int
    samples: int
    photometric: str
    planar: int
    bits_allocated: int
    bits_stored: int
    high_bit: int
    """Highest stored bit as the header has it, which need not be possible: see
    `_unused_bits_below`.
    """
    signed: bool
    sign_is_stated: bool = True
    """Whether the header has PixelRepresentation."""

    @classmethod
    def from_file(cls, file: DicomFile) -> "PixelLayout":
        """Read the layout and check it against the limits of the file.

        Raises DicomError with the code "no_pixels", "malformed", "unsupported" or "too_large".
        """
        if file.pixels is None:
            raise DicomError(
                "the file has no pixel data (a report, a plan, a directory, a waveform)",
                "no_pixels",
            )
        keyword, location = file.pixels
        elements = file.elements
        rows = elements.word(Tag.ROWS)
        columns = elements.word(Tag.COLUMNS)
        allocated = elements.word(Tag.BITS_ALLOCATED)
        if not rows or not columns or not allocated:
            tag = Tag.ROWS if not rows else Tag.COLUMNS if not columns else Tag.BITS_ALLOCATED
            raise damaged(tag, "is missing or 0")
        photometric = _photometric(elements)
        color = photometric == "RGB" or photometric.startswith("YBR")
        samples = elements.word(Tag.SAMPLES) or (3 if color else 1)
        widths = {
            "PixelData": (1, 8, 16, 32),
            "FloatPixelData": (32,),
            "DoubleFloatPixelData": (64,),
        }[keyword]
        if samples not in (1, 3) or allocated not in widths:
            raise DicomError("unsupported combination of samples and bits", "unsupported")
        odd = photometric == "YBR_FULL_422" and columns % 2 == 1
        if odd or (samples == 3) != color or (color and keyword != "PixelData"):
            message = "the photometric interpretation does not match the samples"
            raise DicomError(message, "malformed", field="PhotometricInterpretation")
        stored = _bits_stored(elements, allocated) if keyword == "PixelData" else allocated
        sign = elements.word(Tag.SIGNED)
        if sign not in (None, 0, 1):
            raise damaged(Tag.SIGNED)
        frames = _frames(elements)
        layout = cls(
            keyword=keyword,
            vr=location.vr or "OW",
            rows=rows,
            columns=columns,
            frames=frames or 1,
            samples=samples,
            photometric=photometric,
            planar=_planar(elements) if samples == 3 else 0,
            bits_allocated=allocated,
            bits_stored=stored,
            high_bit=high_bit
            if (high_bit := elements.word(Tag.HIGH_BIT)) is not None
            else stored - 1,
            signed=sign == 1,
            sign_is_stated=sign is not None,
        )
        if (
            frames == 0
            and location.length != UNDEFINED
            and location.length >= 2 * layout.frame_bits // 8 > 0
        ):
            raise damaged(Tag.FRAMES, "is 0, but the pixel data hold several frames")
        layout._check_limits(file.stream.limits)
        return layout

    def _check_limits(self, limits: DicomLimits) -> None:
        if self.frames > limits.frames:
            message = f"the header claims {self.frames} frames, over the limit of {limits.frames}"
            raise DicomError(message, "too_large", field="frames")
        if math.ceil(self.frame_bits / 8) > limits.frame_bytes:
            size = (
                f"{self.rows} x {self.columns} x {self.samples} samples of "
                f"{self.bits_allocated} bits"
            )
            message = f"a frame of {size} is over the limit of {limits.frame_bytes} bytes"
            raise DicomError(message, "too_large", field="frame_bytes")

    @property
    def frame_bits(self) -> int:
        """Bits of an uncompressed frame. 4:2:2 has two samples per pixel; frames of single bits
        are not padded.
        """
        samples = 2 if self.photometric == "YBR_FULL_422" else self.samples
        return self.rows * self.columns * samples * self.bits_allocated

    @property
    def is_float(self) -> bool:
        """Whether pixels are floating point numbers."""
        return self.keyword != "PixelData"

    @property
    def options(self) -> dict[str, Any]:
        """Options of pydicom's decoders for a compressed frame."""
        return {
            "rows": self.rows,
            "columns": self.columns,
            "number_of_frames": 1,
            "samples_per_pixel": self.samples,
            "planar_configuration": self.planar,
            "photometric_interpretation": self.photometric,
            "bits_allocated": self.bits_allocated,
            "bits_stored": self.bits_stored,
            "pixel_representation": int(self.signed),
            "correct_unused_bits": False,  # done by the look-up table of the rendering
        }


def _photometric(elements: Elements) -> str:
    code = elements.code(Tag.PHOTOMETRIC)
    if code is None:
        return "RGB" if elements.word(Tag.SAMPLES) == 3 else "MONOCHROME2"
    if code in _RETIRED:
        message = "this photometric interpretation is not supported; convert the image to RGB"
        raise DicomError(message, "unsupported", field="PhotometricInterpretation")
    if code not in _PHOTOMETRIC:
        raise damaged(Tag.PHOTOMETRIC)
    return _PHOTOMETRIC[code]


def _planar(elements: Elements) -> int:
    planar = elements.word(Tag.PLANAR) or 0
    if planar > 1:
        raise damaged(Tag.PLANAR)
    return planar


def _bits_stored(elements: Elements, allocated: int) -> int:
    stored = elements.word(Tag.BITS_STORED)
    if stored is None:
        return allocated
    if not 1 <= stored <= allocated:
        raise damaged(Tag.BITS_STORED, f"must be from 1 to {allocated}, the bits allocated")
    return stored


def _frames(elements: Elements) -> int:
    """Return the number of frames: 1 if it is absent, 0 if the header has 0."""
    frames = elements.integer(Tag.FRAMES)
    if frames is None:
        return 1
    if not 0 <= frames < 1 << 31:
        raise damaged(Tag.FRAMES)
    return frames


@dataclasses.dataclass(frozen=True, slots=True)
class Frame:
    """A decoded frame before any transformation of its values."""

    samples: np.ndarray
    """(H, W), or (H, W, 3) for RGB, in native byte order."""
    space: Literal["grey", "palette", "rgb", "luma"]
    """Meaning of the samples; of luma and chroma, only the luma is kept."""
    exact: bool
    """Whether the decoder has applied sign and unused bits (JPEG 2000, JPEG-LS)."""
    shift: int = 0
    """Unused bits below the stored ones; above 0 only in old files."""


def decode_frame(file: DicomFile, layout: PixelLayout, index: int) -> Frame:
    """Decode one frame.

    Raises DicomError with the code "truncated", "malformed", "unsupported", "too_large", "no_codec"
    or "undecodable".
    """
    return next(decode_frames(file, layout, (index,)))


def decode_frames(
    file: DicomFile, layout: PixelLayout, indices: Iterable[int]
) -> Generator[Frame, None, None]:
    """Yield frames in the order of `indices`; the table of compressed frames is read once.

    Raises DicomError as `decode_frame`.
    """
    if file.pixels is None:
        raise DicomError("the file has no pixel data", "no_pixels")
    _, location = file.pixels
    syntax = file.transfer_syntax
    if syntax in _NATIVE:
        for index in indices:
            samples = _decode_native(file, layout, location, index)
            yield _frame(samples, layout, layout.photometric, exact=False)
        return
    if layout.is_float:
        raise DicomError("compressed floating-point pixel data are not supported", "unsupported")
    if syntax not in (_DEFLATED_FRAMES, _RLE, *_JPEG, *_JPEG_LS, *_JPEG_2000):
        raise DicomError("unsupported transfer syntax", "unsupported")
    read = _frame_reader(file, layout, location)
    for index in indices:
        photometric = layout.photometric
        if syntax == _DEFLATED_FRAMES:
            samples = _decode_deflated(read(index), layout)
        else:
            samples, photometric = _decode_compressed(syntax or "", read(index), layout)
        yield _frame(samples, layout, photometric, exact=syntax in (*_JPEG_LS, *_JPEG_2000))


def _frame(samples: np.ndarray, layout: PixelLayout, photometric: str, *, exact: bool) -> Frame:
    """Return the frame of decoded samples; `photometric` is their interpretation."""
    space: Literal["grey", "palette", "rgb", "luma"] = "grey"
    if layout.samples == 3:
        space = "luma" if photometric in ("YBR_FULL", "YBR_FULL_422") else "rgb"
        samples = samples[:, :, 0] if space == "luma" and samples.ndim == 3 else samples
    elif photometric == "PALETTE COLOR":
        space = "palette"
    samples = np.ascontiguousarray(samples, samples.dtype.newbyteorder("="))
    if layout.is_float or space in ("rgb", "luma"):
        return Frame(samples, space, exact)
    shift = 0 if exact else _unused_bits_below(samples, layout)
    if samples.itemsize > 2 and not exact:
        samples = _without_unused_bits(samples, layout, shift)
        shift = 0
    _check_sign(samples, layout, shift)
    return Frame(samples, space, exact, shift)


def _unused_bits_below(samples: np.ndarray, layout: PixelLayout) -> int:
    """Return the number of unused bits below the stored ones.

    The high bit should be the number of stored bits - 1. Old files place the stored bits at the
    upper end of the word; others have a wrong number there, which most viewers ignore. The samples
    show which of the two it is. Raises DicomError where they do not.
    """
    stored = layout.bits_stored
    allocated = layout.bits_allocated
    if layout.high_bit == stored - 1 or stored == allocated == layout.high_bit:
        return 0
    # the bits that any sample has set
    bits = int(np.bitwise_or.reduce(samples.view(f"u{samples.itemsize}"), axis=None))
    # without a sign, the stored bits are the same with both numbers
    if layout.high_bit < stored - 1:
        sign_may_be_lower = layout.signed and bits >> layout.high_bit == 1
        if sign_may_be_lower:
            raise damaged(Tag.HIGH_BIT, "contradicts BitsStored")
        return 0
    shift = min(layout.high_bit, allocated - 1) + 1 - stored
    if not bits & ((1 << shift) - 1):
        return shift
    if not bits >> stored or (layout.signed and _is_extended(samples, stored)):
        return 0
    if layout.high_bit >= allocated:
        raise damaged(Tag.HIGH_BIT, "must be below BitsAllocated")
    return shift


def _is_extended(samples: np.ndarray, stored: int) -> bool:
    """Return whether the bits above the stored ones repeat the sign."""
    words = samples.view(f"i{samples.itemsize}")
    above = 8 * samples.itemsize - stored
    return bool((words << above >> above == words).all())


def _without_unused_bits(samples: np.ndarray, layout: PixelLayout, shift: int) -> np.ndarray:
    """Return samples of 32 bits without unused bits, with their sign."""
    above = layout.bits_allocated - layout.bits_stored - shift
    return samples << above >> (above + shift) if above or shift else samples


def _check_sign(samples: np.ndarray, layout: PixelLayout, shift: int) -> None:
    """Raise DicomError if the header does not state whether samples have a sign and the samples
    do not show it.
    """
    if layout.sign_is_stated or layout.bits_stored <= 8:  # samples of 8 bits have no sign
        return
    sign_bit = 1 << (layout.bits_stored + shift - 1)
    if (samples.view(f"u{samples.itemsize}") & sign_bit).any():
        raise damaged(Tag.SIGNED, "is missing, and samples may be negative")


def _decode_native(
    file: DicomFile, layout: PixelLayout, location: Location, index: int
) -> np.ndarray:
    expected = math.ceil(layout.frame_bits * layout.frames / 8)
    if location.length == UNDEFINED:
        raise DicomError(
            "the pixel data are compressed, but the transfer syntax is uncompressed", "malformed"
        )
    available = min(location.length, file.stream.size - location.offset)
    if available < expected:
        raise DicomError(f"expected {expected} bytes of pixel data, got {available}", "truncated")
    start, bit = divmod(index * layout.frame_bits, 8)
    swapped = layout.bits_allocated == 8 and layout.vr == "OW" and not file.elements.encoding.little
    odd = start % 2 if swapped else 0  # bytes written as big-endian words are swapped in pairs
    file.stream.seek(location.offset + start - odd)
    size = math.ceil((bit + layout.frame_bits) / 8) + odd
    file.stream.limit_reads(size + 1)
    data = file.stream.read(size + (size % 2 if swapped else 0))
    if swapped:
        data = np.frombuffer(data, "u2", len(data) // 2).byteswap().tobytes()[odd:]
    return _unpack(data, layout, file.elements.encoding.endian, bit)


def _decode_deflated(packed: bytes, layout: PixelLayout) -> np.ndarray:
    expected = math.ceil(layout.frame_bits / 8)
    try:
        data = zlib.decompressobj(-zlib.MAX_WBITS).decompress(packed, expected)
    except zlib.error:
        raise DicomError("the deflated pixel data are damaged", "malformed") from None
    if len(data) < expected:
        raise DicomError("the deflated pixel data end too early", "truncated")
    return _unpack(data, layout, "<", 0)


def _unpack(data: bytes, layout: PixelLayout, endian: str, bit: int) -> np.ndarray:
    """Return uncompressed samples, (H, W) or (H, W, 3), of a frame that starts at bit `bit` of
    `data`.
    """
    shape = (layout.rows, layout.columns)
    if layout.bits_allocated == 1:
        return np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")[bit:][
            : math.prod(shape)
        ].reshape(shape)
    kind = "f" if layout.is_float else "i" if layout.signed else "u"
    count = layout.frame_bits // layout.bits_allocated
    samples = np.frombuffer(data, f"{endian}{kind}{layout.bits_allocated // 8}", count)
    if layout.photometric == "YBR_FULL_422":
        # two luma samples, then the chroma of both
        return samples.reshape(-1, 4)[:, :2].reshape(shape)
    if layout.samples == 1:
        return samples.reshape(shape)
    return (
        np.moveaxis(samples.reshape(3, *shape), 0, -1)
        if layout.planar
        else samples.reshape(*shape, 3)
    )


def _decode_compressed(
    transfer_syntax: str, frame: bytes, layout: PixelLayout
) -> tuple[np.ndarray, str]:
    """Return the samples and the photometric interpretation after decoding."""
    from pydicom.pixels import get_decoder
    from pydicom.uid import UID

    syntax = UID(transfer_syntax)
    if syntax == _RLE:
        if layout.bits_allocated == 1:
            raise DicomError("run-length encoded single bits are not supported", "unsupported")
        codestream.check_rle_header(frame, layout.samples * layout.bits_allocated // 8)
        # pydicom's own decoder does not limit its output
        return _decode(syntax, "pylibjpeg", frame, layout)
    if syntax in _JPEG_2000:
        _check_codestream(codestream.read_jpeg2000_header(frame), layout)
        return _decode(syntax, "pylibjpeg", frame, layout)
    header = codestream.read_jpeg_header(frame)
    _check_codestream(header, layout)
    if syntax in _JPEG_LS:
        # pyjpegls has no wheel for the newest versions of Python
        codecs = get_decoder(syntax).available_plugins
        return _decode(syntax, "pyjpegls" if "pyjpegls" in codecs else "gdcm", frame, layout)
    if excess := codestream.excess_of_scans(frame):
        raise DicomError(excess, "too_large")
    if header.precision == 8:
        return _decode_jpeg_8(syntax, frame, layout, header)
    if syntax in _JPEG_LOSSLESS and header.samples == 1:
        return _decode(syntax, "gdcm", codestream.strip_metadata(frame), layout)
    if "pylibjpeg" not in get_decoder(syntax).available_plugins:
        message = (
            f"no codec decodes {header.precision}-bit {syntax.name}: pip install "
            f'"medvl[gpl-codecs]"'
        )
        raise DicomError(message, "no_codec")
    return _decode(syntax, "pylibjpeg", frame, layout)


def _decode_jpeg_8(
    syntax: "UID", frame: bytes, layout: PixelLayout, header: Codestream
) -> tuple[np.ndarray, str]:
    """Decode lossy or lossless JPEG of 8 bits with Pillow.

    Where the file states its colour transform, Pillow returns RGB, whatever the DICOM header
    claims. GDCM aborts the process when the two disagree.
    """
    try:
        with Image.open(BytesIO(frame), formats=("JPEG",)) as image:
            if layout.photometric == "RGB" and not header.states_color:
                # skip Pillow's conversion from YCbCr: the samples are RGB
                image.draft("YCbCr", image.size)
            return np.asarray(image), "RGB" if layout.samples == 3 else layout.photometric
    except (OSError, SyntaxError, ValueError) as error:
        raise DicomError(
            f"the {syntax.name} pixel data are damaged ({type(error).__name__})", "undecodable"
        ) from error


def _decode(
    syntax: "UID", plugin: str, frame: bytes, layout: PixelLayout
) -> tuple[np.ndarray, str]:
    """Decode a compressed frame with one of pydicom's plugins."""
    from pydicom.encaps import encapsulate
    from pydicom.pixels import get_decoder

    capsule = encapsulate([frame], has_bot=False)
    try:
        decoder = get_decoder(syntax)
        samples, properties = decoder.as_array(
            capsule, index=0, raw=True, decoding_plugin=plugin, **layout.options
        )
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except (
        BaseException
    ) as error:  # codecs may raise anything, and panics of Rust are not Exceptions
        raise DicomError(
            f"the {syntax.name} pixel data are damaged ({type(error).__name__})", "undecodable"
        ) from error
    return samples, str(properties["photometric_interpretation"])


def _check_codestream(header: Codestream, layout: PixelLayout) -> None:
    if (header.rows, header.columns, header.samples) != (
        layout.rows,
        layout.columns,
        layout.samples,
    ):
        sizes = [f"{part.rows} x {part.columns} x {part.samples}" for part in (header, layout)]
        raise DicomError(
            f"the compressed image claims {sizes[0]} samples, the header {sizes[1]}", "malformed"
        )
    if header.parts > _MAX_PARTS:
        raise DicomError("the compressed image has too many tiles or code blocks", "too_large")
    if header.precision > layout.bits_allocated:
        bits = f"{header.precision} bits, the header allocates {layout.bits_allocated}"
        raise DicomError(f"the compressed image has {bits}", "malformed")


def _frame_reader(
    file: DicomFile, layout: PixelLayout, location: Location
) -> Callable[[int], bytes]:
    """Return the function that reads the bytes of a compressed frame. Raises DicomError, as the
    function does.
    """
    from pydicom.encaps import get_frame, parse_basic_offsets, parse_fragments

    stream = file.stream
    limits = file.stream.limits
    offsets = file.elements.raw(Tag.FRAME_OFFSETS)
    lengths = file.elements.raw(Tag.FRAME_LENGTHS)
    tables = (offsets, lengths) if offsets and lengths else None
    most = limits.encoded_bytes + 4 * limits.frames + 8 * limits.elements
    incomplete = DicomError("the compressed pixel data are not complete fragments", "malformed")
    stream.limit_reads(most)
    stream.seek(location.offset + 4)
    if int.from_bytes(stream.read_exactly(4), "little") > 4 * limits.frames:
        raise DicomError(
            "the table of frame offsets is over DicomLimits.frames", "too_large", field="frames"
        )
    stream.seek(location.offset)
    try:
        parse_basic_offsets(stream)
        _, fragments = parse_fragments(stream)
    except (ValueError, struct.error):
        raise incomplete from None
    if fragments:
        stream.seek(fragments[-1] + 4)
        if fragments[-1] + 8 + int.from_bytes(stream.read_exactly(4), "little") > stream.size:
            raise DicomError(
                "the file ends within its compressed pixel data: copy it again", "truncated"
            )
    has_one_each = len(fragments) == layout.frames > 1 and tables is None

    def read(index: int) -> bytes:
        stream.limit_reads(most)
        if has_one_each:  # pydicom reads all frames before the one that is asked for
            stream.seek(fragments[index] + 4)
            return stream.read_exactly(int.from_bytes(stream.read_exactly(4), "little"))
        stream.seek(location.offset)
        try:
            return get_frame(stream, index, number_of_frames=layout.frames, extended_offsets=tables)
        except (ValueError, struct.error):
            raise incomplete from None

    return read
