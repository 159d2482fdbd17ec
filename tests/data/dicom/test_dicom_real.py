"""Real DICOM files: those bundled with pydicom, and 136 more with a manifest from the real data.

Each is either decoded and equals pydicom's own transformations, or raises DicomError with the code
listed here.
"""

import csv
from pathlib import Path

import numpy as np
import pydicom
import pytest
from pydicom.dataset import Dataset
from pydicom.pixels import apply_color_lut, apply_modality_lut, apply_voi_lut, get_decoder
from pydicom.uid import JPEGExtended12Bit

from medvl.data.dicom.reader import DicomImage, read_dicom
from medvl.errors import DicomError

BUNDLED = Path(pydicom.__file__).parent / "data" / "test_files"

ERRORS = {
    "ExplVR_BigEndNoMeta": "no_pixels",  # a radiotherapy plan
    "ExplVR_LitEndNoMeta": "no_pixels",
    "UN_sequence": "no_pixels",
    "empty_charset_LEI": "no_pixels",
    "no_meta_group_length": "no_pixels",
    "priv_SQ": "no_pixels",
    "nested_priv_SQ": "malformed",  # pixel data without a layout, as the next
    "meta_missing_tsyntax": "malformed",
    "no_meta": "not_dicom",  # its first tag is damaged
    "reportsi": "no_pixels",
    "reportsi_with_empty_number_tags": "no_pixels",
    "rtplan": "no_pixels",
    "rtplan_truncated": "truncated",
    "rtstruct": "no_pixels",
    "test-SR": "no_pixels",
    "waveform_ecg": "no_pixels",
    "badVR": "malformed",  # "1A" frames
    "MR_truncated": "truncated",
    "JPEG2000-embedded-sequence-delimiter": "malformed",  # the delimiter overwrites its width
    # Only among the 136:
    "chrJapMulti": "no_pixels",
    "chrJapMultiExplicitIR6": "no_pixels",
    "chrKoreanMulti": "no_pixels",
    "chrSQEncoding": "no_pixels",
    "chrSQEncoding1": "no_pixels",
    "DICOMDIR-bigEnd": "no_pixels",
    "DICOMDIR-empty": "no_pixels",
    "README.txt": "not_dicom",
    "IM000000": "no_pixels",
    "liver_rle": "unsupported",
}
BEYOND_PYDICOM = (
    "OT-PAL-8-face",  # has no transfer syntax
    "liver_deflate",  # deflated frames
    "emri_small_jpeg_2k_lossless_too_short",  # all frames, but no delimiter after the last
)
HAS_12_BITS = "pylibjpeg" in get_decoder(JPEGExtended12Bit).available_plugins
"""Whether pylibjpeg-libjpeg (extra `gpl-codecs`) is installed, the only codec of 12-bit JPEG
Extended.
"""
# JPGExtended is decoded; JPEG-lossy has a damaged scan, which libjpeg refuses (2.3.0, 2.4.0 and
# 2.5.0)
if HAS_12_BITS:
    ERRORS |= {"JPEG-lossy": "undecodable"}
else:
    ERRORS |= {"JPEG-lossy": "no_codec", "JPGExtended": "no_codec"}
LUMA = np.array([0.299, 0.587, 0.114])


def check(path: Path) -> DicomImage | None:
    """Read and check the first and the last frame; return None when the file raises the listed
    error.
    """
    try:
        frames = read_dicom(path, frame=0).header.frames
        images = {frame: read_dicom(path, frame=frame, bits=16) for frame in {0, frames - 1}}
    except DicomError as error:
        reason = error.code
    else:
        reason = None
    assert reason == ERRORS.get(path.stem)
    if reason is not None:
        return None
    if path.stem not in BEYOND_PYDICOM:
        data = pydicom.dcmread(path, force=True)
        for frame, image in images.items():
            stored = data.pixel_array[frame] if frames > 1 else data.pixel_array
            expected = 65535 * _reference(data, stored, frame, image.shading)
            assert np.abs(image.pixels_HW - expected).max() <= 65535 * 2 / 255, path.name
    return images[0]


