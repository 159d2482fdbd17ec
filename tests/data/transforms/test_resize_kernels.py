"""Kernels of the resize against Pillow's, torch's and torchvision's values, and borders before
the resize.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.errors import raises
from PIL import Image

from medvl.data import EvalTransform
from medvl.data.transforms.image import Box
from medvl.data.transforms.operations import resize
from medvl.errors import ConfigError

FILTERS = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}
SIZES = [
    (97, 61, 40, 40),
    (61, 97, 31, 80),
    (30, 44, 64, 64),
    (224, 224, 224, 224),
    (301, 200, 17, 19),
]


def noise(height: int, width: int, channels: int = 1) -> np.ndarray:
    values = np.random.default_rng(height * width).integers(
        0, 256, (height, width, channels), dtype=np.uint8
    )
    return values[:, :, 0] if channels == 1 else values


def torch_resize(
    image: np.ndarray, height: int, width: int, mode: str, antialias: bool
) -> np.ndarray:
    """torchvision's resize of a uint8 tensor: as uint8 with antialiasing, else in float32,
    rounded and clamped.
    """
    pixels = torch.from_numpy(np.atleast_3d(image)).permute(2, 0, 1)[None]
    pixels = pixels if antialias else pixels.float()
    resized = F.interpolate(
        pixels, (height, width), mode=mode, align_corners=False, antialias=antialias
    )
    return (
        resized[0]
        .float()
        .permute(1, 2, 0)
        .round()
        .clamp(0, 255)
        .byte()
        .numpy()
        .reshape(height, width, *image.shape[2:])
    )


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("height", "width", "new_height", "new_width"), SIZES)
@pytest.mark.parametrize("mode", ["bicubic", "bilinear"])
def test_kernels_have_the_values_of_pillow_and_torch(
    mode: str, height: int, width: int, new_height: int, new_width: int, channels: int
) -> None:
    image = noise(height, width, channels)
    antialiased = resize(image, new_height, new_width, f"{mode}_antialias")
    pillow = np.asarray(Image.fromarray(image).resize((new_width, new_height), FILTERS[mode]))
    assert np.array_equal(antialiased, pillow)
    expected = torch_resize(image, new_height, new_width, mode, antialias=True)
    assert (
        np.abs(antialiased.astype(int) - expected).mean() < 0.5
    )  # weights are rounded in other ways
    plain = resize(image, new_height, new_width, mode)
    expected = torch_resize(image, new_height, new_width, mode, antialias=False)
    assert np.abs(plain.astype(int) - expected).max() <= 2  # OpenCV's weights have 11 bits
    assert plain.shape == antialiased.shape == (new_height, new_width, *image.shape[2:])


def test_grey_images_with_an_axis_of_channels_are_resized() -> None:
    image = noise(50, 40)
    for kernel in ("area", "bicubic", "bilinear", "bicubic_antialias", "bilinear_antialias"):
        assert np.array_equal(
            np.squeeze(resize(image[:, :, None], 20, 30, kernel)), resize(image, 20, 30, kernel)
        )


def test_the_default_is_area_averaging() -> None:
    image = noise(64, 64)
    assert np.array_equal(
        resize(image, 32, 32), np.rint(image.reshape(32, 2, 32, 2).mean(axis=(1, 3)) + 1e-9)
    )
    assert EvalTransform(size=32).settings() == EvalTransform(size=32, resize="area").settings()
    assert (
        "resize" not in EvalTransform(size=32).settings()
    )  # stored features of earlier versions stay valid


@pytest.mark.parametrize("fit", ["crop", "pad", "squash"])
def test_transforms_use_their_kernel(fit: str, tmp_path: Path) -> None:
    """As torchvision: Resize and CenterCrop (crop), Resize of both sides (squash)."""
    image = noise(90, 140)
    Image.fromarray(image).save(tmp_path / "image.png")
    got = EvalTransform(size=48, fit=fit, resize="bicubic_antialias")(tmp_path / "image.png")[
        0, 0
    ].numpy()
    picture = Image.fromarray(image)
    if fit == "squash":
        expected = picture.resize((48, 48), Image.Resampling.BICUBIC)
    elif fit == "crop":
        expected = picture.resize((74, 48), Image.Resampling.BICUBIC).crop((13, 0, 61, 48))
    else:
        expected = Image.new("L", (48, 48))
        expected.paste(picture.resize((48, 30), Image.Resampling.BICUBIC), (0, 9))
    assert np.array_equal(got, np.asarray(expected))
    assert not np.array_equal(
        got, EvalTransform(size=48, fit=fit)(tmp_path / "image.png")[0, 0].numpy()
    )


@pytest.mark.parametrize(("height", "width"), [(90, 140), (141, 90), (30, 20), (48, 48), (17, 300)])
def test_borders_before_the_resize_are_medclips(height: int, width: int) -> None:
    """Its released code pastes an image into a square of at least the output's size, then
    resizes it by Pillow.
    """
    image = noise(height, width)
    side = max(48, height, width)
    square = Image.new("L", (side, side), 0)
    square.paste(Image.fromarray(image), (int((side - width) / 2), int((side - height) / 2)))
    expected = np.asarray(square.resize((48, 48), Image.Resampling.BICUBIC))
    transform = EvalTransform(size=48, fit="pad", resize="bicubic_antialias", pad_first=True)
    assert np.array_equal(transform(image)[0, 0].numpy(), expected)
    box = transform.box(height, width)
    assert (box.height, box.width) == pytest.approx((side, side))
    assert (box.top, box.left) == pytest.approx((-((side - height) // 2), -((side - width) // 2)))
    assert isinstance(box, Box)


def test_settings_out_of_range_are_refused() -> None:
    other: Any = "lanczos"
    with raises(ConfigError, "unknown_name", "resize", names="bicubic"):
        EvalTransform(resize=other)
    with raises(ConfigError, "conflict", "pad_first"):
        EvalTransform(fit="crop", pad_first=True)
