"""Image transforms on the CPU: uint8 in, uint8 out; scaling and normalisation happen in the encoder, on the device.

A transform is a frozen configuration; `build()` gives the function that a loader worker calls. All randomness comes
from the generator that the loader derives of (seed, epoch, key), so an image is augmented alike whoever loads it.
"""

import dataclasses
import os
from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol, Self

import cv2
import numpy as np

from medvl.errors import ConfigError

Flip = Literal["off", "swap_text", "plain"]
"""What a horizontal flip does to the text: there is no flip, left and right are exchanged, or nothing is done (the
image then contradicts a text that names a side, as in most published recipes)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Transformed:
    """An image as the batch will hold it, and whether it was mirrored."""

    image_HWC: np.ndarray
    flipped: bool = False


class Box(NamedTuple):
    """A rectangle in pixels of an image, edges included: it may reach beyond those of the image."""

    top: float
    left: float
    height: float
    width: float


BuiltTransform = Callable[[np.ndarray, np.random.Generator], Transformed]


class ImageTransform(Protocol):
    """A transform's configuration."""

    @property
    def size(self) -> int:
        """Height and width of what comes out, in pixels."""

    @property
    def flip(self) -> Flip:
        """What a horizontal flip does to the text."""

    def build(self) -> BuiltTransform:
        """The function that a loader worker calls."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EvalTransform:
    """Resize to a square without randomness. Shrinking averages over areas, growing is bilinear."""

    size: int = 224
    fit: Literal["crop", "pad", "squash"] = "crop"
    """crop: short side to `size`, centre crop (what the published systems do); pad: long side to `size`, black
    borders (nothing of the lung is lost); squash: both sides to `size`."""
    stored_size: int | None = None
    """Side of the squares that a published system keeps on disk: the square is made at this size first, and then
    brought to `size` by bicubic interpolation without antialiasing (CheXzero). None goes there at once."""
    margin: int = 0
    """Pixels that are cut off on every side in the end: a margin of 16 makes a square of 256 for a size of 224 (GLoRIA,
    which trains with random crops of it)."""

    def __post_init__(self) -> None:
        _check_size(self.size)
        if self.stored_size is not None:
            _check_size(self.stored_size)
        if not 0 <= self.margin <= self.size:
            raise ConfigError(f"margin must be between 0 and the size of {self.size}, got {self.margin}")

    @property
    def flip(self) -> Flip:
        """What a horizontal flip does to the text."""
        return "off"

    def build(self) -> BuiltTransform:
        """The function that a loader worker calls."""
        return self._apply

    def __call__(self, image: np.ndarray) -> np.ndarray:
        """Prepare one image for a model.

        Args:
            image: uint8 grey (H, W) or RGB (H, W, 3).

        Returns:
            uint8 (1 or 3, size, size).
        """
        square_HWC = self._apply(image, np.random.default_rng(0)).image_HWC
        return np.ascontiguousarray(square_HWC.transpose(2, 0, 1))

    def box(self, height: int, width: int) -> Box:
        """The part of an image of that size which the square shows, borders included: what maps are laid over."""
        whole = self.size + 2 * self.margin
        first = self.stored_size or whole
        scaled_height, scaled_width, top, left = self._placed(height, width, first)
        down, across = height / scaled_height, width / scaled_width  # pixels of the image a pixel of the square
        cut, kept = self.margin * first / whole, self.size * first / whole
        return Box((cut - top) * down, (cut - left) * across, kept * down, kept * across)

    def _apply(self, image: np.ndarray, rng: np.random.Generator) -> Transformed:
        whole = self.size + 2 * self.margin
        square_HWC = self._square(image, self.stored_size or whole)
        if self.stored_size is not None:
            square_HWC = _with_channels(cv2.resize(square_HWC, (whole, whole), interpolation=cv2.INTER_CUBIC))
        inner = slice(self.margin, self.margin + self.size)
        return Transformed(np.ascontiguousarray(square_HWC[inner, inner]))

    def _square(self, image: np.ndarray, size: int) -> np.ndarray:
        height, width = image.shape[:2]
        scaled_height, scaled_width, top, left = self._placed(height, width, size)
        image = _with_channels(_resize(image, scaled_height, scaled_width))
        if self.fit == "crop":
            return image[-top : size - top, -left : size - left]
        square = np.zeros((size, size, image.shape[2]), np.uint8)
        square[top : top + scaled_height, left : left + scaled_width] = image
        return square

    def _placed(self, height: int, width: int, size: int) -> tuple[int, int, int, int]:
        """Height and width that an image is brought to, and where its first row and column are in the square."""
        if self.fit == "squash":
            return size, size, 0, 0
        side = min(height, width) if self.fit == "crop" else max(height, width)
        scaled_height, scaled_width = max(1, round(height * size / side)), max(1, round(width * size / side))
        top, left = abs(size - scaled_height) // 2, abs(size - scaled_width) // 2
        return scaled_height, scaled_width, *((-top, -left) if self.fit == "crop" else (top, left))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RandomCrop:
    """Long side to `padded_size`, black borders to a square, and a random part of it: all that GLoRIA augments with."""

    size: int = 224
    padded_size: int = 256

    def __post_init__(self) -> None:
        _check_size(self.size)
        if self.padded_size < self.size:
            raise ConfigError(f"padded_size must be at least the size of {self.size}, got {self.padded_size}")

    @property
    def flip(self) -> Flip:
        """What a horizontal flip does to the text."""
        return "off"

    def build(self) -> BuiltTransform:
        """The function that a loader worker calls."""
        whole = EvalTransform(size=self.padded_size, fit="pad").build()

        def apply(image: np.ndarray, rng: np.random.Generator) -> Transformed:
            top, left = rng.integers(self.padded_size - self.size + 1, size=2)
            square_HWC = whole(image, rng).image_HWC
            return Transformed(np.ascontiguousarray(square_HWC[top : top + self.size, left : left + self.size]))

        return apply


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ConVIRTAugmentation:
    """Random crop, flip, affine, brightness and contrast, blur: ConVIRT's five (appendix of arXiv 2010.00747).

    Brightness and contrast are multiplicative factors around zero and around the mean, as torchvision defines them.
    """

    size: int = 224
    flip: Flip = "swap_text"
    """The paper flips half of the images and leaves the text alone: that is `plain`."""
    area: tuple[float, float] = (0.6, 1.0)
    """Range of the crop's share of the image."""
    rotation: float = 20.0
    """Largest rotation either way, in degrees."""
    translation: float = 0.1
    """Largest shift either way, as a share of the side."""
    scale: tuple[float, float] = (0.95, 1.05)
    brightness: float = 0.4
    contrast: float = 0.4
    """Factors are drawn from 1 - value to 1 + value."""
    blur_sigma: tuple[float, float] = (0.1, 3.0)
    """In pixels of the crop. The published range is for 224 pixels; scale it with the size."""

    @classmethod
    def weak(cls, size: int) -> Self:
        """Without the flip and at about a quarter of the strength: for small encoders, from scratch, on few images."""
        return cls(
            size=size,
            flip="off",
            area=(0.7, 1.0),
            rotation=5,
            translation=0.05,
            brightness=0.2,
            contrast=0.2,
            blur_sigma=(0.1, 0.5),
        )

    @classmethod
    def crop(cls, size: int, area: tuple[float, float]) -> Self:
        """The random crop alone."""
        return cls(
            size=size,
            flip="off",
            area=area,
            rotation=0,
            translation=0,
            scale=(1.0, 1.0),
            brightness=0,
            contrast=0,
            blur_sigma=(0.1, 0.1),
        )

    def __post_init__(self) -> None:
        _check_size(self.size)
        if not 0 < self.area[0] <= self.area[1] <= 1:
            raise ConfigError(f"area must be a range within (0, 1], got {self.area}")
        if self.flip not in ("off", "swap_text", "plain"):
            raise ConfigError(f"flip must be off, swap_text or plain, got {self.flip!r}")

    def build(self) -> BuiltTransform:
        """The function that a loader worker calls."""
        os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")  # or its import asks the network for a newer version
        import albumentations

        pipeline = albumentations.Compose(
            [
                albumentations.RandomResizedCrop((self.size, self.size), scale=self.area, p=1.0),
                albumentations.Affine(
                    rotate=(-self.rotation, self.rotation),
                    translate_percent=(-self.translation, self.translation),
                    scale=self.scale,
                    p=1.0,
                ),
                albumentations.ColorJitter(
                    brightness=(1 - self.brightness, 1 + self.brightness),
                    contrast=(1 - self.contrast, 1 + self.contrast),
                    saturation=(1.0, 1.0),
                    hue=(0.0, 0.0),
                    p=1.0,
                ),
                albumentations.GaussianBlur(sigma_limit=self.blur_sigma, blur_limit=0, p=1.0),
            ]
        )
        flips = self.flip != "off"

        def apply(image: np.ndarray, rng: np.random.Generator) -> Transformed:
            pipeline.set_random_seed(int(rng.integers(2**31)))
            flipped = flips and bool(rng.random() < 0.5)
            # Mirroring first commutes with all that follows, whose distributions are symmetric.
            source = np.ascontiguousarray(image[:, ::-1]) if flipped else image
            return Transformed(_with_channels(pipeline(image=_with_channels(source))["image"]), flipped)

        return apply


def _resize(image: np.ndarray, height: int, width: int) -> np.ndarray:
    shrinks = height * width < image.shape[0] * image.shape[1]
    return cv2.resize(image, (width, height), interpolation=cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR)


def _with_channels(image: np.ndarray) -> np.ndarray:
    return image[:, :, None] if image.ndim == 2 else image


def _check_size(size: int) -> None:
    if not 16 <= size <= 4096:
        raise ConfigError(f"image size must be between 16 and 4096 pixels, got {size}")
