"""Rendering: each step of the DICOM standard against its formula, on generated files."""

import numpy as np
import pytest
from helpers.dicom_builder import image_dataset, write_dataset
from helpers.errors import raises
from pydicom.dataset import Dataset
from pydicom.sequence import Sequence

from medvl.data.dicom.reader import read_dicom
from medvl.errors import DicomError

RAMP = np.arange(4096, dtype=np.uint16).reshape(64, 64)
TWELVE_BITS = {"BitsStored": 12, "HighBit": 11}


@pytest.fixture
def shades(tmp_path):
    """Return a function that writes `pixels` with header fields to a file and reads it."""

    def read(
        pixels: np.ndarray, *, bits: int = 8, frame: int | None = None, **fields: object
    ) -> np.ndarray:
        path = write_dataset(tmp_path / "image.dcm", image_dataset(pixels, **fields))
        return read_dicom(path, bits=bits, frame=frame).pixels_HW

    return read


def table(tag_data: np.ndarray, first: int, bits: int, vr: str = "US") -> Sequence:
    """Return a LUT sequence with one item."""
    item = Dataset()
    item.add_new(0x00283002, vr, [len(tag_data) % 65536, first, bits])
    item.add_new(0x00283006, "OW", tag_data.astype("<u2").tobytes())
    return Sequence([item])


def test_plain_8_bit_samples_are_unchanged(tmp_path):
    pixels = np.random.default_rng(0).integers(40, 200, (31, 17), dtype=np.uint8)
    image = read_dicom(write_dataset(tmp_path / "a.dcm", image_dataset(pixels)))
    assert image.pixels_HW.dtype == np.uint8
    assert image.shading == "full_range"
    assert np.array_equal(image.pixels_HW, pixels)
    wide = read_dicom(tmp_path / "a.dcm", bits=16).pixels_HW
    assert wide.dtype == np.uint16
    assert np.array_equal(wide, pixels.astype(int) * 257)


@pytest.mark.parametrize(
    ("fields", "inverted"),
    [
        ({"PhotometricInterpretation": "MONOCHROME1"}, True),
        ({"PhotometricInterpretation": "MONOCHROME1", "PresentationLUTShape": "INVERSE"}, True),
        ({"PresentationLUTShape": "INVERSE"}, True),
        ({"PresentationLUTShape": "IDENTITY"}, False),
        ({"PhotometricInterpretation": None}, False),
    ],
)
def test_inversion(shades, fields, inverted):
    pixels = np.random.default_rng(0).integers(0, 256, (9, 9), dtype=np.uint8)
    assert np.array_equal(shades(pixels, **fields), 255 - pixels if inverted else pixels)


def window(value: float, center: float, width: float, function: str) -> float:
    """Apply a window as in the pseudo-code of PS3.3 C.11.2.1.2.1 and C.11.2.1.3, with an output
    of 0 to 1.
    """
    if function == "SIGMOID":
        return (
            1 + np.tanh(2 * (value - center) / width)
        ) / 2  # 1 / (1 + exp(-4 (value - center) / width))
    half, shift, span = (
        (width / 2, 0, width) if function == "LINEAR_EXACT" else ((width - 1) / 2, 0.5, width - 1)
    )
    if value <= center - shift - half:
        return 0
    if value > center - shift + half:
        return 1
    return (value - (center - shift)) / span + 0.5


@pytest.mark.parametrize("function", ["LINEAR", "LINEAR_EXACT", "SIGMOID", None])
@pytest.mark.parametrize(("center", "width"), [(2048, 4096), (100, 1), (1000.5, 333), (0, 10)])
@pytest.mark.parametrize(("slope", "intercept"), [(1, 0), (0.5, -1024), (-2, 3000)])
def test_windows(shades, function, center, width, slope, intercept):
    fields = {
        "WindowCenter": [center, 7],
        "WindowWidth": [width, 9],
        "VOILUTFunction": function,
    } | TWELVE_BITS
    fields |= {"RescaleSlope": slope, "RescaleIntercept": intercept}
    if function is None:
        del fields["VOILUTFunction"]
    pixels = shades(RAMP, bits=16, **fields)
    expected = [
        window(value * slope + intercept, center, width, function or "LINEAR")
        for value in range(4096)
    ]
    assert np.abs(pixels.ravel() - np.array(expected) * 65535).max() <= 0.5
    assert np.abs(shades(RAMP, **fields).ravel() - np.array(expected) * 255).max() <= 0.5


