"""Every kind of image gives the same pixels."""

from io import BytesIO
from pathlib import Path

import numpy as np
import pydicom
import pytest
import torch
from helpers.dicom_builder import image_dataset, write_dataset
from helpers.errors import raises
from PIL import Image

from medvl.data.dicom.reader import read_dicom
from medvl.data.images.codecs import encode_png
from medvl.data.images.read import read_image
from medvl.data.transforms.image import EvalTransform
from medvl.errors import ConfigError, DicomError, ImageError

GREY_HW = np.random.default_rng(0).integers(0, 256, (40, 30), dtype=np.uint8)
RGB_HWC = np.random.default_rng(1).integers(0, 256, (40, 30, 3), dtype=np.uint8)


def test_kinds_of_a_grey_image_agree(tmp_path: Path) -> None:
    path = tmp_path / "grey.png"
    path.write_bytes(encode_png(GREY_HW))
    kinds = [
        *(
            path,
            str(path),
            path.read_bytes(),
            Image.open(path),
            GREY_HW,
            GREY_HW[:, :, None],
            GREY_HW[None],
        ),
        *(
            torch.from_numpy(GREY_HW),
            torch.from_numpy(GREY_HW)[None],
            torch.from_numpy(GREY_HW) / 255,
        ),
        *(GREY_HW.astype(np.float64) / 255, GREY_HW.astype(np.int64)),
    ]
    for image in kinds:
        np.testing.assert_array_equal(read_image(image), GREY_HW)
    assert read_image(path, color=True).shape == (40, 30, 3)


def test_kinds_of_a_color_image_agree(tmp_path: Path) -> None:
    path = tmp_path / "color.png"
    path.write_bytes(encode_png(RGB_HWC))
    tensor = torch.from_numpy(RGB_HWC).permute(2, 0, 1)
    for image in (
        path,
        path.read_bytes(),
        Image.open(path).convert("RGBA"),
        RGB_HWC,
        tensor,
        tensor / 255,
    ):
        np.testing.assert_array_equal(read_image(image), RGB_HWC)
    for image in (path, Image.open(path), RGB_HWC):
        assert (
            np.abs(
                read_image(image, color=False).astype(int) - np.array(Image.open(path).convert("L"))
            ).max()
            <= 1
        )


def test_16_bits_are_scaled_by_their_depth(tmp_path: Path) -> None:
    deep = GREY_HW.astype(np.uint16) * 16
    path = tmp_path / "deep.png"
    path.write_bytes(encode_png(deep))
    for image in (path, Image.open(path), deep, torch.from_numpy(deep.astype(np.int32))):
        np.testing.assert_array_equal(read_image(image), read_image(path))
    assert read_image(path).max() > 200


def test_dicom_files_and_datasets(tmp_path: Path) -> None:
    path = write_dataset(tmp_path / "image.dcm", image_dataset(GREY_HW))
    expected = read_dicom(path).pixels_HW
    for image in (path, str(path), path.read_bytes(), pydicom.dcmread(path), read_dicom(path)):
        np.testing.assert_array_equal(read_image(image), expected)
    with raises(DicomError, "malformed", "image"):
        read_image(pydicom.Dataset())


def test_exif_orientation_of_pil_images() -> None:
    buffer = BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(GREY_HW).save(buffer, "PNG", exif=exif)
    turned = read_image(buffer.getvalue())
    assert turned.shape == (30, 40)
    np.testing.assert_array_equal(read_image(Image.open(buffer)), turned)


@pytest.mark.parametrize(
    ("image", "code"),
    [
        (np.full((20, 20), 1.5), "out_of_range"),
        (np.full((20, 20), np.nan), "out_of_range"),
        (np.full((20, 20), -1), "out_of_range"),
        (np.zeros((20, 20, 5), np.uint8), "mismatch"),
        (np.zeros((0, 20), np.uint8), "mismatch"),
        (np.zeros((2, 2000), np.uint8), "too_small"),
        (object(), "wrong_type"),
        (b"not an image", "unknown_format"),
        (b"", "empty"),
    ],
)
def test_what_is_no_image(image: object, code: str) -> None:
    with raises(ImageError, code):
        read_image(image)


def test_a_transform_makes_batches() -> None:
    transform = EvalTransform(size=16)
    assert transform(GREY_HW).shape == (1, 1, 16, 16)
    assert transform(GREY_HW).dtype == torch.uint8
    both = transform([GREY_HW, RGB_HWC])
    assert both.shape == (2, 3, 16, 16)
    assert torch.equal(both[0], transform(GREY_HW)[0].expand(3, -1, -1))
    assert torch.equal(transform(np.stack([RGB_HWC, RGB_HWC])), transform([RGB_HWC] * 2))
    with raises(ConfigError, "empty", "images"):
        transform([])