def _reference(data: Dataset, stored: np.ndarray, frame: int, shading: str) -> np.ndarray:
    """Return shades from 0 to 1, computed with pydicom's functions and the standard's formulas."""
    if shading == "palette":
        colors = apply_color_lut(stored, data)
        return colors @ LUMA / np.iinfo(colors.dtype).max
    if shading == "color":
        return stored @ LUMA / (2.0**data.BitsStored - 1)
    for sequence, index in (
        ("PerFrameFunctionalGroupsSequence", frame),
        ("SharedFunctionalGroupsSequence", 0),
    ):
        for name in ("PixelValueTransformationSequence", "FrameVOILUTSequence"):
            if sequence in data and name in data[sequence][index]:
                data.update(data[sequence][index][name][0])
    values = np.asarray(apply_modality_lut(stored, data), float)
    kept = stored != data.get("PixelPaddingValue", np.inf)
    if shading == "voi_lut":
        shades = apply_voi_lut(values.astype(int), data) / (
            2 ** data.VOILUTSequence[0].LUTDescriptor[2] - 1
        )
    elif shading == "window":
        center, width = (
            float(np.atleast_1d(data[name].value)[0]) for name in ("WindowCenter", "WindowWidth")
        )
        step = 0 if stored.dtype.kind == "f" else 1
        shades = (values - (center - step / 2)) / (width - step) + 0.5
    elif shading == "full_range":
        shades = values / (2**data.BitsStored - 1)
    else:
        low, high = np.quantile(values[kept], [0.005, 0.995], method="inverted_cdf")
        shades = (values - low) / max(high - low, 1e-9)
    shades = np.clip(shades, 0, 1)
    return np.where(
        kept, 1 - shades if data.PhotometricInterpretation == "MONOCHROME1" else shades, 0
    )


@pytest.mark.filterwarnings("ignore::UserWarning:pydicom")
@pytest.mark.parametrize("path", sorted(BUNDLED.glob("*.dcm")), ids=lambda path: path.stem)
def test_bundled_files_of_pydicom(path):
    check(path)


@pytest.mark.real
@pytest.mark.filterwarnings("ignore::UserWarning:pydicom")
def test_real_files_match_their_manifest(real_data):
    with (real_data / "dicom" / "manifest.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    decoded = set()
    for row in rows:
        image = check(real_data / "dicom" / row["file"])
        is_ok = row["decode_pydicom3+pylibjpeg"].startswith("ok")
        if image is None:
            assert (
                not is_ok or "JPGExtended" in row["file"]
            )  # the manifest was made with the GPL codec
            continue
        decoded.add(row["file"])
        if row["rows_x_cols"] == "x":  # pydicom could not read it
            continue
        assert row["rows_x_cols"] == f"{image.header.rows}x{image.header.columns}"
        assert image.pixels_HW.shape == (image.header.rows, image.header.columns)
        assert row["photometric"] == image.header.photometric_interpretation
        assert row["frames"] == str(image.header.frames)
        if image.header.modality:
            assert row["modality"] == image.header.modality
        if image.header.view_position:
            assert row["view"] == image.header.view_position
    assert len(rows) == 136
    assert decoded == {row["file"] for row in rows if Path(row["file"]).stem not in ERRORS}
    assert len(decoded) > 100


@pytest.mark.real
@pytest.mark.parametrize(
    "name",
    [
        "pydicomdata/RG1_J2KI.dcm",
        "pylibjpegdata/966_fixed.dcm",
        "raip/c64d5667-a776-4f95-9e21-bfabafb07740.dcm",
        "txv/1.2.276.0.7230010.3.1.4.8323329.6904.1517875201.850819.dcm",
    ],
)
def test_lungs_are_dark_and_the_spine_is_bright(real_data, name):
    """Check the polarity of chest radiographs."""
    pixels = read_dicom(real_data / "dicom" / name).pixels_HW
    height, width = pixels.shape
    middle = pixels[height * 5 // 8 : height * 7 // 8, width * 9 // 20 : width * 11 // 20]
    lung = pixels[height // 4 : height // 2, width // 5 : width * 3 // 10]
    assert np.median(middle) > np.median(lung) + 20


@pytest.mark.real
def test_inverted_copy_is_inverted(real_data):
    folder = real_data / "dicom" / "txv"
    inverted = read_dicom(folder / "Fake_MONOHR1.dcm").pixels_HW
    original = read_dicom(
        folder / "1.2.276.0.7230010.3.1.4.8323329.6904.1517875201.850819.dcm"
    ).pixels_HW
    assert np.array_equal(inverted, 255 - original)
