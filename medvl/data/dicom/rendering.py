"""Rendering of stored samples as grey values: modality LUT, VOI LUT or window, inversion (DICOM
PS3.3 C.11.1, C.11.2).

Every step is a function of one stored value. For samples of up to 16 bits, the chain is computed
once for each possible value, and the image is mapped through that table in a single pass.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Literal

import cv2
import numpy as np

from medvl.data.dicom.parser import Elements, damaged
from medvl.data.dicom.pixels import Frame, PixelLayout
from medvl.data.dicom.tags import Tag
from medvl.errors import DicomError

_Interval = tuple[float, float]
Shading = Literal["voi_lut", "window", "percentiles", "full_range", "palette", "color"]

PERCENTILES = (0.5, 99.5)
"""Percentiles shown as black and white where a file has neither VOI LUT nor window. Half a per cent
is more than lead markers, burned-in text and dead pixels cover, and less than any organ.
"""

_LUMA = np.array([0.299, 0.587, 0.114])  # BT.601, as JPEG and OpenCV have it
# kinds of segments of a palette
_VALUES = 0
_LINE = 1
_REPEAT = 2
_FUNCTIONS = {"LINEAR": "LINEAR", "LINEAREXACT": "LINEAR_EXACT", "SIGMOID": "SIGMOID"}
_BLOCK = 1 << 20
_SAMPLE = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class Table:
    """Look-up table: entry i is for the value first + i; values beyond either end get the entry
    at that end.
    """

    first: int
    entries: np.ndarray

    def __call__(self, values: np.ndarray) -> np.ndarray:
        index = np.clip(np.rint(values) - self.first, 0, len(self.entries) - 1)
        return self.entries[index.astype(np.int64)]


@dataclasses.dataclass(frozen=True, slots=True)
class Window:
    """Window of `width` around `center` with one of DICOM's three functions (PS3.3 C.11.2.1.2
    and .3).
    """

    center: float
    width: float
    function: str

    def __call__(self, values: np.ndarray) -> np.ndarray:
        if self.function == "SIGMOID":
            exponent = np.clip(-4 * (values - self.center) / self.width, -700, 700)
            return 1 / (1 + np.exp(exponent))
        if self.function == "LINEAR":
            if self.width == 1:
                return (values > self.center - 0.5).astype(np.float64)
            return np.clip((values - (self.center - 0.5)) / (self.width - 1) + 0.5, 0, 1)
        return np.clip((values - self.center) / self.width + 0.5, 0, 1)


@dataclasses.dataclass(frozen=True, slots=True)
class Range:
    """Linear function between two values. A constant image has low = high and is black."""

    low: float
    high: float

    def __call__(self, values: np.ndarray) -> np.ndarray:
        if not self.high > self.low:
            return np.zeros(values.shape)
        return np.clip((values - self.low) / (self.high - self.low), 0, 1)


@dataclasses.dataclass(frozen=True, slots=True)
class Display:
    """Transformations of a file's samples for display."""

    modality: Callable[[np.ndarray], np.ndarray] | None
    """Function from stored values to values (such as Hounsfield units); None for the identity."""
    voi: Table | Window | None
    inverted: bool
    padding: tuple[float, float] | None
    """First and last stored value of pixel padding."""
    palette: Table | None
    """Luma of the palette colours."""

    @classmethod
    def from_elements(cls, elements: Elements, layout: PixelLayout, frame: int) -> "Display":
        """Read the transformations of one frame. Raises DicomError when a table is damaged."""
        values = elements
        voi = elements
        groups = [elements.item(Tag.FRAME_GROUPS, frame), elements.item(Tag.SHARED_GROUPS)]
        for group in filter(None, groups):
            values = values if values is not elements else group.item(Tag.FRAME_VALUES) or elements
            voi = voi if voi is not elements else group.item(Tag.FRAME_VOI) or elements
        modality, interval = _modality(values, layout)
        return cls(
            modality=modality,
            voi=_voi(voi, layout, interval),
            inverted=layout.photometric == "MONOCHROME1" or _has_inverse_shape(elements),
            padding=_padding(elements, layout),
            palette=_palette(elements, layout) if layout.photometric == "PALETTE COLOR" else None,
        )


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class LinearValues:
    """Values of a frame before a window is applied, for a viewer."""

    values_HW: np.ndarray
    """float32, after the modality LUT; NaN is padding, which is shown black."""
    center: float
    width: float
    """Window of the file; where it has a VOI LUT or none at all, the range of values that is
    shown.
    """
    inverted: bool
    """Whether the shades of a window are inverted (MONOCHROME1)."""


