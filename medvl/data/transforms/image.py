"""Image transforms on the CPU, uint8 to uint8; the encoder scales and normalises on the device.

A transform is a frozen configuration; `build()` returns the function that loader workers call. All
randomness comes from a generator that the loader derives from (seed, epoch, key), so the
augmentation of an image does not depend on the worker or rank.
"""

import dataclasses
import os
import random
from collections.abc import Callable, Iterable, Sequence
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    NamedTuple,
    Protocol,
    Self,
    get_args,
    runtime_checkable,
)

import cv2
import numpy as np
import torch
from torch import Tensor

from medvl.common.config_io import check_choice
from medvl.data.images.codecs import JpegImage, decode_image, encode_stored
from medvl.data.reports.cleaning import names_side
from medvl.data.transforms.operations import (
    Crop,
    Decode,
    EncodedCrop,
    Kernel,
    crop_and_resize,
    draw,
    draw_parameters,
    kernel_radius,
    leave_to_device,
    resize,
    to_square,
    warp,
    with_channels,
)
from medvl.errors import ConfigError

if TYPE_CHECKING:
    from medvl.data.images.read import ImageInput


CropRounding = Literal["nearest", "down"]
"""Rounding of the first row and column of a central crop. nearest: to the nearest pixel, a half to
the even one, as torchvision's CenterCrop; down: as Hugging Face's processors.
"""

