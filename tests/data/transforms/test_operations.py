"""The operations of `ConVIRTAugmentation` beside albumentations' own pipeline."""

import random

import albumentations
import numpy as np
import pytest

from medvl.data.transforms.image import ConVIRTAugmentation
from medvl.data.transforms.operations import to_square, with_channels


def by_albumentations(
    settings: ConVIRTAugmentation, image: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Return the augmented image of albumentations' `Compose`, with one generator for all."""
    pipeline = albumentations.Compose(
        [
            albumentations.RandomResizedCrop(
                (settings.size, settings.size),
                scale=settings.area,
                ratio=settings.aspect,
                area_for_downscale="image",
                p=1.0,
            ),
            albumentations.Affine(
                rotate=(-settings.rotation, settings.rotation),
                translate_percent=(-settings.translation, settings.translation),
                scale=settings.scale,
                keep_ratio=True,
                p=1.0,
            ),
            albumentations.ColorJitter(
                brightness=(1 - settings.brightness, 1 + settings.brightness),
                contrast=(1 - settings.contrast, 1 + settings.contrast),
                saturation=(1.0, 1.0),
                hue=(0.0, 0.0),
                p=1.0,
            ),
            albumentations.GaussianBlur(sigma_limit=settings.blur_sigma, blur_limit=0, p=1.0),
        ]
    )
    py_random = random.Random(int(rng.integers(2**31)))
    for operation in pipeline.transforms:
        operation.set_random_state(rng, py_random)
    if settings.flip != "off" and rng.random() < settings.flip_rate:
        image = np.ascontiguousarray(image[:, ::-1])
    source = with_channels(to_square(image) if settings.pad else image)
    result: np.ndarray = with_channels(pipeline(image=source)["image"])
    return result


@pytest.mark.parametrize(
    "settings",
    [
        ConVIRTAugmentation(size=64),
        ConVIRTAugmentation(size=65, pad=True),
        ConVIRTAugmentation(size=64, area=(0.9, 1.0), aspect=(3.0, 4.0)),
        ConVIRTAugmentation.crop(64, (0.1, 1.0), "plain"),
        ConVIRTAugmentation(size=64, pad=True, area=(0.01, 0.02)),
    ],
    ids=["default", "pad", "central", "crop", "border"],
)
def test_pixels_equal_those_of_albumentations(settings: ConVIRTAugmentation) -> None:
    apply = settings.build()
    noise = np.random.default_rng(0)
    for seed, shape in enumerate([(90, 121), (64, 64), (16, 90), (151, 90, 3)] * 3):
        image = noise.integers(0, 256, shape, np.uint8)
        found = apply(image, np.random.default_rng(seed)).image_HWC
        expected = by_albumentations(settings, image, np.random.default_rng(seed))
        assert found.dtype == np.uint8
        np.testing.assert_array_equal(found, expected)