def _padding(elements: Elements, layout: PixelLayout) -> tuple[float, float] | None:
    """Return the first and last stored value of pixel padding; floating-point samples have
    elements of their own.
    """
    if layout.is_float:
        tags = (
            (Tag.FLOAT_PADDING, Tag.FLOAT_PADDING_LIMIT)
            if layout.keyword == "FloatPixelData"
            else (Tag.DOUBLE_PADDING, Tag.DOUBLE_PADDING_LIMIT)
        )
        first, last = (elements.number(tag) for tag in tags)
    else:
        first, last = (
            _stored(elements.integer(tag), layout) for tag in (Tag.PADDING, Tag.PADDING_LIMIT)
        )
    if first is None:
        return None
    last = first if last is None else last
    return min(first, last), max(first, last)


def _stored(value: int | None, layout: PixelLayout) -> int | None:
    """Return a stored value with the sign of the samples; some writers store it with the other
    one.
    """
    if value is None:
        return None
    if layout.signed and 1 << 15 <= value < 1 << 16:
        return value - (1 << 16)
    return value + (1 << 16) if not layout.signed and -(1 << 15) <= value < 0 else value


def _has_inverse_shape(elements: Elements) -> bool:
    shape = elements.code(Tag.SHAPE)
    if shape not in (None, "IDENTITY", "INVERSE", "LINOD"):
        raise damaged(Tag.SHAPE)
    return shape == "INVERSE"


def _modality(
    elements: Elements, layout: PixelLayout
) -> tuple[Callable[[np.ndarray], np.ndarray] | None, _Interval]:
    """Return the modality LUT or rescale, and the interval of the values that it can produce."""
    stored = _stored_interval(layout)
    item = elements.item(Tag.MODALITY_LUT)
    if item is not None:
        table = _read_table(item, stored)
        return table, (float(table.entries.min()), float(table.entries.max()))
    slope = elements.number(Tag.SLOPE)
    intercept = elements.number(Tag.INTERCEPT)
    slope = 1.0 if slope is None else slope
    intercept = intercept or 0.0
    if not slope:
        raise damaged(Tag.SLOPE, "is 0")
    if (slope, intercept) == (1, 0):
        return None, stored
    ends = sorted(end * slope + intercept for end in stored)
    return (lambda values: values * slope + intercept), (ends[0], ends[1])


def _stored_interval(layout: PixelLayout) -> _Interval:
    if layout.is_float:
        return -math.inf, math.inf
    if layout.signed:
        return -(2.0 ** (layout.bits_stored - 1)), 2.0 ** (layout.bits_stored - 1) - 1
    return 0.0, 2.0**layout.bits_stored - 1


def _voi(elements: Elements, layout: PixelLayout, values: _Interval) -> Table | Window | None:
    """Return the VOI LUT, else the first window, else None.

    A window of width 0 is none: that is how many writers state that there is none, and viewers
    ignore it. Raises DicomError if a number before the first window is damaged.
    """
    item = elements.item(Tag.VOI_LUT)
    if item is not None:
        table = _read_table(item, values)
        # Some files claim 16 bits for entries of 12, so white is derived from the largest entry.
        white = (1 << int(table.entries.max()).bit_length()) - 1
        return Table(table.first, table.entries / max(white, 1))
    windows = zip(
        elements.numbers(Tag.WINDOW_CENTER), elements.numbers(Tag.WINDOW_WIDTH), strict=False
    )
    for center, width in windows:
        if center is None or not width:
            continue
        for number, tag in ((center, Tag.WINDOW_CENTER), (width, Tag.WINDOW_WIDTH)):
            if not math.isfinite(number):
                raise damaged(tag)
        if width < 0:
            raise damaged(Tag.WINDOW_WIDTH, "is negative")
        function = elements.code(Tag.WINDOW_FUNCTION) or "LINEAR"
        if function not in _FUNCTIONS:
            raise damaged(Tag.WINDOW_FUNCTION)
        # LINEAR assumes integer values and a width of at least 1.
        is_exact = function == "LINEAR" and (layout.is_float or width < 1)
        return Window(center, width, "LINEAR_EXACT" if is_exact else _FUNCTIONS[function])
    return None


def _read_table(item: Elements, values: _Interval) -> Table:
    """Read a LUT for values of an interval, with its descriptor (PS3.3 C.11.1.1.1)."""
    count, first, bits = _descriptor(item, Tag.LUT_DESCRIPTOR, values)
    return Table(first, _entries(item, Tag.LUT_DATA, count, bits).astype(np.float64))


