"""Image transforms: geometry, and randomness from the generator only."""

import cv2
import numpy as np
import pytest
import torch
from helpers.errors import raises
from torchvision.transforms import v2

from medvl.data.transforms.image import ConVIRTAugmentation, EvalTransform, RandomCrop
from medvl.errors import ConfigError


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def ramp(height: int, width: int) -> np.ndarray:
    """Return an image that gets brighter to the right."""
    return np.tile(np.linspace(0, 255, width), (height, 1)).astype(np.uint8)


@pytest.mark.parametrize("shape", [(300, 200), (200, 300), (64, 64), (33, 500), (17, 18, 3)])
@pytest.mark.parametrize("fit", ["crop", "pad", "squash"])
def test_eval_transform_returns_a_square_of_bytes(shape: tuple[int, ...], fit: str) -> None:
    image = np.full(shape, 200, np.uint8)
    out = EvalTransform(size=64, fit=fit).build()(image, rng())
    assert out.image_HWC.shape == (64, 64, shape[2] if len(shape) == 3 else 1)
    assert out.image_HWC.dtype == np.uint8
    assert not out.flipped
    if fit != "pad":
        assert (out.image_HWC == 200).all()


def test_eval_transform_crop_and_pad() -> None:
    image = ramp(100, 200)
    cropped = EvalTransform(size=100, fit="crop").build()(image, rng()).image_HWC[:, :, 0]
    np.testing.assert_array_equal(cropped, image[:, 50:150])
    padded = EvalTransform(size=200, fit="pad").build()(image, rng()).image_HWC[:, :, 0]
    np.testing.assert_array_equal(padded[50:150], image)
    assert not padded[:50].any()
    assert not padded[150:].any()


@pytest.mark.parametrize(
    "shape", [(480, 640), (1000, 333), (300, 401), (201, 202), (49, 48), (2022, 2021)]
)
def test_padded_images_have_the_size_of_the_released_code(shape: tuple[int, int]) -> None:
    """GLoRIA and CheXzero scale by a ratio, and cut the shorter side off to whole pixels."""
    bright = np.full(shape, 255, np.uint8)
    seen = EvalTransform(size=256, fit="pad").build()(bright, rng()).image_HWC[:, :, 0] > 0
    ratio = 256 / max(shape)
    assert (seen.any(1).sum(), seen.any(0).sum()) == tuple(
        256 if side == max(shape) else int(side * ratio) for side in shape
    )


@pytest.mark.parametrize(
    "shape", [(480, 640), (640, 480), (1000, 333), (333, 1000), (300, 401), (201, 202)]
)
def test_the_square_of_crop_is_that_of_torchvision(shape: tuple[int, int]) -> None:
    """A rounding of its own moved the square by up to a pixel, and grey levels by 6 on average."""
    noise = np.random.default_rng(0).integers(0, 256, shape, np.uint8).astype(np.float32)
    image = cv2.normalize(cv2.GaussianBlur(noise, (0, 0), 3), None, 0, 255, cv2.NORM_MINMAX).astype(
        np.uint8
    )
    published = v2.Compose([v2.Resize(224, antialias=True), v2.CenterCrop(224)])
    expected = published(torch.from_numpy(image)[None])[0].numpy().astype(float)
    square_HWC = EvalTransform(size=224, fit="crop").build()(image, rng()).image_HWC
    assert np.abs(square_HWC[..., 0] - expected).mean() < 1


def test_downscaling_averages() -> None:
    """A checkerboard of single pixels becomes grey, not aliased."""
    image = (np.indices((256, 256)).sum(0) % 2 * 255).astype(np.uint8)
    out = EvalTransform(size=64).build()(image, rng()).image_HWC
    assert out.min() >= 126
    assert out.max() <= 129


@pytest.mark.parametrize("shape", [(200, 900), (900, 200), (50, 500)])
def test_downscaling_averages_where_the_other_side_grows(shape: tuple[int, int]) -> None:
    """Stripes along the side that shrinks are averaged by the area that each pixel covers."""
    length, size = max(shape), 224
    stripes = (np.arange(length) % 5 == 0) * 250
    begin, pixel = np.arange(size + 1) * length / size, np.arange(length + 1)
    covered = np.minimum.outer(begin[1:], pixel[1:]) - np.maximum.outer(begin[:-1], pixel[:-1])
    expected = covered.clip(min=0) @ stripes * size / length
    image = np.tile(stripes.astype(np.uint8), (min(shape), 1))
    out = EvalTransform(size=size, fit="squash").build()(
        image if shape[1] == length else image.T, rng()
    )
    rows = out.image_HWC[:, :, 0] if shape[1] == length else out.image_HWC[:, :, 0].T
    assert np.abs(rows - expected).max() <= 1


def test_augmentation_depends_only_on_the_generator() -> None:
    image = rng(1).integers(0, 256, (180, 150), dtype=np.uint8)
    first, second = (ConVIRTAugmentation(size=96).build() for _ in range(2))
    for _ in range(3):
        first(image, rng(99))  # earlier calls must have no effect
    for seed in range(5):
        a, b = first(image, rng(seed)), second(image, rng(seed))
        np.testing.assert_array_equal(a.image_HWC, b.image_HWC)
        assert a.flipped == b.flipped
    assert not np.array_equal(first(image, rng(0)).image_HWC, first(image, rng(1)).image_HWC)