@pytest.mark.parametrize("fields", [{"WindowWidth": 0}, {"WindowWidth": ""}, {"WindowCenter": ""}])
def test_windows_without_a_width_are_ignored(tmp_path, fields):
    path = tmp_path / "a.dcm"
    write_dataset(
        path,
        image_dataset(RAMP, **{"WindowCenter": 10, "WindowWidth": 20, **TWELVE_BITS, **fields}),
    )
    assert read_dicom(path).shading == "percentiles"


def test_the_first_window_with_a_width_applies(shades):
    fields = {"WindowCenter": [10, 700, 9], "WindowWidth": [0, 900, 20], **TWELVE_BITS}
    assert np.array_equal(
        shades(RAMP, **fields), shades(RAMP, **(fields | {"WindowCenter": 700, "WindowWidth": 900}))
    )


def test_percentile_window(shades):
    random = np.random.default_rng(0)
    pixels = random.integers(1000, 3000, (200, 150), dtype=np.uint16)
    pixels[0, :50], pixels[1, :60] = 0, 4095  # far less than half a per cent
    ordered = np.sort(pixels.ravel())
    low, high = (
        ordered[int(np.ceil(0.005 * pixels.size)) - 1],
        ordered[int(np.ceil(0.995 * pixels.size)) - 1],
    )
    expected = np.clip((pixels - float(low)) / (float(high) - low), 0, 1)
    assert np.abs(shades(pixels, **TWELVE_BITS) - 255 * expected).max() <= 0.5
    assert np.abs(shades(pixels.astype(np.int16) - 2000) - 255 * expected).max() <= 0.5
    assert np.abs(shades(pixels.astype(np.uint32) * 70000) - 255 * expected).max() <= 0.5


def test_equal_percentiles_use_the_full_range(shades):
    pixels = np.full((100, 100), 50, np.uint16)
    pixels[3, 4] = 60
    assert shades(pixels)[3, 4] == 255
    assert shades(pixels)[0, 0] == 0


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int16, np.uint32])
@pytest.mark.parametrize("photometric", ["MONOCHROME1", "MONOCHROME2"])
def test_constant_images_are_constant(shades, dtype, photometric):
    pixels = shades(np.full((5, 6), 100, dtype), PhotometricInterpretation=photometric)
    assert pixels.shape == (5, 6)
    assert pixels.min() == pixels.max()


@pytest.mark.parametrize("photometric", ["MONOCHROME1", "MONOCHROME2"])
def test_padding_is_black_and_excluded_from_percentiles(shades, photometric):
    pixels = np.random.default_rng(0).integers(1000, 2000, (60, 60), dtype=np.uint16)
    bare = shades(pixels[:40], PhotometricInterpretation=photometric)
    pixels[40:50], pixels[50:] = 60000, 60007
    padding = {"PixelPaddingValue": 60000, "PixelPaddingRangeLimit": 60010}
    padded = shades(pixels, PhotometricInterpretation=photometric, **padding)
    assert np.array_equal(padded[:40], bare)
    assert not padded[40:].any()
    assert not shades(np.full((4, 4), 60000, np.uint16), **padding).any()