def _descriptor(elements: Elements, tag: Tag, values: _Interval) -> tuple[int, int, int]:
    """Read (number of entries, value of the first, bits per entry).

    The first value is stored in 16 bits, with a sign or without. Not all writers choose the VR that
    fits, so that sign is taken with which the table covers more of the values; where this is the
    same, the sign of the VR.
    """
    numbers = elements.numbers(tag)
    words = [0 if number is None else int(number) for number in numbers]
    is_damaged = len(words) < 3 or None in numbers or list(words) != numbers
    if is_damaged or not all(-(1 << 15) <= word <= 1 << 16 for word in words[:3]):
        raise damaged(tag)
    count = words[0] % (1 << 16) or 1 << 16
    is_signed = elements.vr(tag) == "SS" or (elements.vr(tag) in ("", "UN", "OW") and values[0] < 0)
    unsigned = words[1] % (1 << 16)
    firsts = (unsigned, unsigned - (1 << 16)) if unsigned >= 1 << 15 else (unsigned,)
    covered = {first: min(values[1], first + count - 1) - max(values[0], first) for first in firsts}
    first = max(firsts, key=lambda first: (covered[first], (first < 0) == is_signed))
    if covered[first] < 0:
        raise damaged(tag, "describes a table for other values than those of the image")
    return count, first, words[2] % (1 << 16)


def _entries(elements: Elements, tag: Tag, count: int, bits: int) -> np.ndarray:
    """Read the entries of a table: words, or bytes where there are as many bytes as entries."""
    data = elements.raw(tag) or b""
    width = 4 if elements.vr(tag) in ("UL", "SL") else 2
    if len(data) >= width * count:
        return np.frombuffer(data, f"{elements.encoding.endian}u{width}", count)
    if len(data) in (count, count + 1) or (len(data) > count and bits <= 8):
        # bytes in words of the other order
        if elements.vr(tag) == "OW" and not elements.encoding.little:
            data = np.frombuffer(data + bytes(len(data) % 2), "u2").byteswap().tobytes()
        return np.frombuffer(data, np.uint8, count)
    raise damaged(tag, "has fewer entries than its descriptor claims")


def _palette(elements: Elements, layout: PixelLayout) -> Table:
    """Read the luma of a colour palette (PS3.3 C.7.9)."""
    count, first, bits = _descriptor(elements, Tag.RED_DESCRIPTOR, _stored_interval(layout))
    tables = []
    for plain, segments in (
        (Tag.RED_PALETTE, Tag.RED_SEGMENTS),
        (Tag.GREEN_PALETTE, Tag.GREEN_SEGMENTS),
        (Tag.BLUE_PALETTE, Tag.BLUE_SEGMENTS),
    ):
        data = elements.raw(segments)
        if data is None:
            tables.append(_entries(elements, plain, count, bits))
        else:
            width = 1 if bits == 8 else 2
            words = np.frombuffer(
                data, f"{elements.encoding.endian}u{width}", len(data) // width
            ).tolist()
            tables.append(np.array(_expand_segments(words, width, count)))
    white = 255 if max(table.max() for table in tables) <= 255 else 65535
    return Table(first, np.stack(tables, axis=-1) @ _LUMA / white)


def _expand_segments(words: list[int], width: int, count: int) -> list[int]:
    """Expand a segmented palette of words of `width` bytes to `count` entries (PS3.3 C.7.9.2)."""
    entries: list[int] = []
    for number, (kind, length, content) in enumerate(_segments(words, width, 0, len(words))):
        if kind == _VALUES:
            entries += content
        elif entries and content:  # a line from the last entry to a new one
            entries += (
                np.rint(np.linspace(entries[-1], content[0], length + 1)[1:]).astype(int).tolist()
            )
        if len(entries) >= count:
            return entries[:count]
        if number > count:
            break
    raise DicomError(
        "a segmented palette has fewer entries than its descriptor claims", "malformed"
    )


def _segments(
    words: list[int], width: int, start: int, end: int, *, copied: bool = False
) -> Iterator[tuple[int, int, list[int]]]:
    """Yield (kind, length, content) of the value and line segments, with repeat segments
    resolved.
    """
    while start + 2 < end:
        kind, length = words[start : start + 2]
        if kind == _REPEAT and not copied and start + 3 < end:
            source = (words[start + 2] | words[start + 3] << 8 * width) // width
            repeated = _segments(words, width, source, start, copied=True)
            yield from itertools.islice(repeated, length)
            start += 4
        elif kind in (_VALUES, _LINE) and length:
            size = length if kind == _VALUES else 1
            yield kind, length, words[start + 2 : start + 2 + size]
            start += 2 + size
        else:
            return