@pytest.mark.parametrize("flip", ["swap_text", "plain"])
def test_half_of_the_images_are_flipped_and_marked(flip: str) -> None:
    image = ramp(128, 128)
    plain = ConVIRTAugmentation(size=64, flip=flip, rotation=0, blur_sigma=(0.1, 0.2)).build()
    flipped = 0
    for seed in range(200):
        out = plain(image, rng(seed))
        row = out.image_HWC[32, 8:56, 0].astype(int)
        assert (row[-1] < row[0]) == out.flipped
        flipped += out.flipped
    assert 70 < flipped < 130


def test_other_rates_of_flips() -> None:
    """CARZero mirrors three images in ten."""
    apply = ConVIRTAugmentation(size=16, flip_rate=0.3).build()
    assert 40 < sum(apply(ramp(16, 16), rng(seed)).flipped for seed in range(200)) < 80
    assert not any(
        ConVIRTAugmentation(size=16, flip_rate=0).build()(ramp(16, 16), rng(seed)).flipped
        for seed in range(9)
    )


@pytest.mark.parametrize("shape", [(200, 121), (121, 200), (200, 121, 3), (150, 150)])
def test_a_square_crop_of_the_padded_image_is_that_of_random_crop(shape: tuple[int, ...]) -> None:
    """MedCLIP and CARZero: long side to 256, black borders, a random square of 224; nothing is
    stretched.
    """
    image = np.full(shape, 255, np.uint8)
    image[20:60, 20:60] = 100  # a square, which a crop of another aspect would stretch
    settings = {"rotation": 0, "translation": 0, "scale": (1, 1), "brightness": 0, "contrast": 0}
    crop = ConVIRTAugmentation(
        size=175,
        flip="off",
        pad=True,
        area=(0.7656, 0.7656),
        aspect=(1, 1),
        blur_sigma=(0.1, 0.1),
        **settings,
    ).build()
    side = max(shape[:2])
    square = np.zeros((side, side), np.uint8)
    top, left = (side - shape[0]) // 2, (side - shape[1]) // 2
    square[top : top + shape[0], left : left + shape[1]] = image.reshape(*shape[:2], -1)[..., 0]
    for seed in range(20):
        out = crop(image, rng(seed)).image_HWC[..., 0]
        assert out.shape == (175, 175)
        part = (
            cv2.resize(square, (200, 200), interpolation=cv2.INTER_LINEAR)
            if side != 200
            else square
        )
        best = cv2.matchTemplate(part, out, cv2.TM_SQDIFF).min() / 175**2
        assert best < 40  # grey levels squared: interpolation of edges
        assert (out == 0).mean() == pytest.approx((part == 0).mean(), abs=0.15)


PLAIN = {
    "flip": "off",
    "rotation": 0,
    "translation": 0,
    "brightness": 0,
    "contrast": 0,
    "blur_sigma": (0.1, 0.1),
}


@pytest.mark.parametrize("shape", [(256, 256), (256, 256, 3)])
def test_training_crops_are_shrunk_by_averaging(shape: tuple[int, ...]) -> None:
    """A checkerboard of single pixels becomes grey in training as in evaluation, not aliased."""
    image = np.zeros(shape, np.uint8)
    image[np.indices((256, 256)).sum(0) % 2 == 1] = 255
    apply = ConVIRTAugmentation(size=64, area=(0.5, 1.0), scale=(1, 1), **PLAIN).build()
    for seed in range(5):
        assert apply(image, rng(seed)).image_HWC.std() < 8  # between the pixels: above 60


def test_the_affine_scale_keeps_the_aspect() -> None:
    """A square stays a square, as with torchvision's single factor."""
    image = np.zeros((200, 200), np.uint8)
    image[60:140, 60:140] = 255
    apply = ConVIRTAugmentation(
        size=200, area=(1, 1), aspect=(1, 1), scale=(0.7, 1.3), **PLAIN
    ).build()
    sides = []
    for seed in range(20):
        inside = apply(image, rng(seed)).image_HWC[:, :, 0] > 127
        sides.append((inside.any(axis=0).sum(), inside.any(axis=1).sum()))
    assert all(abs(int(width) - int(height)) <= 1 for width, height in sides)
    assert min(sides)[0] < 65
    assert max(sides)[0] > 95


def test_flip_off_never_flips() -> None:
    apply = ConVIRTAugmentation(size=64, flip="off").build()
    assert not any(apply(ramp(80, 80), rng(seed)).flipped for seed in range(50))


def test_brightness_is_within_the_published_factors() -> None:
    """On a constant image, contrast has no effect and brightness scales the value by 0.6 to 1.4,
    rounded down twice.
    """
    image = np.full((100, 100), 100, np.uint8)
    apply = ConVIRTAugmentation(size=64, translation=0, rotation=0, scale=(1, 1)).build()
    values = [int(apply(image, rng(seed)).image_HWC[32, 32, 0]) for seed in range(300)]
    assert 59 <= min(values) < 65
    assert 135 < max(values) <= 140


