"""Transforms against the image processors of transformers, in grey levels."""

from typing import Any

import numpy as np
import pytest
from PIL import Image

from medvl.data import EvalTransform

SIZES = [(512, 512), (1024, 801), (333, 251), (250, 325), (60, 75)]


def radiograph(height: int, width: int) -> np.ndarray:
    """Return smooth structures under noise: kernels differ by several grey levels on it."""
    y_HW, x_HW = np.mgrid[:height, :width]
    noise_HW = np.random.default_rng(height * width).normal(0, 25, (height, width))
    values_HW = 128 + 80 * np.sin(x_HW / 37) * np.cos(y_HW / 53) + noise_HW
    return values_HW.clip(0, 255).astype(np.uint8)


def processed(kind: str, image_HW: np.ndarray, **settings: Any) -> np.ndarray:
    """Return the pixels that a processor gives a model, before their scale and statistics."""
    from transformers.models.bit.image_processing_pil_bit import BitImageProcessorPil
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
    from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

    kinds: dict[str, Any] = {
        "bit": BitImageProcessorPil,
        "clip": CLIPImageProcessorPil,
        "siglip": SiglipImageProcessorPil,
        "vit": ViTImageProcessorPil,
    }
    processor = kinds[kind](**settings, do_normalize=False, do_rescale=False)
    image = Image.fromarray(np.stack([image_HW] * 3, axis=2))
    return np.asarray(processor(images=image, return_tensors="np")["pixel_values"][0, 0])


@pytest.mark.parametrize(("height", "width"), SIZES)
@pytest.mark.parametrize(
    ("kind", "settings", "transform"),
    [
        ("siglip", {"size": {"height": 64, "width": 64}}, {"size": 64, "fit": "squash"}),
        ("vit", {"size": {"height": 64, "width": 64}}, {"size": 64, "fit": "squash"}),
        (
            "clip",
            {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}},
            {"size": 56, "crop_rounding": "down"},
        ),
        (
            "bit",
            {"size": {"shortest_edge": 64}, "crop_size": {"height": 56, "width": 56}},
            {"size": 56, "margin": 4, "crop_rounding": "down"},
        ),
    ],
)
def test_transforms_give_the_pixels_of_transformers_processors(
    kind: str, settings: dict[str, Any], transform: dict[str, Any], height: int, width: int
) -> None:
    image_HW = radiograph(height, width)
    kernel: Any = "bilinear_antialias" if kind == "vit" else "bicubic_antialias"
    expected_HW = processed(kind, image_HW, **settings)
    actual_HW = EvalTransform(**transform, resize=kernel)(image_HW)[0, 0].numpy()
    assert np.array_equal(actual_HW, expected_HW)
    assert not np.array_equal(EvalTransform(**transform)(image_HW)[0, 0].numpy(), expected_HW)


def test_a_crop_between_two_pixels_is_rounded_as_its_library_does() -> None:
    """The long side of (250, 325) becomes 72 of 56 pixels, that of (1000, 1301) 291 of 224."""
    image_HW = radiograph(1000, 1301)
    settings = {"size": 224, "resize": "bicubic_antialias"}
    nearest, down = (
        EvalTransform(**settings, crop_rounding=rounding) for rounding in ("nearest", "down")
    )
    resized = Image.fromarray(image_HW).resize((291, 224), Image.Resampling.BICUBIC)
    for transform, left in ((nearest, 34), (down, 33)):
        expected = np.asarray(resized)[:, left : left + 224]
        assert np.array_equal(transform(image_HW)[0, 0].numpy(), expected)
        assert transform.box(1000, 1301).left == pytest.approx(left * 1301 / 291)
    assert "crop_rounding" not in nearest.settings()  # stored features stay valid
    assert nearest == EvalTransform(**settings) != down