Flip = Literal["off", "swap_text", "sideless", "plain"]
"""Handling of horizontal flips: off (no flips); swap_text (left and right are exchanged in the text
and in the names of labels, boxes and masks); sideless (only images whose texts, labels, boxes and
masks name no side are flipped); plain (texts and labels are unchanged and then contradict the image
where they name a side, as in most published recipes).
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Transformed:
    """A transformed image, and whether it was mirrored."""

    image_HWC: np.ndarray
    flipped: bool = False
    turn_22: np.ndarray | None = None
    """float32: rotation or reflection about the centre, from offsets (x, y) in this image to those
    in the image before it was turned; None: not turned, or not known.
    """
    deferred_K: np.ndarray | None = None
    """float32: parameters of the augmentation that is left to the device; None: the image is
    augmented.
    """
    encoded: EncodedCrop | None = None
    """The image where it is left to the device to decode, black in `image_HWC`; None: it is
    decoded.
    """


class Box(NamedTuple):
    """A rectangle in pixels of an image, which may extend beyond the image."""

    top: float
    left: float
    height: float
    width: float


BuiltTransform = Callable[[Any, np.random.Generator], Transformed]
"""Function of an image, uint8 (H, W) or (H, W, 3), or a `JpegImage`, and a generator."""


class ImageTransform(Protocol):
    """Configuration of a transform."""

    @property
    def size(self) -> int:
        """Height and width of the output in pixels."""

    @property
    def flip(self) -> Flip:
        """Handling of horizontal flips."""

    def build(self) -> BuiltTransform:
        """Return the function that loader workers call."""


@runtime_checkable
class ReadsTexts(Protocol):
    """A transform that flips or turns an image only where its texts allow it."""

    def for_texts(self, texts: Iterable[str]) -> ImageTransform:
        """Return the transform for an image with these texts."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EvalTransform:
    """Deterministic resize to a square."""

    size: int = 224
    fit: Literal["crop", "pad", "squash"] = "crop"
    """crop: short side to `size`, centre crop (as in most published systems); pad: long side to
    `size`, black borders (keeps the whole image); squash: both sides to `size`.
    """
    resize: Kernel = "area"
    """Kernel of the resize (`medvl.data.transforms.operations.Kernel`): an imported model has that
    of its released code.
    """
    pad_first: bool = False
    """With `fit` pad: add the borders before the resize, to a square of at least `size`, as MedCLIP
    does: smaller images are not enlarged.
    """
    stored_size: int | None = None
    """If set, resize to a square of this size first, then to `size` by bicubic interpolation
    without antialiasing, as systems that store squares on disk do (CheXzero).
    """
    margin: int = 0
    """Pixels cropped from every side at the end: a margin of 16 crops a square of 256 to a size of
    224 (GLoRIA, which trains with random crops).
    """
    crop_rounding: CropRounding = "nearest"
    """Place of a crop whose centre lies between two pixels."""

    def __post_init__(self) -> None:
        _check_size(self.size)
        check_choice(self.resize, get_args(Kernel), "resize")
        check_choice(self.crop_rounding, get_args(CropRounding), "crop_rounding")
        if self.pad_first and self.fit != "pad":
            message = f"pad_first needs fit 'pad', got {self.fit!r}"
            raise ConfigError(message, "conflict", field="pad_first")
        if self.stored_size is not None:
            _check_size(self.stored_size)
        if not 0 <= self.margin <= self.size:
            message = f"margin must be between 0 and the size of {self.size}, got {self.margin}"
            raise ConfigError(message, "out_of_range", field="margin")

    @property
    def flip(self) -> Flip:
        """Handling of horizontal flips."""
        return "off"

    @property
    def trained_color(self) -> bool | None:
        """Whether the model was trained on RGB images; None if it has no record of its training."""
        return None

    def build(self) -> BuiltTransform:
        """Return the function that loader workers call."""
        return self._apply

    def __call__(
        self, images: "ImageInput | Sequence[ImageInput]", *, frame: int | None = None
    ) -> Tensor:
        """Prepare images for a model: return uint8 (B, C, size, size), C = 1 if all are grey, else
        3.

        Args:
            images: one image (`medvl.data.ImageInput`) or a list of them; an array or tensor with
                four dimensions is a list.
            frame: index of the frame in multi-frame DICOM files, from 0; with None, they are
                refused.

        Raises ImageError, DicomError or FileNotFoundError if an image cannot be read, ConfigError
        for an empty list.
        """
        squares = [self._square_of(self.read(image, frame=frame)) for image in as_list(images)]
        if not squares:
            raise ConfigError(
                "expected at least one image, got an empty list", "empty", field="images"
            )
        from medvl.data.images.read import stack_images

        return torch.from_numpy(stack_images(squares))

    def read(self, image: "ImageInput", *, frame: int | None = None) -> np.ndarray:
        """Return the pixels of an original image, uint8 (H, W) or (H, W, 3). Raises as a call
        does.
        """
        from medvl.data.images.read import read_image

        return read_image(image, frame=frame)

    def settings(self) -> dict[str, Any]:
        """Return the fields that make up the transform of stored pixels: those of an
        `EvalTransform`.

        Fields that are newer than stored features are left out where they have their defaults.
        """
        fields = {
            field.name: getattr(self, field.name) for field in dataclasses.fields(EvalTransform)
        }
        newer = {"resize": "area", "pad_first": False, "crop_rounding": "nearest"}
        return {
            name: value
            for name, value in fields.items()
            if name not in newer or value != newer[name]
        }

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EvalTransform) and self.settings() == other.settings()

    def __hash__(self) -> int:
        return hash(tuple(self.settings().items()))

    def _square_of(self, pixels: np.ndarray) -> np.ndarray:
        """Return uint8 (C, size, size) of the pixels of an original image."""
        return self._apply(pixels, np.random.default_rng(0)).image_HWC.transpose(2, 0, 1)

    def box(self, height: int, width: int) -> Box:
        """Return the rectangle of an image (height, width) that the output shows, including
        borders.
        """
        full = self.size + 2 * self.margin
        first = self.stored_size or full
        scaled_height, scaled_width, top, left = self._placement(height, width, first)
        # image pixels per output pixel
        down = height / scaled_height
        across = width / scaled_width
        margin = self.margin * first / full
        size = self.size * first / full
        return Box((margin - top) * down, (margin - left) * across, size * down, size * across)

    def _apply(self, image: np.ndarray, rng: np.random.Generator) -> Transformed:
        full = self.size + 2 * self.margin
        square_HWC = self._square(image, self.stored_size or full)
        if self.stored_size is not None:
            square_HWC = with_channels(
                cv2.resize(square_HWC, (full, full), interpolation=cv2.INTER_CUBIC)
            )
        inner = slice(self.margin, self.margin + self.size)
        return Transformed(np.ascontiguousarray(square_HWC[inner, inner]))

    def _square(self, image: np.ndarray, size: int) -> np.ndarray:
        height, width = image.shape[:2]
        if self.pad_first:
            return with_channels(resize(to_square(image, least=size), size, size, self.resize))
        scaled_height, scaled_width, top, left = self._placement(height, width, size)
        image = with_channels(resize(image, scaled_height, scaled_width, self.resize))
        if self.fit == "crop":
            return image[-top : size - top, -left : size - left]
        square = np.zeros((size, size, image.shape[2]), np.uint8)
        square[top : top + scaled_height, left : left + scaled_width] = image
        return square

    def _placement(self, height: int, width: int, size: int) -> tuple[Any, Any, Any, Any]:
        """Return the scaled height and width of an image, and its top and left offset in the
        square, in pixels.

        With `pad_first` these are fractions of pixels, which only `box` takes.
        """
        if self.fit == "squash":
            return size, size, 0, 0
        if self.fit == "crop":  # sides are cut off to whole pixels, as by torchvision's Resize
            side = min(height, width)
            scaled_height = size * height // side
            scaled_width = size * width // side
            rounding = round if self.crop_rounding == "nearest" else int
            return (
                scaled_height,
                scaled_width,
                -rounding((scaled_height - size) / 2),
                -rounding((scaled_width - size) / 2),
            )
        if self.pad_first:  # a square of `side`, with the image in its middle
            side = max(height, width, size)
            top = (side - height) // 2 * size / side
            left = (side - width) // 2 * size / side
            return height * size / side, width * size / side, top, left
        side = max(
            height, width
        )  # the shorter side is cut off to whole pixels, as by GLoRIA and CheXzero
        scaled_height, scaled_width = (
            size if length == side else max(1, int(length * (size / side)))
            for length in (height, width)
        )
        return scaled_height, scaled_width, (size - scaled_height) // 2, (size - scaled_width) // 2


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OriginalTransform(EvalTransform):
    """The transform of a model that was trained on shards; it prepares original images as
    conversion to shards does.

    Images that are larger than those of the shards are shrunk and compressed like them first, so
    that a model gets the same pixels from an original file as from the shards that the file is
    converted to. Where the shards were cut to their foreground, so is the original image. Smaller
    images, and pixels from shards, are taken as they are.
    """

    short_side: int
    image_format: Literal["jpg", "png"]
    quality: int
    color: bool
    crop_background: bool = False

    @property
    def trained_color(self) -> bool | None:
        return self.color

    def read(self, image: "ImageInput", *, frame: int | None = None) -> np.ndarray:
        from medvl.data.images.read import cut_background, read_image

        pixels = read_image(image, color=self.color, frame=frame)
        return cut_background(pixels) if self.crop_background else pixels

    def _square_of(self, pixels: np.ndarray) -> np.ndarray:
        if min(pixels.shape[:2]) > self.short_side:
            data = encode_stored(pixels, self.short_side, self.image_format, self.quality)
            pixels = decode_image(data, color=self.color)
        return EvalTransform._square_of(
            self, pixels
        )  # super() does not work in a dataclass with slots


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RandomCrop:
    """GLoRIA's augmentation: long side to `padded_size`, black borders to a square, and a random
    crop.
    """

    size: int = 224
    padded_size: int = 256

    def __post_init__(self) -> None:
        _check_size(self.size)
        if self.padded_size < self.size:
            message = (
                f"padded_size must be at least the size of {self.size}, got {self.padded_size}"
            )
            raise ConfigError(message, "out_of_range", field="padded_size")

    @property
    def flip(self) -> Flip:
        """Handling of horizontal flips."""
        return "off"

    def build(self) -> BuiltTransform:
        """Return the function that loader workers call."""
        full = EvalTransform(size=self.padded_size, fit="pad").build()

        def apply(image: np.ndarray, rng: np.random.Generator) -> Transformed:
            top, left = rng.integers(self.padded_size - self.size + 1, size=2)
            square_HWC = full(image, rng).image_HWC
            return Transformed(
                np.ascontiguousarray(square_HWC[top : top + self.size, left : left + self.size])
            )

        return apply


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ConVIRTAugmentation:
    """ConVIRT's augmentation: random crop, flip, affine, brightness and contrast, blur (appendix of
    arXiv 2010.00747).

    Brightness and contrast are multiplicative factors around zero and around the mean, as in
    torchvision. A crop larger than the output is shrunk by averaging areas, as in evaluation.
    """

    size: int = 224
    flip: Flip = "swap_text"
    """The paper flips half of the images without changing the text, which is `plain`."""
    flip_rate: float = 0.5
    """Share of the images that are flipped, of those that may be."""
    pad: bool = False
    """Add black borders to a square before the crop (MedCLIP, CARZero)."""
    area: tuple[float, float] = (0.6, 1.0)
    """Range of the crop's area as a share of the image."""
    aspect: tuple[float, float] = (3 / 4, 4 / 3)
    """Range of the crop's width over its height."""
    rotation: float = 20.0
    """Maximum rotation in either direction, in degrees."""
    translation: float = 0.1
    """Maximum shift in either direction, as a share of the side."""
    scale: tuple[float, float] = (0.95, 1.05)
    """Range of the factor by which both sides are scaled."""
    brightness: float = 0.4
    contrast: float = 0.4
    """Factors are drawn from 1 - value to 1 + value."""
    blur_sigma: tuple[float, float] = (0.1, 3.0)
    """Range in pixels of the output. The published range is for 224 pixels; scale it with the
    size.
    """
    on_device: bool = False
    """Leave all but crop and flip to the device of the training step, for less work in the loader's
    workers: the same parameters, and images that differ by one grey level in a few pixels
    (`medvl.data.transforms.operations`).
    """
    decode: Decode = "full"
    """Size at which JPEG images are decoded, or that the device decodes them."""

    @classmethod
    def weak(cls, size: int) -> Self:
        """Return a variant without flips and with about a quarter of the strength, for small
        encoders and data sets.
        """
        return cls(
            size=size, flip="off", area=(0.7, 1.0), rotation=5, translation=0.05, brightness=0.2,
            contrast=0.2, blur_sigma=(0.1, 0.5),
        )  # fmt: skip

    @classmethod
    def crop(cls, size: int, area: tuple[float, float], flip: Flip = "off") -> Self:
        """Return a variant with the random crop only, and flips where `flip` is given."""
        return cls(
            size=size, flip=flip, area=area, rotation=0, translation=0, scale=(1.0, 1.0),
            brightness=0, contrast=0, blur_sigma=(0.1, 0.1),
        )  # fmt: skip

    def __post_init__(self) -> None:
        _check_size(self.size)
        if not 0 < self.area[0] <= self.area[1] <= 1:
            raise ConfigError(
                f"area must be a range within (0, 1], got {self.area}", "out_of_range", field="area"
            )
        if not 0 < self.aspect[0] <= self.aspect[1]:
            raise ConfigError(
                f"aspect must be a range above 0, got {self.aspect}", "out_of_range", field="aspect"
            )
        if not 0 <= self.flip_rate <= 1:
            message = f"flip_rate must be within [0, 1], got {self.flip_rate}"
            raise ConfigError(message, "out_of_range", field="flip_rate")
        if self.on_device and kernel_radius(self.blur_sigma[1]) >= self.size:
            message = (
                f"with on_device, blur_sigma must be below {self.size / 3.5:.1f}, got "
                f"{self.blur_sigma}"
            )
            raise ConfigError(message, "out_of_range", field="blur_sigma")
        check_flip(self.flip)
        check_choice(self.decode, get_args(Decode), "decode")
        if self.decode == "device" and not self.on_device:
            message = "decode 'device' needs on_device True, which augments there too"
            raise ConfigError(message, "conflict", field="decode")

    def for_texts(self, texts: Iterable[str]) -> Self:
        """Return the transform without flips if `flip` is sideless and a text names a side."""
        keeps_sides = self.flip == "sideless" and any(map(names_side, texts))
        return dataclasses.replace(self, flip="off") if keeps_sides else self

    def build(self) -> BuiltTransform:
        """Return the function that loader workers call."""
        os.environ.setdefault(
            "NO_ALBUMENTATIONS_UPDATE", "1"
        )  # otherwise its import checks the network for updates
        import albumentations

        crop, affine, color, blur = operations = (
            albumentations.RandomResizedCrop(
                (self.size, self.size),
                scale=self.area,
                ratio=self.aspect,
                area_for_downscale="image",
                p=1.0,
            ),
            albumentations.Affine(
                rotate=(-self.rotation, self.rotation),
                translate_percent=(-self.translation, self.translation),
                scale=self.scale,
                keep_ratio=True,
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
        )
        flips = self.flip != "off"

        def apply(image: np.ndarray | JpegImage, rng: np.random.Generator) -> Transformed:
            # Seeded alike, bright images would be the blurred ones: one generator for all.
            py_random = random.Random(int(rng.integers(2**31)))
            for operation in operations:
                operation.set_random_state(rng, py_random)
            is_flipped = flips and bool(rng.random() < self.flip_rate)
            # Mirroring first is equivalent: the distributions of the other steps are symmetric.
            area = self._drawn(crop, image.shape, mirror=is_flipped)
            encoded = None
            if self.decode == "device":
                image, encoded = leave_to_device(image, area, mirror=is_flipped)
            if encoded is None:
                pixels = crop_and_resize(image, area, self.size, mirror=is_flipped)
            else:
                pixels = np.zeros((self.size, self.size, *image.shape[2:]), np.uint8)
            image_HWC = with_channels(pixels)
            shape = image_HWC.shape
            if self.on_device:
                radius = kernel_radius(self.blur_sigma[1])
                deferred_K = draw_parameters(affine, color, blur, shape, radius)
                return Transformed(image_HWC, is_flipped, deferred_K=deferred_K, encoded=encoded)
            image_HWC = with_channels(warp(image_HWC, draw(affine, shape)))
            image_HWC = color.apply(image_HWC, **draw(color, shape))
            image_HWC = blur.apply(image_HWC, **draw(blur, shape))
            return Transformed(np.ascontiguousarray(image_HWC), is_flipped)

        return apply

    def _drawn(self, crop: Any, shape: tuple[int, ...], *, mirror: bool) -> Crop:
        """Return the crop that is drawn of an image, or of its mirror image, with its borders."""
        height, width = shape[:2]
        side = max(height, width)
        padded = (side, side) if self.pad else (height, width)
        left, top, right, bottom = draw(crop, padded)["crop_coords"]
        down, across = (padded[0] - height) // 2, (padded[1] - width) // 2
        area = Crop(left - across, top - down, right - across, bottom - down)
        return area.mirrored(width) if mirror else area


def as_list(images: Any) -> Sequence[Any]:
    """Return a list of images: of one, those of a list, or the rows of an array or tensor with
    four dimensions.
    """
    if isinstance(images, list | tuple):
        return images
    if isinstance(images, np.ndarray | Tensor) and images.ndim == 4:
        return list(images)
    return [images]


def check_flip(flip: Flip) -> None:
    """Raise ConfigError for an unknown way of flipping."""
    if flip not in get_args(Flip):
        raise ConfigError(
            f"flip must be one of {', '.join(get_args(Flip))}, got {flip!r}",
            "unknown_name",
            field="flip",
        )


def _check_size(size: int) -> None:
    if not 16 <= size <= 4096:
        raise ConfigError(
            f"image size must be between 16 and 4096 pixels, got {size}",
            "out_of_range",
            field="size",
        )