def test_signed_padding_and_values(shades):
    pixels = np.linspace(-1000, 1000, 64 * 64).astype(np.int16).reshape(64, 64)
    pixels[0] = -2000
    fields = {"PixelPaddingValue": -2000, "WindowCenter": 0, "WindowWidth": 2001}
    expected = np.array(
        [0 if value == -2000 else window(value, 0, 2001, "LINEAR") for value in pixels.ravel()]
    )
    assert np.abs(shades(pixels, **fields).ravel() - 255 * expected).max() <= 0.5


def test_unused_bits_are_ignored(shades):
    values = np.arange(-2048, 2048).reshape(64, 64)
    fields = {"WindowCenter": 0, "WindowWidth": 4096, "PixelRepresentation": 1, **TWELVE_BITS}
    clean = shades(values.astype(np.int16), **fields)
    dirty = (values & 0xFFF) | np.random.default_rng(0).integers(
        0, 16, values.shape
    ) << 12  # an old overlay
    assert np.array_equal(shades(dirty.astype(np.uint16), **fields), clean)
    shifted = (values << 4).astype(np.int16)
    assert np.array_equal(shades(shifted, **(fields | {"HighBit": 15})), clean)


def test_bits_stored_default_to_those_allocated(shades):
    expected = shades(RAMP, WindowCenter=2048, WindowWidth=4096)
    assert np.array_equal(
        shades(RAMP, BitsStored=None, WindowCenter=2048, WindowWidth=4096), expected
    )


def test_modality_lut(shades):
    entries = np.arange(1000, 0, -1)
    pixels = shades(
        RAMP, bits=16, ModalityLUTSequence=table(entries, 100, 16), WindowCenter=500,
        WindowWidth=1000, VOILUTFunction="LINEAR_EXACT",
    )  # fmt: skip
    values = entries[np.clip(RAMP.astype(int) - 100, 0, 999)]
    assert np.abs(pixels - 65535 * np.clip(values / 1000, 0, 1)).max() <= 0.5


@pytest.mark.parametrize("claimed_bits", [12, 16])
def test_voi_lut_takes_precedence_over_the_window(shades, claimed_bits):
    entries = 4095 - np.arange(2000) * 2  # falling: an inverted look-up table
    pixels = shades(
        RAMP,
        bits=16,
        VOILUTSequence=table(entries, 50, claimed_bits),
        WindowCenter=1,
        WindowWidth=2,
        **TWELVE_BITS,
    )
    assert (
        np.abs(pixels - 65535 * entries[np.clip(RAMP.astype(int) - 50, 0, 1999)] / 4095).max()
        <= 0.5
    )


def test_voi_lut_of_negative_values(shades):
    entries = np.arange(256)
    pixels = shades(
        RAMP,
        RescaleSlope=1,
        RescaleIntercept=-1024,
        VOILUTSequence=table(entries, -128, 8, "SS"),
        **TWELVE_BITS,
    )
    assert np.array_equal(pixels, np.clip(RAMP.astype(int) - 1024 + 128, 0, 255))


def test_multi_frame_files_require_a_frame(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (3, 8, 9), dtype=np.uint8)
    path = write_dataset(tmp_path / "a.dcm", image_dataset(pixels, NumberOfFrames=3))
    with raises(DicomError, "multi_frame", "frame"):
        read_dicom(path)
    for frame in range(3):
        image = read_dicom(path, frame=frame)
        assert np.array_equal(image.pixels_HW, pixels[frame])
        assert image.header.frames == 3
    with raises(DicomError, "multi_frame", "frame"):
        read_dicom(path, frame=3)
    single = write_dataset(tmp_path / "b.dcm", image_dataset(pixels[0], NumberOfFrames=1))
    assert np.array_equal(read_dicom(single, frame=0).pixels_HW, read_dicom(single).pixels_HW)


