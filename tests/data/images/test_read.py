"""Reading an image file of a corpus by its path."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from helpers.dicom_builder import image_dataset, write_dataset
from helpers.errors import raises
from helpers.mimic_files import textured
from PIL import Image

from medvl.data import encode_png, read_pixels
from medvl.data.images import read
from medvl.errors import DicomError, ImageError


def test_png_is_read_without_a_header(tmp_path: Path) -> None:
    image_HW = textured(0, 20, 30)
    (tmp_path / "a.png").write_bytes(encode_png(image_HW))
    pixels, header = read_pixels(tmp_path / "a.png")
    assert np.array_equal(pixels, image_HW)
    assert header is None
    assert read_pixels(tmp_path / "a.png", color=True)[0].shape == (20, 30, 3)


def test_dicom_is_read_with_its_header_and_screened_for_text(tmp_path: Path) -> None:
    dataset = image_dataset(
        np.zeros((64, 64), np.uint16), ViewPosition="PA", BurnedInAnnotation="YES"
    )
    warnings = Counter[str]()
    pixels, header = read_pixels(write_dataset(tmp_path / "a.dcm", dataset), warnings=warnings)
    assert pixels.shape == (64, 64)
    assert header is not None
    assert header.view_position == "PA"
    assert warnings == {"says_burned_in": 1, "possible_burned_in_text": 0}


@pytest.mark.parametrize("name", ["IM000001", "a.ima", "a.dat", "1.2.840.113619"])
def test_dicom_is_recognised_by_its_content(tmp_path: Path, name: str) -> None:
    dataset = image_dataset(np.arange(64 * 64, dtype=np.uint16).reshape(64, 64))
    expected = read_pixels(write_dataset(tmp_path / "a.dcm", dataset))[0]
    (tmp_path / name).write_bytes((tmp_path / "a.dcm").read_bytes())
    pixels, header = read_pixels(tmp_path / name)
    assert np.array_equal(pixels, expected)
    assert header is not None
    (tmp_path / "bare").write_bytes((tmp_path / "a.dcm").read_bytes()[132:])
    assert np.array_equal(read_pixels(tmp_path / "bare")[0], expected)


def test_errors_name_the_file(tmp_path: Path) -> None:
    for content, code in (
        (b"plain text, no image", "unknown_format"),
        (encode_png(textured(0, 20, 30))[:60], "truncated"),
    ):
        (tmp_path / "a.png").write_bytes(content)
        with raises(ImageError, code, names="a.png: "):
            read_pixels(tmp_path / "a.png")


def test_frame_of_a_multi_frame_file_is_selected(tmp_path: Path) -> None:
    frames_NHW = np.stack([np.full((32, 32), value, np.uint16) for value in (0, 4000)])
    frames_NHW[:, 0, 0], frames_NHW[:, 0, 1] = 0, 4000
    path = write_dataset(tmp_path / "a.dcm", image_dataset(frames_NHW, NumberOfFrames=2))
    with raises(DicomError, "multi_frame", "frame"):
        read_pixels(path)
    assert [read_pixels(path, frame=frame)[0][9, 9] for frame in (0, 1)] == [0, 255]
    with raises(DicomError, "multi_frame", "frame"):
        read_pixels(path, frame=2)
    single = write_dataset(tmp_path / "b.dcm", image_dataset(frames_NHW[1]))
    assert read_pixels(single, frame=1)[0][9, 9] == 255


def test_rotated_photographs_are_turned_and_counted(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    image_HW = textured(0, 20, 30)
    Image.fromarray(image_HW).save(tmp_path / "a.png", exif=exif)
    warnings = Counter[str]()
    assert np.array_equal(
        read_pixels(tmp_path / "a.png", warnings=warnings)[0], np.rot90(image_HW, -1)
    )
    assert warnings == {"turned_by_exif": 1}


def test_missing_paths_and_files_raise(tmp_path: Path) -> None:
    with raises(ImageError, "no_image"):
        read_pixels(None)
    for name in ("a.dcm", "a.png"):
        with pytest.raises(FileNotFoundError):
            read_pixels(tmp_path / name)


def test_large_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "_MAX_FILE_BYTES", 10)
    (tmp_path / "a.png").write_bytes(encode_png(textured(0, 20, 30)))
    with raises(ImageError, "too_large", names="a.png"):
        read_pixels(tmp_path / "a.png")


@pytest.mark.real
def test_real_multi_frame_files_are_read_with_a_frame(real_data: Path) -> None:
    outcomes = Counter[str]()
    for path in sorted((real_data / "dicom").rglob("*.dcm")):
        try:
            read_pixels(path)
        except DicomError as error:
            if error.code == "multi_frame":
                outcomes[_read_first_frame(path)] += 1
    assert outcomes.total() == 23
    assert outcomes["read"] >= 20
    assert "multi_frame" not in outcomes


def _read_first_frame(path: Path) -> str:
    try:
        pixels, header = read_pixels(path, frame=0)
    except DicomError as error:
        return error.code
    assert header is not None
    assert header.frames > 1
    assert pixels.shape == (header.rows, header.columns)
    return "read"
