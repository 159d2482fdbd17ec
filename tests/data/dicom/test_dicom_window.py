"""Windows other than the file's, and the values that a viewer applies them to."""

import io

import numpy as np
import pytest
from helpers.dicom_builder import image_dataset
from helpers.errors import raises
from pydicom.dataset import Dataset
from pydicom.sequence import Sequence

from medvl.data.dicom.reader import decode_dicom, decode_dicom_values
from medvl.errors import ConfigError, DicomError

PIXELS = np.add.outer(np.arange(16) * 100, np.arange(20) * 10).astype(np.uint16)


def stream(pixels: np.ndarray = PIXELS, **fields: object) -> io.BytesIO:
    buffer = io.BytesIO()
    image_dataset(pixels, **fields).save_as(buffer, enforce_file_format=True)
    buffer.seek(0)
    return buffer


def shades(values: np.ndarray, center: float, width: float, inverted: bool = False) -> np.ndarray:
    shade = np.clip((values - center) / width + 0.5, 0, 1)
    return np.rint(255 * (1 - shade if inverted else shade))


@pytest.mark.parametrize("inverted", [False, True])
def test_a_window_replaces_that_of_the_file(inverted: bool) -> None:
    photometric = "MONOCHROME1" if inverted else "MONOCHROME2"
    fields = {"RescaleSlope": 2, "RescaleIntercept": -100, "WindowCenter": 3, "WindowWidth": 7}
    image = decode_dicom(stream(PhotometricInterpretation=photometric, **fields), window=(900, 500))
    np.testing.assert_array_equal(image.pixels_HW, shades(2.0 * PIXELS - 100, 900, 500, inverted))
    assert image.shading == "window"


@pytest.mark.parametrize(
    "fields",
    [
        {"WindowCenter": 700, "WindowWidth": 900},
        {"RescaleSlope": 0.5, "RescaleIntercept": 20},
        {"PhotometricInterpretation": "MONOCHROME1", "WindowCenter": 500, "WindowWidth": 400},
        {"PixelPaddingValue": 0},
    ],
)
def test_values_under_their_window_are_the_rendering(fields: dict) -> None:
    image, values = decode_dicom(stream(**fields)), decode_dicom_values(stream(**fields))
    assert values is not None
    expected = np.nan_to_num(shades(values.values_HW, values.center, values.width, values.inverted))
    assert np.abs(expected - image.pixels_HW).max() <= 1
    slope, intercept = fields.get("RescaleSlope", 1), fields.get("RescaleIntercept", 0)
    present = ~np.isnan(values.values_HW)
    np.testing.assert_allclose(values.values_HW[present], (slope * PIXELS + intercept)[present])
    assert (~present).sum() == (fields.get("PixelPaddingValue", -1) == PIXELS).sum()


def test_values_of_wide_samples_and_of_a_look_up_table() -> None:
    wide = decode_dicom_values(stream(PIXELS.astype(np.uint32) * 1000))
    assert wide is not None
    np.testing.assert_allclose(wide.values_HW, PIXELS * 1000.0)
    table = Dataset()
    table.LUTDescriptor, table.LUTData = [256, 100, 8], bytes(range(256))
    table["LUTDescriptor"].VR = "US"
    table["LUTData"].VR = "OW"
    values = decode_dicom_values(stream(VOILUTSequence=Sequence([table])))
    assert values is not None
    assert (values.center - values.width / 2, values.center + values.width / 2) == (100, 355)


def test_colour_has_no_window() -> None:
    color = np.zeros((8, 8, 3), np.uint8)
    assert decode_dicom_values(stream(color)) is None
    np.testing.assert_array_equal(decode_dicom(stream(color), window=(5, 5)).pixels_HW, 0)


@pytest.mark.parametrize("window", [(0, 0), (0, -1), (float("nan"), 1), (0, float("inf"))])
def test_impossible_windows_are_refused(window: tuple[float, float]) -> None:
    with raises(ConfigError, "out_of_range", "window"):
        decode_dicom(stream(), window=window)


def test_frames_are_checked() -> None:
    with raises(DicomError, "multi_frame", "frame"):
        decode_dicom_values(stream(np.zeros((2, 8, 8), np.uint8), NumberOfFrames=2))
