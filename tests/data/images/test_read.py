"""Reading an image file of a corpus by its path."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from helpers.dicom_builder import image_dataset, write_dataset
from helpers.errors import raises
from helpers.mimic_files import textured

from medvl.data import encode_png, read_pixels
from medvl.data.images import read
from medvl.errors import ImageError


def test_png_is_read_without_a_header(tmp_path: Path) -> None:
    image_HW = textured(0, 20, 30)
    (tmp_path / "a.png").write_bytes(encode_png(image_HW))
    pixels, header = read_pixels(tmp_path / "a.png")
    assert np.array_equal(pixels, image_HW)
    assert header is None
    assert read_pixels(tmp_path / "a.png", color=True)[0].shape == (20, 30, 3)


def test_dicom_is_read_with_its_header_and_screened_for_text(tmp_path: Path) -> None:
    dataset = image_dataset(np.zeros((64, 64), np.uint16), ViewPosition="PA", BurnedInAnnotation="YES")
    warnings = Counter[str]()
    pixels, header = read_pixels(write_dataset(tmp_path / "a.dcm", dataset), warnings=warnings)
    assert pixels.shape == (64, 64)
    assert header is not None
    assert header.view_position == "PA"
    assert warnings == {"says_burned_in": 1, "possible_burned_in_text": 0}


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
