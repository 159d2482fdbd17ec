"""Operations of `ConVIRTAugmentation`: on the CPU, with the parameters that albumentations draws,
and on the device of the training step, for `ConVIRTAugmentation(on_device=True)`.

    # in a loader's worker, from the sample's generator
    parameters_K = draw_parameters(affine, color, blur, image_HWC.shape, radius)
    # all images of a batch at once, on their device
    batch = augment_batch(batch)

Those on the CPU give the pixels of albumentations' operation bit for bit, without its checks and
copies, which take a fifth of the time of the augmentation.

On the device, workers crop and resize an image, flip it, and draw the parameters of the other
operations, the same as without this option. The device applies them: affine map, brightness and
contrast, Gaussian blur. It computes in float32 and rounds after each operation as the operations on
the CPU do, so that a few pixels differ, by one grey level (OpenCV 5).

The K parameters of an image: the affine map from its pixels to those before it, six numbers by
rows; the factors of brightness and contrast; 1 where brightness is changed first, else 0; and half
a Gaussian kernel, R weights from its centre. V are the images of a sample (`IMAGES`).
"""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import cv2
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from medvl.data.images.codecs import JpegImage
from medvl.schema import Batch

if TYPE_CHECKING:
    from medvl.data.transforms.image import Transformed


_IDENTITY_33 = np.eye(3)
_TOLERANCE_33 = 1e-8 + 1e-5 * _IDENTITY_33
"""As in `np.allclose`, by which albumentations leaves an image as it is."""


Decode = Literal["full", "reduced"]
"""Decoding of JPEG images before a random crop. full: every pixel; reduced: a half, a quarter or an
eighth of both sides where the crop still has the pixels of the output. The draws are the same, and
the edges of the crop are moved to whole pixels of the reduced image. Other formats are decoded in
full.
"""