def render(
    frame: Frame, display: Display, layout: PixelLayout, bits: int
) -> tuple[np.ndarray, Shading]:
    """Return the frame as grey values, uint8 or uint16 (H, W), and how their range was chosen."""
    top = (1 << bits) - 1
    if frame.space in ("rgb", "luma"):
        return _render_color(frame, layout, top), "color"
    if display.palette:
        if frame.samples.itemsize > 2:
            raise DicomError(
                "palettes with indices of more than 16 bits are not supported", "unsupported"
            )
        table = _quantize(display.palette(_stored_values(frame, layout)), top)
        return cv2.LUT(_codes(frame.samples), table), "palette"
    if frame.samples.itemsize > 2:
        return _render_wide(frame, display, layout, top)
    return _render_narrow(frame, display, layout, top)


def modality_transform(
    elements: Elements, layout: PixelLayout, values: Elements | None = None
) -> Callable[[Frame], np.ndarray]:
    """Return the function from a grey frame to its values after the modality LUT or rescale:
    float32 (H, W), NaN where it is padding.

    Args:
        elements: of the file.
        layout: of its pixels.
        values: elements of the frame's modality LUT or rescale; None: those of the file.

    Raises DicomError for a damaged table; the function does for colour ("unsupported").
    """
    modality, _ = _modality(elements if values is None else values, layout)
    padding = _padding(elements, layout)

    def transform(frame: Frame) -> np.ndarray:
        if frame.space != "grey":
            raise DicomError("expected grey samples, got colour", "unsupported")
        return _values_of(frame, layout, modality, padding)

    return transform


def _values_of(
    frame: Frame,
    layout: PixelLayout,
    modality: Callable[[np.ndarray], np.ndarray] | None,
    padding: _Interval | None,
) -> np.ndarray:
    narrow = frame.samples.itemsize <= 2
    stored = _stored_values(frame, layout) if narrow else frame.samples.astype(np.float64)
    values = (modality(stored) if modality else stored).astype(np.float32)
    values[_is_padding(stored, padding) | ~np.isfinite(stored)] = np.nan
    return values[_codes(frame.samples)] if narrow else values