def test_functional_groups_apply_per_frame(tmp_path):
    def item(**fields: object) -> Dataset:
        data = Dataset()
        for name, value in fields.items():
            setattr(data, name, value)
        return data

    frames = [
        item(PixelValueTransformationSequence=[item(RescaleSlope=slope, RescaleIntercept=-10)])
        for slope in (1, 2, 4)
    ]
    shared = item(
        FrameVOILUTSequence=[
            item(WindowCenter=500, WindowWidth=1000, VOILUTFunction="LINEAR_EXACT")
        ]
    )
    pixels = np.tile(np.arange(400, dtype=np.uint16).reshape(20, 20), (3, 1, 1))
    data = image_dataset(
        pixels,
        NumberOfFrames=3,
        SharedFunctionalGroupsSequence=[shared],
        PerFrameFunctionalGroupsSequence=frames,
    )
    path = write_dataset(tmp_path / "a.dcm", data)
    for frame, slope in enumerate((1, 2, 4)):
        image = read_dicom(path, frame=frame, bits=16)
        assert image.shading == "window"
        expected = np.clip((pixels[0].astype(float) * slope - 10) / 1000, 0, 1)
        assert np.abs(image.pixels_HW - 65535 * expected).max() <= 0.5


def float_dataset(values: np.ndarray, **fields: object) -> Dataset:
    data = image_dataset(np.zeros(values.shape, np.uint16), PixelData=None, **fields)
    data.BitsAllocated = 8 * values.itemsize
    del data.BitsStored, data.HighBit, data.PixelRepresentation
    setattr(
        data, "FloatPixelData" if values.itemsize == 4 else "DoubleFloatPixelData", values.tobytes()
    )
    return data


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_floating_point_pixel_data(tmp_path, dtype):
    values = np.random.default_rng(0).normal(size=(50, 60)).astype(dtype)
    values[0, 0], values[0, 1] = np.nan, np.inf
    windowed = write_dataset(
        tmp_path / "a.dcm", float_dataset(values, WindowCenter=0.5, WindowWidth=1.0)
    )
    expected = np.clip(
        np.where(np.isfinite(values), values, 0), 0, 1
    )  # a window of LINEAR steps would be two-valued
    assert np.abs(read_dicom(windowed).pixels_HW - 255 * expected).max() <= 0.5 + 1e-3
    plain = read_dicom(write_dataset(tmp_path / "b.dcm", float_dataset(values)))
    assert plain.shading == "percentiles"
    low, high = np.quantile(values[np.isfinite(values)], [0.005, 0.995], method="inverted_cdf")
    expected = np.where(np.isfinite(values), np.clip((values - low) / (high - low), 0, 1), 0)
    assert np.abs(plain.pixels_HW - 255 * expected).max() <= 0.5 + 1e-3


@pytest.mark.parametrize("limit", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_floating_point_padding_is_black_and_excluded_from_percentiles(tmp_path, dtype, limit):
    values = np.random.default_rng(0).normal(size=(50, 60)).astype(dtype)
    padding = np.full((20, 60), -1e30, dtype)
    padding[10:] = -5e29 if limit else -1e30
    kind = "Float" if dtype is np.float32 else "DoubleFloat"
    fields = {f"{kind}PixelPaddingValue": -1e30} | (
        {f"{kind}PixelPaddingRangeLimit": -1e29} if limit else {}
    )
    alone = read_dicom(write_dataset(tmp_path / "a.dcm", float_dataset(values))).pixels_HW
    padded = float_dataset(np.concatenate([values, padding]), **fields)
    image = read_dicom(write_dataset(tmp_path / "b.dcm", padded)).pixels_HW
    np.testing.assert_array_equal(image[:50], alone)
    assert not image[50:].any()


def test_single_bits(tmp_path):
    masks = np.random.default_rng(0).integers(0, 2, (2, 11, 7), dtype=np.uint8)
    data = image_dataset(masks, NumberOfFrames=2, BitsAllocated=1, BitsStored=1, HighBit=0)
    data.PixelData = np.packbits(masks.ravel(), bitorder="little").tobytes()
    path = write_dataset(tmp_path / "a.dcm", data)
    for frame in range(2):
        assert np.array_equal(read_dicom(path, frame=frame).pixels_HW, 255 * masks[frame])
