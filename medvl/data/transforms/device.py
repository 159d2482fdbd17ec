"""Augmentation on the device of the training step: what `ConVIRTAugmentation(on_device=True)`
leaves to it.

    # in a loader's worker, from the sample's generator
    parameters_K = draw_parameters(affine, color, blur, image_HWC.shape, radius)
    # all images of a batch at once, on their device
    batch = augment_batch(batch)

Workers crop and resize an image, flip it, and draw the parameters of the other operations, the same
as without this option. The device applies them: affine map, brightness and contrast, Gaussian blur.
It computes in float32 and rounds after each operation as the operations on the CPU do, so that a
few pixels differ, by one grey level (OpenCV 5).

The K parameters of an image: the affine map from its pixels to those before it, six numbers by
rows; the factors of brightness and contrast; 1 where brightness is changed first, else 0; and half
a Gaussian kernel, R weights from its centre. V are the images of a sample (`IMAGES`).
"""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from medvl.data.transforms.operations import draw
from medvl.schema import Batch

if TYPE_CHECKING:
    from medvl.data.transforms.image import Transformed

IMAGES = ("image_BCHW", "second_image_BCHW", "prior_BCHW", "other_view_BCHW")
"""Images of a batch, in the order of its parameters."""

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
    """Return the parameters (V, K) of a sample's images in the order of `IMAGES`; None where the
    worker augmented them.

    Missing images are black placeholders, which no operation changes; they get the parameters of
    the first one.
    """
    parameters = [(image or first).deferred_K for image in (first, *others)]
    present = [each for each in parameters if each is not None]
    return np.stack(present) if present else None


def stack_samples(parameters: Sequence[np.ndarray | None]) -> Tensor | None:
    """Return (B, V, K) from those of the samples; None where the workers augmented all images."""
    present = [each for each in parameters if each is not None]
    return torch.from_numpy(np.stack(present)) if present else None


def augment_batch(batch: Batch) -> Batch:
    """Return the batch with its images augmented, on their device; a batch that is augmented
    already is returned as is.

    The training step of `medvl.train` calls this. In a loop of your own, call it after
    `Batch.to(device)`.
    """
    if batch.augmentation_BVK is None:
        return batch
    augmented: dict[str, Any] = {"augmentation_BVK": None}
    for name, parameters_BK in zip(IMAGES, batch.augmentation_BVK.unbind(dim=1), strict=True):
        image_BCHW = getattr(batch, name)
        if image_BCHW is not None:
            augmented[name] = augment_images(image_BCHW, parameters_BK)
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