def linear_values(frame: Frame, display: Display, layout: PixelLayout) -> LinearValues | None:
    """Return the values that a window applies to; None for colour and palettes."""
    if frame.space in ("rgb", "luma") or display.palette:
        return None
    values_HW = _values_of(frame, layout, display.modality, display.padding)
    shade, _ = _choose(display, layout)
    if isinstance(shade, Window):
        return LinearValues(values_HW, shade.center, shade.width, display.inverted)
    if isinstance(shade, Table):
        low = float(shade.first)
        high = float(shade.first + len(shade.entries) - 1)
    else:
        sample = values_HW.ravel()[:: max(1, values_HW.size // _SAMPLE)]
        sample = sample[np.isfinite(sample)]
        window = (
            shade if isinstance(shade, Range) else _percentile_range(sample, np.ones(sample.shape))
        )
        low = window.low
        high = window.high
    return LinearValues(values_HW, (low + high) / 2, max(high - low, 1e-6), display.inverted)


def _render_narrow(
    frame: Frame, display: Display, layout: PixelLayout, top: int
) -> tuple[np.ndarray, Shading]:
    """Render samples of up to 16 bits through a table of all possible values."""
    codes_HW = _codes(frame.samples)
    stored = _stored_values(frame, layout)
    padding = _is_padding(stored, display.padding)
    values = display.modality(stored) if display.modality else stored
    shade, shading = _choose(display, layout)
    if shade is None:
        counts = cv2.calcHist([codes_HW], [0], None, [len(stored)], [0, len(stored)]).ravel()
        counts[padding] = 0
        shade = _percentile_range(values, counts)
    table = _finish(shade(values), padding, display, top)
    return cv2.LUT(codes_HW, table), shading


def _render_wide(
    frame: Frame, display: Display, layout: PixelLayout, top: int
) -> tuple[np.ndarray, Shading]:
    """Render wider or floating-point samples block by block, to keep temporary arrays small."""
    shade, shading = _choose(display, layout)
    samples = frame.samples.ravel()
    if shade is None:
        stored = samples[:: max(1, samples.size // _SAMPLE)].astype(np.float64)
        stored = stored[np.isfinite(stored) & ~_is_padding(stored, display.padding)]
        values = display.modality(stored) if display.modality else stored
        shade = _percentile_range(values, np.ones(values.shape))
    out = np.empty(samples.size, np.uint8 if top == 255 else np.uint16)
    for start in range(0, samples.size, _BLOCK):
        stored = samples[start : start + _BLOCK].astype(np.float64)
        missing = _is_padding(stored, display.padding) | ~np.isfinite(stored)
        stored[missing] = 0
        values = display.modality(stored) if display.modality else stored
        out[start : start + _BLOCK] = _finish(shade(values), missing, display, top)
    return out.reshape(frame.samples.shape), shading


def _render_color(frame: Frame, layout: PixelLayout, top: int) -> np.ndarray:
    """Render colour as luma; windows do not apply to colour (PS3.3 C.11.2)."""
    samples = _codes(frame.samples)
    white = (1 << layout.bits_stored) - 1
    if frame.space == "luma":
        grey_HW = samples
    elif samples.itemsize <= 2:
        grey_HW = cv2.cvtColor(samples, cv2.COLOR_RGB2GRAY)
    else:
        rows = range(0, len(samples), max(1, _BLOCK // samples.shape[1]))
        grey_HW = np.concatenate([samples[row : row + rows.step] @ _LUMA for row in rows])
    if grey_HW.dtype == np.uint8 and white == top:
        return grey_HW
    if grey_HW.itemsize > 2:
        return _quantize(Range(0, white)(grey_HW), top)
    levels = np.arange(1 << 8 * grey_HW.itemsize, dtype=np.float64)
    return cv2.LUT(grey_HW, _quantize(Range(0, white)(levels), top))


def _choose(display: Display, layout: PixelLayout) -> tuple[Table | Window | Range | None, Shading]:
    """Return the function of the file (None for percentiles) and its name; plain 8-bit samples
    use the full range.
    """
    if isinstance(display.voi, Table):
        return display.voi, "voi_lut"
    if isinstance(display.voi, Window):
        return display.voi, "window"
    if layout.bits_stored <= 8 and not layout.signed and display.modality is None:
        return Range(0, (1 << layout.bits_stored) - 1), "full_range"
    return None, "percentiles"


def _percentile_range(values: np.ndarray, counts: np.ndarray) -> Range:
    """Return the range between `PERCENTILES` of values occurring `counts` times, or the full
    range if equal.
    """
    present = np.flatnonzero(counts)
    if not present.size:
        return Range(0, 0)
    order = present[np.argsort(values[present], kind="stable")]
    cumulated = np.cumsum(counts[order], dtype=np.float64)
    low, high = np.searchsorted(cumulated, np.array(PERCENTILES) / 100 * cumulated[-1])
    ends = values[order[low]], values[order[min(high, len(order) - 1)]]
    if ends[0] == ends[1]:
        ends = values[order[0]], values[order[-1]]
    return Range(float(ends[0]), float(ends[1]))


def _finish(shades: np.ndarray, padding: np.ndarray, display: Display, top: int) -> np.ndarray:
    if display.inverted:
        shades = 1 - shades
    return _quantize(np.where(padding, 0, shades), top)


def _quantize(shades: np.ndarray, top: int) -> np.ndarray:
    return np.rint(shades * top).astype(np.uint8 if top == 255 else np.uint16)


def _is_padding(stored: np.ndarray, padding: _Interval | None) -> np.ndarray:
    if padding is None:
        return np.zeros(stored.shape, bool)
    return (stored >= padding[0]) & (stored <= padding[1])


def _codes(samples: np.ndarray) -> np.ndarray:
    """Return the same bits as unsigned integers, as table indices."""
    return samples.view(f"u{samples.itemsize}")


def _stored_values(frame: Frame, layout: PixelLayout) -> np.ndarray:
    """Return the stored value (float64) of each 8-bit or 16-bit code: unused bits removed, sign
    applied.
    """
    codes = np.arange(1 << 8 * frame.samples.itemsize, dtype=np.int64)
    bits = 8 * frame.samples.itemsize
    if not frame.exact:
        bits = min(bits, layout.bits_stored)
        codes = (codes >> frame.shift) & ((1 << bits) - 1)
    if layout.signed:
        codes = np.where(codes >= 1 << (bits - 1), codes - (1 << bits), codes)
    return codes.astype(np.float64)
