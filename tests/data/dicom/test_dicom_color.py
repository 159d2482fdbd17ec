"""Conversion of colour and palettes to luma."""

import numpy as np
import pytest
from helpers.dicom_builder import image_dataset, write_dataset
from helpers.errors import raises

from medvl.data.dicom.reader import read_dicom
from medvl.errors import DicomError

LUMA = np.array([0.299, 0.587, 0.114])


@pytest.fixture
def colors() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (12, 10, 3), dtype=np.uint8)


@pytest.mark.parametrize(
    ("dtype", "white"), [(np.uint8, 255), (np.uint16, 65535), (np.uint32, 2**32 - 1)]
)
@pytest.mark.parametrize("planar", [0, 1])
def test_rgb_becomes_luma(tmp_path, colors, dtype, white, planar):
    samples = (colors / 255 * white).astype(dtype)
    data = image_dataset(samples, PlanarConfiguration=planar)
    if planar:
        data.PixelData = np.ascontiguousarray(samples.transpose(2, 0, 1)).tobytes()
    image = read_dicom(write_dataset(tmp_path / "a.dcm", data))
    assert image.shading == "color"
    assert np.abs(image.pixels_HW - colors @ LUMA).max() <= 1
    wide = read_dicom(tmp_path / "a.dcm", bits=16).pixels_HW
    assert np.abs(wide / 257 - colors @ LUMA).max() <= 1


def test_window_does_not_apply_to_color(tmp_path, colors):
    plain = read_dicom(write_dataset(tmp_path / "a.dcm", image_dataset(colors)))
    windowed = read_dicom(
        write_dataset(tmp_path / "b.dcm", image_dataset(colors, WindowCenter=10, WindowWidth=5))
    )
    assert np.array_equal(plain.pixels_HW, windowed.pixels_HW)


def test_ybr_luma_is_the_first_component(tmp_path, colors):
    full = image_dataset(colors, PhotometricInterpretation="YBR_FULL")
    assert np.array_equal(
        read_dicom(write_dataset(tmp_path / "a.dcm", full)).pixels_HW, colors[:, :, 0]
    )
    pairs = colors.reshape(
        12, 5, 2, 3
    )  # 4:2:2 stores two luma samples, then the chroma of the first
    packed = np.concatenate([pairs[:, :, :, 0], pairs[:, :, 0, 1:]], axis=-1)
    halved = image_dataset(
        colors, PhotometricInterpretation="YBR_FULL_422", PixelData=packed.tobytes()
    )
    assert np.array_equal(
        read_dicom(write_dataset(tmp_path / "b.dcm", halved)).pixels_HW, colors[:, :, 0]
    )


def palette_dataset(
    indices: np.ndarray, palette: np.ndarray, first: int, bits: int, **fields: object
):
    data = image_dataset(indices, PhotometricInterpretation="PALETTE COLOR", **fields)
    for channel, name in enumerate(("Red", "Green", "Blue")):
        prefix = f"{name}PaletteColorLookupTable"
        setattr(data, f"{prefix}Descriptor", [len(palette) % 65536, first, bits])
        setattr(data, f"{prefix}Data", palette[:, channel].astype("<u2").tobytes())
    return data


@pytest.mark.parametrize(("dtype", "first"), [(np.uint8, 0), (np.uint8, 40), (np.uint16, 300)])
@pytest.mark.parametrize("bits", [8, 16])
def test_palettes(tmp_path, dtype, first, bits):
    white = (1 << bits) - 1
    palette = np.random.default_rng(0).integers(0, white + 1, (200, 3))
    indices = np.random.default_rng(1).integers(0, 256, (20, 20)).astype(dtype) + dtype(first // 2)
    path = write_dataset(tmp_path / "a.dcm", palette_dataset(indices, palette, first, bits))
    image = read_dicom(path)
    assert image.shading == "palette"
    expected = palette[np.clip(indices.astype(int) - first, 0, 199)] @ LUMA / white
    assert np.abs(image.pixels_HW - 255 * expected).max() <= 0.5 + 1e-6


def test_segmented_palettes(tmp_path):
    # Three values; a line of 4 steps from 30 up to 50; both again; a line of 3 steps down to 20.
    segments = np.array([0, 3, 10, 20, 30, 1, 4, 50, 2, 2, 0, 0, 1, 3, 20], "<u2")
    once = [10, 20, 30, 35, 40, 45, 50]
    expanded = np.array([*once, *once, 40, 30, 20]) * 256
    data = image_dataset(
        np.arange(17, dtype=np.uint8)[None], PhotometricInterpretation="PALETTE COLOR"
    )
    for name in ("Red", "Green", "Blue"):
        setattr(data, f"{name}PaletteColorLookupTableDescriptor", [17, 0, 16])
        values = segments.copy()
        values[[2, 3, 4, 7, 14]] *= 256
        setattr(data, f"Segmented{name}PaletteColorLookupTableData", values.tobytes())
    pixels = read_dicom(write_dataset(tmp_path / "a.dcm", data), bits=16).pixels_HW[0]
    assert np.abs(pixels - expanded.astype(float)).max() <= 0.5


def test_damaged_palettes_raise(tmp_path):
    indices = np.zeros((2, 2), np.uint8)
    data = palette_dataset(indices, np.zeros((20, 3), int), 0, 16)
    data.BluePaletteColorLookupTableData = bytes(10)
    with raises(DicomError, "malformed"):
        read_dicom(write_dataset(tmp_path / "a.dcm", data))
    del data.RedPaletteColorLookupTableDescriptor
    with raises(DicomError, "malformed"):
        read_dicom(write_dataset(tmp_path / "a.dcm", data))
