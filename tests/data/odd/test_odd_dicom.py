"""Numbers of header values: which are read, which are refused, and what pydicom makes of the
same files.
"""

import io
import time

import numpy as np
import odd_dicom
import pydicom
import pytest
from helpers.errors import raises
from odd_dicom import CENTER, DETECTOR, SHOWN, SLOPE, SPACING, WIDTH
from pydicom.pixels import apply_modality_lut, apply_voi_lut

from medvl.data.dicom.parser import only, parse_code, parse_numbers
from medvl.data.dicom.reader import decode_dicom
from medvl.errors import DicomError


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        (b"0,5", [0.5]),
        (b"0,14\\0,15", [0.14, 0.15]),
        (b"0.14,0.15", [0.14, 0.15]),
        (b"0.14, 0.15", [0.14, 0.15]),
        (b"12,345678", [12.345678]),
        (b"1234,567", [1234.567]),
        (b"-0,001", [-0.001]),
        (b"1\\\\2", [1.0, None, 2.0]),
        (b"\\", [None, None]),
        (b" +1.5E+02 \0", [150.0]),
    ],
)
def test_numbers_of_texts(text: bytes, numbers: list[float | None]) -> None:
    assert parse_numbers(text, "DS", "DS", "<") == numbers


@pytest.mark.parametrize(
    "text",
    [b"1,234", b"12,345", b"1,2,3", b"0.5,1", b"1,0.5", b"0,5\\x", b"1 2", b"1e", b".", b"+", b"infinity", b"1" * 65, b"\xb2"],
)  # fmt: skip
def test_texts_that_are_not_certainly_numbers_are_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match="number"):
        parse_numbers(text, "DS", "DS", "<")


def test_numbers_of_binary_values() -> None:
    assert parse_numbers(b"\x02\x00", "SS", "US", "<") == [2]
    assert parse_numbers(b"\x00\x02", "US", "US", ">") == [2]
    assert parse_numbers(b"\xfe\xff", "SS", "US", "<") == [-2]
    assert parse_numbers(b"\x02\x00\x00\x00", "UN", "US", "<") == [2]
    assert parse_numbers(b"\x02\x00\x03\x00", "", "US", "<") == [2, 3]
    for vr, length in (("US", 3), ("FD", 4), ("FL", 6), ("UL", 2)):
        with pytest.raises(ValueError, match="length"):
            parse_numbers(bytes(length), vr, "US", "<")


def test_only_one_finite_number_is_taken() -> None:
    assert only([None, 2.0, 2.0]) == 2
    assert only([None]) is None
    for numbers in ([1.0, 2.0], [float("inf")], [float("nan")]):
        with pytest.raises(ValueError, match="several"):
            only(numbers)


def test_code_words() -> None:
    assert parse_code(b" Linear_Exact\0") == "LINEAREXACT"
    assert parse_code(b"RGB\\rgb\\") == "RGB"
    assert parse_code(b" \\ ") is None
    for data in (b"RGB\\YBR_FULL", b"\xff"):
        with pytest.raises(ValueError, match="codec|several"):
            parse_code(data)


def test_parsing_takes_linear_time() -> None:
    start = time.perf_counter()
    for text in (b"1" * 2_000_000, b"1." * 1_000_000, b"1,." * 600_000, b"1\\" * 200_000):
        try:
            parse_numbers(text, "DS", "DS", "<")
        except ValueError:
            continue
    assert time.perf_counter() - start < 2


@pytest.mark.parametrize(
    ("elements", "spacing", "damaged"),
    [
        ({SPACING: b"0,14\\0,15"}, (0.14, 0.15), ()),
        ({SPACING: b"0.14,0.15"}, (0.14, 0.15), ()),
        ({DETECTOR: b"0.2\\0.2"}, (0.2, 0.2), ()),
        ({SPACING: b"", DETECTOR: b"0.2\\0.2"}, (0.2, 0.2), ()),
        ({SPACING: b"0.14", DETECTOR: b"0.2\\0.2"}, None, ("PixelSpacing",)),
        ({SPACING: b"abc\\0.1", DETECTOR: b"0.2\\0.2"}, None, ("PixelSpacing",)),
        ({SPACING: b"0\\0"}, None, ("PixelSpacing",)),
        ({DETECTOR: b"nan\\nan"}, None, ("ImagerPixelSpacing",)),
    ],
)
def test_a_damaged_spacing_is_none_and_named(
    elements: dict, spacing: tuple | None, damaged: tuple
) -> None:
    header = decode_dicom(io.BytesIO(odd_dicom.file({**elements, **SHOWN}))).header
    assert (header.pixel_spacing, header.damaged) == (spacing, damaged)


AS_PYDICOM = (
    "slope b'+0.5'", "slope b'5E-1'", "slope b'.5'", "slope b' 0.5 '", "slope b'1.0e0'",
    "intercept b'-1024 '", "intercept b'-1024.00000'", "window b'1000\\\\40'", "window b'+1.0e3'",
    "window b'1000\\\\'", "function b'sigmoid'", "function b'linear_exact'", "frames b'0'",
    "frames b'1.0'", "b'MONOCHROME2' b' Identity'", "rows as b'IS' b'64'",
    "high bit below the stored ones", "no high bit", "LUT of signed samples, with a sign",
)  # fmt: skip
"""Cases that pydicom reads as a viewer does."""


@pytest.mark.filterwarnings("ignore::UserWarning:pydicom")
def test_shades_are_those_of_pydicom_where_it_reads_the_file_as_viewers_do() -> None:
    cases = {case.name: case for case in odd_dicom.read_cases()}
    for name in AS_PYDICOM:
        data = pydicom.dcmread(io.BytesIO(cases[name].data))
        values = apply_modality_lut(data.pixel_array, data)
        if "VOILUTSequence" in data:
            low, high = 0.0, 2.0 ** data.VOILUTSequence[0].LUTDescriptor[2] - 1
        elif "ModalityLUTSequence" in data:
            low, high = 0.0, 65535.0
        else:
            slope, intercept = (
                float(data.get(key) or usual)
                for key, usual in (("RescaleSlope", 1), ("RescaleIntercept", 0))
            )
            low, high = intercept, intercept + slope * (2.0**data.BitsStored - 1)
        shown = (apply_voi_lut(values, data) - low) / (high - low)
        image = decode_dicom(io.BytesIO(cases[name].data), bits=16).pixels_HW
        assert np.abs(image - 65535 * np.clip(shown, 0, 1)).max() <= 1.5, name


def test_an_error_names_the_element_and_never_its_value() -> None:
    for key, value in ((SLOPE, b"SMITH^JOHN"), (CENTER, b"SMITH^JOHN"), (WIDTH, b"SMITH^JOHN")):
        keyword = odd_dicom.KEYWORDS[key]
        with raises(DicomError, "malformed", keyword) as caught:
            decode_dicom(io.BytesIO(odd_dicom.file({**SHOWN, key: value})))
        assert "SMITH" not in str(caught.value)