def test_crop_widths_match_the_published_area() -> None:
    """On a ramp, the range of values in a crop gives its width."""
    image = ramp(200, 200)
    apply = ConVIRTAugmentation(
        size=200,
        flip="off",
        translation=0,
        rotation=0,
        scale=(1, 1),
        brightness=0,
        contrast=0,
        blur_sigma=(0.1, 0.11),
    ).build()
    widths = [
        float(np.ptp(apply(image, rng(seed)).image_HWC[100, :, 0].astype(int))) / 255
        for seed in range(200)
    ]
    # Share of the width: sqrt(area * ratio) with area in [0.6, 1] and ratio in [3/4, 4/3], at most
    # 1.
    assert min(widths) >= (0.6 * 0.75) ** 0.5 - 0.02
    assert max(widths) <= 1.0
    # The definition, by rejection: area uniform, ratio log-uniform, drawn again when a side exceeds
    # the image.
    draws = rng(3)
    area, ratio = (
        draws.uniform(0.6, 1, 100_000),
        np.exp(draws.uniform(np.log(3 / 4), np.log(4 / 3), 100_000)),
    )
    width, height = np.sqrt(area * ratio), np.sqrt(area / ratio)
    expected = width[(width <= 1) & (height <= 1)].mean()
    assert np.mean(widths) == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: EvalTransform(size=8), ("out_of_range", "size")),
        (lambda: ConVIRTAugmentation(size=100_000), ("out_of_range", "size")),
        (lambda: ConVIRTAugmentation(area=(0.0, 1.0)), ("out_of_range", "area")),
        (lambda: ConVIRTAugmentation(area=(0.9, 0.5)), ("out_of_range", "area")),
        (lambda: ConVIRTAugmentation(aspect=(1.5, 0.5)), ("out_of_range", "aspect")),
        (lambda: ConVIRTAugmentation(flip_rate=1.5), ("out_of_range", "flip_rate")),
        (lambda: ConVIRTAugmentation(flip="sometimes"), ("unknown_name", "flip")),
    ],
)
def test_invalid_settings_raise(make, expected: tuple[str, ...]) -> None:
    with raises(ConfigError, *expected):
        make()


@pytest.mark.parametrize("shape", [(300, 200), (200, 301), (64, 64), (500, 333)])
@pytest.mark.parametrize("fit", ["crop", "pad", "squash"])
@pytest.mark.parametrize(
    "more", [{}, {"margin": 8}, {"stored_size": 96}, {"stored_size": 96, "margin": 8}]
)
def test_box_matches_the_output(shape: tuple[int, int], fit: str, more: dict) -> None:
    """Compare the box with the positions that ramp images show in the output."""
    transform = EvalTransform(size=64, fit=fit, **more)
    box = transform.box(*shape)
    ramps = 55 + 200 * np.indices(shape) / np.array(shape)[:, None, None]
    white = transform.build()(np.full(shape, 255, np.uint8), rng()).image_HWC[:, :, 0]
    inside = cv2.erode(white, np.ones((7, 7))) == 255  # bicubic resizing rings at the borders
    for axis, (start, length) in enumerate([(box.top, box.height), (box.left, box.width)]):
        shown = transform.build()(ramps[axis].astype(np.uint8), rng()).image_HWC[:, :, 0]
        measured = (shown.astype(np.float64) + 0.5 - 55) / 200 * shape[axis]
        expected = start + (np.indices((64, 64))[axis] + 0.5) * length / 64
        within = (
            inside & (expected > 0.1 * shape[axis]) & (expected < 0.9 * shape[axis])
        )  # exclude rounding at the edges
        assert within.sum() > 500
        assert np.abs(measured - expected)[within].max() < 0.012 * shape[axis] + 1


def test_margin_is_cropped() -> None:
    image = rng(1).integers(0, 256, (256, 256), dtype=np.uint8)
    cut = EvalTransform(size=224, fit="pad", margin=16).build()(image, rng()).image_HWC[:, :, 0]
    np.testing.assert_array_equal(cut, image[16:240, 16:240])
    with raises(ConfigError, "out_of_range", "margin"):
        EvalTransform(margin=-1)


def test_random_crops_cover_the_padded_square() -> None:
    image = rng(1).integers(0, 256, (20, 12), dtype=np.uint8)
    square = np.zeros((20, 20), np.uint8)
    square[:, 4:16] = image
    parts = np.lib.stride_tricks.sliding_window_view(square, (16, 16)).reshape(-1, 16, 16)
    crop = RandomCrop(size=16, padded_size=20).build()
    drawn = [crop(image, rng(seed)).image_HWC[:, :, 0] for seed in range(200)]
    places = [int(np.flatnonzero((parts == part).all(axis=(1, 2)))[0]) for part in drawn]
    assert set(places) == set(range(25))
    np.testing.assert_array_equal(crop(image, rng(7)).image_HWC[:, :, 0], drawn[7])
    with raises(ConfigError, "out_of_range", "padded_size"):
        RandomCrop(size=224, padded_size=200)