class Crop(NamedTuple):
    """A rectangle in whole pixels of an image, which may extend beyond the image."""

    left: int
    top: int
    right: int
    bottom: int

    def mirrored(self, width: int) -> "Crop":
        """Return the same part of the mirrored image."""
        return Crop(width - self.right, self.top, width - self.left, self.bottom)

    def reduction(self, size: int) -> int:
        """Return the largest of 8, 4, 2 and 1 by which the sides can be divided and still have
        `size` pixels.
        """
        side = min(self.right - self.left, self.bottom - self.top)
        return next((factor for factor in (8, 4, 2) if side >= factor * size), 1)

    def divided(self, factor: int) -> "Crop":
        """Return the same part of a reduced image, to the nearest whole pixel."""
        return Crop(*((side + factor // 2) // factor for side in self))


def draw(transform: Any, shape: tuple[int, ...]) -> dict[str, Any]:
    """Return the parameters that one of albumentations' transforms draws for an image's shape."""
    parameters: dict[str, Any] = transform.get_params() | {"shape": shape}
    return parameters | transform.get_params_dependent_on_data(parameters, {})


def cut(image: np.ndarray, crop: Crop) -> np.ndarray:
    """Return the pixels of a crop, black beyond the image."""
    height, width = image.shape[:2]
    top, bottom = max(0, crop.top), min(height, crop.bottom)
    left, right = max(0, crop.left), min(width, crop.right)
    if bottom <= top or right <= left:
        sides = crop.bottom - crop.top, crop.right - crop.left
        return np.zeros((*sides, *image.shape[2:]), np.uint8)
    inside = image[top:bottom, left:right]
    borders = top - crop.top, crop.bottom - bottom, left - crop.left, crop.right - right
    if not any(borders):
        return inside
    return cv2.copyMakeBorder(inside, *borders, cv2.BORDER_CONSTANT, value=(0, 0, 0))


def crop_and_resize(
    image: np.ndarray | JpegImage, crop: Crop, size: int, *, mirror: bool
) -> np.ndarray:
    """Return a crop as a square of `size`: areas are averaged where a side shrinks.

    A JPEG is decoded here, at the smallest size that still has `size` pixels in the crop. Raises
    ImageError where it is damaged.
    """
    if isinstance(image, JpegImage):
        factor = crop.reduction(size)
        image = image.decode(factor)
        crop = crop.divided(factor)
    pixels = cut(image, crop)
    if mirror:
        pixels = cv2.flip(pixels, 1)
    height, width = pixels.shape[:2]
    if (height, width) == (size, size):
        return np.ascontiguousarray(pixels)
    shrinks = height > size or width > size
    kernel = cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR
    return cv2.resize(pixels, (size, size), interpolation=kernel)


def warp(image: np.ndarray, parameters: dict[str, Any]) -> np.ndarray:
    """Return the image under the map of albumentations' Affine, black beyond the image."""
    matrix_33 = parameters["matrix"]
    if (np.abs(matrix_33 - _IDENTITY_33) <= _TOLERANCE_33).all():
        return image
    return cv2.warpAffine(image, matrix_33[:2], image.shape[1::-1], flags=cv2.INTER_LINEAR)


IMAGES = ("image_BCHW", "second_image_BCHW", "prior_BCHW")
"""Images of a batch, in the order of its parameters; those of `other_views_BVCHW` follow."""

_LUMINANCE = (0.299, 0.587, 0.114)


def kernel_radius(sigma: float) -> int:
    """Return the pixels on either side of a Gaussian kernel's centre, as albumentations cuts it."""
    return int(3.5 * sigma)


def draw_parameters(
    affine: Any, color: Any, blur: Any, shape: tuple[int, ...], radius: int
) -> np.ndarray:
    """Return float32 (K,): draw the parameters of albumentations' Affine, ColorJitter and
    GaussianBlur for an image of a shape.

    The kernel is filled up to `radius`.
    """
    inverse_23 = cv2.invertAffineTransform(draw(affine, shape)["matrix"][:2])
    change = draw(color, shape)
    kernel = draw(blur, shape)["kernel"]
    half_R = np.zeros(radius + 1)
    half = kernel[len(kernel) // 2 :]
    half_R[: len(half)] = half
    values = [
        *inverse_23.ravel(),
        change["brightness"],
        change["contrast"],
        change["order"].index(0) < change["order"].index(1),
        *half_R,
    ]
    return np.array(values, np.float32)


def stack_views(first: "Transformed", *others: "Transformed | None") -> np.ndarray | None:
    """Return the parameters (V, K) of a sample's images in the order of `IMAGES` and then those of
    its other views; None where the worker augmented them.

    Missing images are black placeholders, which no operation changes; they get the parameters of
    the first one.
    """
    parameters = [(image or first).deferred_K for image in (first, *others)]
    present = [each for each in parameters if each is not None]
    return np.stack(present) if present else None


def stack_samples(parameters: Sequence[np.ndarray | None]) -> Tensor | None:
    """Return (B, V, K) from those of the samples; None where the workers augmented all images.

    Samples with fewer other views repeat the parameters of their first image, for placeholders.
    """
    present = [each for each in parameters if each is not None]
    if not present:
        return None
    views = max(map(len, present))
    rows = [np.concatenate([each, each[:1].repeat(views - len(each), 0)]) for each in present]
    return torch.from_numpy(np.stack(rows))


def augment_batch(batch: Batch) -> Batch:
    """Return the batch with its images augmented, on their device; a batch that is augmented
    already is returned as is.

    The training step of `medvl.train` calls this. In a loop of your own, call it after
    `Batch.to(device)`.
    """
    if batch.augmentation_BVK is None:
        return batch
    augmented: dict[str, Any] = {"augmentation_BVK": None}
    for number, name in enumerate(IMAGES):
        image_BCHW = getattr(batch, name)
        if image_BCHW is not None:
            augmented[name] = augment_images(image_BCHW, batch.augmentation_BVK[:, number])
    others_BVCHW = batch.other_views_BVCHW
    if others_BVCHW is not None:
        parameters_BVK = batch.augmentation_BVK[:, len(IMAGES) :]
        others_NCHW = augment_images(others_BVCHW.flatten(0, 1), parameters_BVK.flatten(0, 1))
        augmented["other_views_BVCHW"] = others_NCHW.unflatten(0, parameters_BVK.shape[:2])
    return dataclasses.replace(batch, **augmented)


@torch.no_grad()
def augment_images(image_BCHW: Tensor, parameters_BK: Tensor) -> Tensor:
    """Return uint8 (B, C, H, W): images, grey or RGB, under their own parameters each."""
    inverse_B6, factor_B2, first_B1, half_BR = parameters_BK.split(
        [6, 2, 1, parameters_BK.shape[1] - 9], dim=1
    )
    with torch.autocast(image_BCHW.device.type, enabled=False):
        warped_BCHW = _warp(image_BCHW.float(), inverse_B6)
        changed_BCHW = _change_brightness_and_contrast(warped_BCHW, factor_B2, first_B1)
        return _blur(changed_BCHW, half_BR).to(torch.uint8)


def _warp(image_BCHW: Tensor, inverse_B6: Tensor) -> Tensor:
    """Return the images under the affine map, bilinear, black outside.

    Coordinates are not computed as a product of matrices, which a GPU may round to 10 bits (TF32).
    """
    height, width = image_BCHW.shape[2:]
    x_W = torch.arange(width, dtype=torch.float32, device=image_BCHW.device)
    y_H1 = torch.arange(height, dtype=torch.float32, device=image_BCHW.device)[:, None]
    xx, xy, x, yx, yy, y = inverse_B6[:, :, None, None].unbind(dim=1)
    across_BHW = xx * x_W + xy * y_H1 + x
    down_BHW = yx * x_W + yy * y_H1 + y
    grid_BHW2 = torch.stack(
        [(2 * across_BHW + 1) / width - 1, (2 * down_BHW + 1) / height - 1], dim=3
    )
    return F.grid_sample(image_BCHW, grid_BHW2, align_corners=False).round_()


def _change_brightness_and_contrast(
    image_BCHW: Tensor, factor_B2: Tensor, first_B1: Tensor
) -> Tensor:
    """Return the images with both changes in the order of each; rounded down, as albumentations'
    tables are.
    """
    brightness_B, contrast_B = factor_B2.unbind(dim=1)
    for is_brightness_B in (first_B1[:, 0] == 1, first_B1[:, 0] == 0):
        factor_B = torch.where(is_brightness_B, brightness_B, contrast_B)
        shift_B = torch.where(is_brightness_B, 0.0, _mean_luminance(image_BCHW) * (1 - factor_B))
        scaled_BCHW = image_BCHW * factor_B[:, None, None, None]
        image_BCHW = scaled_BCHW.add_(shift_B[:, None, None, None]).clamp_(0, 255).floor_()
    return image_BCHW


def _mean_luminance(image_BCHW: Tensor) -> Tensor:
    if image_BCHW.shape[1] == 1:
        return image_BCHW.mean(dim=(1, 2, 3))
    weight_C11 = image_BCHW.new_tensor(_LUMINANCE)[:, None, None]
    return (image_BCHW * weight_C11).sum(dim=1).round_().mean(dim=(1, 2))


def _blur(image_BCHW: Tensor, half_BR: Tensor) -> Tensor:
    """Return the images convolved along both sides with a kernel of their own, mirrored at the
    borders.
    """
    radius = half_BR.shape[1] - 1
    if not radius:
        return image_BCHW
    half_RB111 = half_BR.T[:, :, None, None, None]
    for dim, padding in ((3, (radius, radius, 0, 0)), (2, (0, 0, radius, radius))):
        size = image_BCHW.shape[dim]
        padded = F.pad(image_BCHW, padding, mode="reflect")
        image_BCHW = padded.narrow(dim, radius, size) * half_RB111[0]
        for offset in range(1, radius + 1):
            both_BCHW = padded.narrow(dim, radius - offset, size) + padded.narrow(
                dim, radius + offset, size
            )
            image_BCHW.addcmul_(both_BCHW, half_RB111[offset])
    return image_BCHW.round_()
