"""Operations of `ConVIRTAugmentation`: on the CPU, with the parameters that albumentations draws,
and on the device of the training step, for `ConVIRTAugmentation(on_device=True)`.

    # in a loader's worker, from the sample's generator
    parameters_K = draw_parameters(affine, color, blur, image_HWC.shape, radius)
    # all images of a batch at once, on their device
    batch = augment_batch(batch)

Those on the CPU give the pixels of albumentations' operation bit for bit, without its checks and
copies, which take a fifth of the time of the augmentation.

For the device, workers crop and resize an image, flip it, and draw the parameters of the other
operations, the same as without this option. The device applies them: affine map, brightness and
contrast, Gaussian blur. With `decode="device"` it also decodes the files, crops, resizes and flips,
as the workers drew. It computes in float32 and rounds after each operation as the operations on the
CPU do, so that a few pixels differ, by one grey level (OpenCV 5).

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
from PIL import Image
from torch import Tensor

from medvl.data.images.codecs import JpegImage
from medvl.errors import ImageError
from medvl.schema import Batch, EncodedImages

if TYPE_CHECKING:
    from medvl.data.transforms.image import Transformed


_IDENTITY_33 = np.eye(3)
_TOLERANCE_33 = 1e-8 + 1e-5 * _IDENTITY_33
"""As in `np.allclose`, by which albumentations leaves an image as it is."""


Decode = Literal["full", "reduced", "device"]
"""Decoding of JPEG images before a random crop. full: every pixel; reduced: a half, a quarter or an
eighth of both sides where the crop still has the pixels of the output. The draws are the same, and
the edges of the crop are moved to whole pixels of the reduced image. device: every pixel, on the
device of the training step, which also crops and resizes: nvJPEG on a GPU. Other formats, and JPEG
files that nvJPEG may not read, are decoded in full by the workers.
"""


# Resizing of uint8 images, (H, W) or (H, W, C).

Kernel = Literal["area", "bicubic", "bilinear", "bicubic_antialias", "bilinear_antialias"]
"""Kernel of a resize. area: averages over areas along sides that shrink, bilinear along those that
grow; bicubic and bilinear: 4 x 4 or 2 x 2 pixels however much an image shrinks, as in torch's
`interpolate` and in OpenCV; with antialias: kernels as wide as the pixels they replace, as in
Pillow, torchvision and Hugging Face's processors.
"""
_PLAIN = {"bicubic": cv2.INTER_CUBIC, "bilinear": cv2.INTER_LINEAR}
_ANTIALIASED = {
    "bicubic_antialias": Image.Resampling.BICUBIC,
    "bilinear_antialias": Image.Resampling.BILINEAR,
}


def resize(image: np.ndarray, height: int, width: int, kernel: Kernel = "area") -> np.ndarray:
    """Return the image with these sides, by this kernel."""
    if kernel in _PLAIN:
        return cv2.resize(image, (width, height), interpolation=_PLAIN[kernel])
    if kernel in _ANTIALIASED:
        flat = image[:, :, 0] if image.ndim == 3 and image.shape[2] == 1 else image
        return np.asarray(Image.fromarray(flat).resize((width, height), _ANTIALIASED[kernel]))
    return _resize_by_area(image, height, width)


def _resize_by_area(image: np.ndarray, height: int, width: int) -> np.ndarray:
    smaller = min(height, image.shape[0]), min(width, image.shape[1])
    if smaller not in (
        image.shape[:2],
        (height, width),
    ):  # OpenCV averages areas only where neither side grows
        image = cv2.resize(image, smaller[::-1], interpolation=cv2.INTER_AREA)
    shrinks = height * width < image.shape[0] * image.shape[1]
    return cv2.resize(
        image, (width, height), interpolation=cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR
    )


def to_square(image: np.ndarray, least: int = 0) -> np.ndarray:
    """Return the image in the middle of a black square as large as its longer side, and at least
    `least` pixels.
    """
    height, width = image.shape[:2]
    side = max(height, width, least)
    down = side - height
    across = side - width
    sides = down // 2, down - down // 2, across // 2, across - across // 2
    return cv2.copyMakeBorder(image, *sides, cv2.BORDER_CONSTANT, value=(0, 0, 0))


def with_channels(image: np.ndarray) -> np.ndarray:
    """Return the image as (H, W, C)."""
    return image[:, :, None] if image.ndim == 2 else image


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


class EncodedCrop(NamedTuple):
    """A part of a JPEG file, mirrored or not, that the device decodes."""

    data: bytes
    crop: Crop
    is_mirrored: bool


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


def leave_to_device(
    image: np.ndarray | JpegImage, crop: Crop, *, mirror: bool
) -> tuple[np.ndarray | JpegImage, EncodedCrop | None]:
    """Return the image, and the part of its file that the device decodes; None, with a JPEG decoded
    in full, where the device does not decode it.

    Raises ImageError where a JPEG that is decoded here is damaged.
    """
    if not isinstance(image, JpegImage):
        return image, None
    if image.suits_device():
        return image, EncodedCrop(image.data, crop, mirror)
    return image.decode(), None


def warp(image: np.ndarray, parameters: dict[str, Any]) -> np.ndarray:
    """Return the image under the map of albumentations' Affine, black beyond the image."""
    matrix_33 = parameters["matrix"]
    if (np.abs(matrix_33 - _IDENTITY_33) <= _TOLERANCE_33).all():
        return image
    return cv2.warpAffine(image, matrix_33[:2], image.shape[1::-1], flags=cv2.INTER_LINEAR)


IMAGES = ("image_BCHW", "second_image_BCHW", "prior_BCHW")
"""Images of a batch, in the order of its parameters; those of `other_views_BVCHW` follow."""

_VALUES_AT_ONCE = 1 << 26
"""Pixels in float32 that are cropped at once on the device: 256 MiB."""

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


def encoded_views(
    first: "Transformed", *others: "Transformed | None"
) -> tuple[EncodedCrop | None, ...]:
    """Return the parts of files that the device decodes, in the order of `stack_views`; empty where
    it decodes none.
    """
    encoded = tuple(None if image is None else image.encoded for image in (first, *others))
    return encoded if any(encoded) else ()


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


def join_files(
    samples: Sequence[tuple[str, Sequence[EncodedCrop | None]]],
) -> EncodedImages | None:
    """Return the files of a batch for the device, from the keys of its samples and their images;
    None where it decodes none.

    Images of one file, such as second views, share it.
    """
    files: dict[int, tuple[int, bytes, str]] = {}  # by identity
    parts: list[tuple[int, ...]] = []
    for row, (key, images) in enumerate(samples):
        for number, image in enumerate(images):
            if image is not None:
                file, _, _ = files.setdefault(id(image.data), (len(files), image.data, key))
                parts.append((file, row, number, *image.crop, image.is_mirrored))
    if not parts:
        return None
    data = [data for _, data, _ in files.values()]
    return EncodedImages(
        torch.frombuffer(bytearray().join(data), dtype=torch.uint8),
        torch.tensor([len(each) for each in data]).cumsum(0),
        [key for _, _, key in files.values()],
        torch.tensor(parts),
    )


def augment_batch(batch: Batch) -> Batch:
    """Return the batch with its images decoded, where that is left to the device, and augmented, on
    their device; a batch that is augmented already is returned as is.

    The training step of `medvl.train` calls this. In a loop of your own, call it after
    `Batch.to(device)`.

    Raises ImageError, with the key of the sample, for a file that the device cannot decode.
    """
    if batch.encoded is not None:
        batch = _decoded(batch, batch.encoded)
    if batch.augmentation_BVK is None:
        return batch
    augmented: dict[str, Any] = {"augmentation_BVK": None}
    parameters_BVK = batch.augmentation_BVK
    for number, name in enumerate(IMAGES):
        image_BCHW = getattr(batch, name)
        if image_BCHW is not None:
            augmented[name] = augment_images(image_BCHW, parameters_BVK[:, number])
    others_BVCHW = batch.other_views_BVCHW
    if others_BVCHW is not None:
        of_others_NK = parameters_BVK[:, len(IMAGES) :].flatten(0, 1)
        others_NCHW = augment_images(others_BVCHW.flatten(0, 1), of_others_NK)
        augmented["other_views_BVCHW"] = others_NCHW.unflatten(0, others_BVCHW.shape[:2])
    return dataclasses.replace(batch, **augmented)


def _decoded(batch: Batch, encoded: EncodedImages) -> Batch:
    """Return the batch with the images that the device decodes."""
    device = batch.image_BCHW.device
    channels, size = batch.image_BCHW.shape[1:3]
    decoded = _decode_files(encoded, channels == 3, device)
    parts_KQ8 = encoded.part_Q8.split(_parts_at_once(decoded, encoded.part_Q8))
    square_QCHW = torch.cat([crop_files(decoded, each_Q8, size) for each_Q8 in parts_KQ8])
    row_Q, number_Q = encoded.part_Q8[:, 1:3].unbind(dim=1)
    changed: dict[str, Any] = {"encoded": None}
    for number in number_Q.unique().tolist():
        of_number_R = (number_Q == number).nonzero()[:, 0]
        squares_RCHW = square_QCHW[of_number_R.to(device)]
        rows_R = row_Q[of_number_R].to(device)
        if number < len(IMAGES):
            image_BCHW = getattr(batch, IMAGES[number])
            changed[IMAGES[number]] = image_BCHW.index_copy(0, rows_R, squares_RCHW)
        else:
            view_R = torch.full_like(rows_R, number - len(IMAGES))
            others_BVCHW = changed.get("other_views_BVCHW", batch.other_views_BVCHW)
            assert others_BVCHW is not None, "images of a sample are numbered as in the batch"
            changed["other_views_BVCHW"] = others_BVCHW.index_put((rows_R, view_R), squares_RCHW)
    return dataclasses.replace(batch, **changed)


def _decode_files(encoded: EncodedImages, color: bool, device: torch.device) -> list[Tensor]:
    """Return uint8 (C, H, W) of each file on the device. Raises ImageError as `augment_batch`."""
    files = encoded.file_N.tensor_split(encoded.end_M[:-1])
    decode = _decode_on_gpu if device.type == "cuda" else _decode_on_host
    try:
        return decode(files, color, device)
    except (RuntimeError, ImageError):
        for file, key in zip(files, encoded.keys, strict=True):
            try:
                decode([file], color, device)
            except (RuntimeError, ImageError) as error:
                reason = f"sample {key} cannot be decoded on {device}: {str(error).splitlines()[0]}"
                fix = "run `medvl verify` to list damaged files, or set image.decode to 'reduced'"
                raise ImageError(f"{reason}; {fix}", "malformed") from error
        raise


def _decode_on_gpu(files: Sequence[Tensor], color: bool, device: torch.device) -> list[Tensor]:
    from torchvision.io import ImageReadMode, decode_jpeg  # a CPU build of torch has none

    mode = ImageReadMode.RGB if color else ImageReadMode.GRAY
    decoded: list[Tensor] = decode_jpeg(list(files), mode=mode, device=device)
    return decoded


def _decode_on_host(files: Sequence[Tensor], color: bool, device: torch.device) -> list[Tensor]:
    images = [JpegImage(file_N.numpy().tobytes(), color=color).decode() for file_N in files]
    return [
        torch.from_numpy(image.transpose(2, 0, 1) if color else image[None]) for image in images
    ]


def _parts_at_once(decoded: Sequence[Tensor], part_Q8: Tensor) -> int:
    """Return the number of parts to crop at once, which bounds the memory for large images."""
    channels, height, width = (
        max(sides) for sides in zip(*(x.shape for x in decoded), strict=True)
    )
    return min(len(part_Q8), max(1, _VALUES_AT_ONCE // (channels * height * width)))


@torch.no_grad()
def crop_files(decoded: Sequence[Tensor], part_Q8: Tensor, size: int) -> Tensor:
    """Return uint8 (Q, C, size, size): parts (`EncodedImages.part_Q8`) of images (C, H, W), resized
    as by `crop_and_resize` by two products of matrices, and mirrored; black beyond the image.
    """
    images = [decoded[file] for file in part_Q8[:, 0].tolist()]
    height, width = (max(image.shape[dim] for image in images) for dim in (1, 2))
    device = images[0].device
    image_QCHW = torch.zeros(len(images), images[0].shape[0], height, width, device=device)
    for row, image in enumerate(images):  # of unequal sizes
        image_QCHW[row, :, : image.shape[1], : image.shape[2]] = image
    left_Q, top_Q, right_Q, bottom_Q, mirrored_Q = part_Q8[:, 3:].to(device).unbind(dim=1)
    with torch.autocast(device.type, enabled=False):
        sides_2Q = torch.stack([bottom_Q - top_Q, right_Q - left_Q])
        down_QSH = _resizing(top_Q, bottom_Q, torch.zeros_like(mirrored_Q), sides_2Q, height, size)
        across_QSW = _resizing(left_Q, right_Q, mirrored_Q, sides_2Q, width, size)
        square_QCSS = down_QSH[:, None] @ image_QCHW @ across_QSW[:, None].mT
    return square_QCSS.add_(0.5).clamp_(0, 255).to(torch.uint8)  # rounds a half up, as OpenCV here


def _resizing(
    start_Q: Tensor, end_Q: Tensor, mirrored_Q: Tensor, sides_2Q: Tensor, pixels: int, size: int
) -> Tensor:
    """Return float32 (Q, size, pixels): the shares of an image's pixels in those of its resized
    part, from `start_Q` to `end_Q` along this side.

    As OpenCV resizes: means of areas where no side grows; else between the nearest two pixels,
    where one side shrinks by the share of the output's pixel that lies in each.
    """
    pixel_W = torch.arange(pixels, device=start_Q.device)
    output_S = torch.arange(size, device=start_Q.device)
    is_mirrored_Q1 = mirrored_Q[:, None] == 1
    along_Q1W = torch.where(  # place of each pixel in the part
        is_mirrored_Q1, end_Q[:, None] - 1 - pixel_W, pixel_W - start_Q[:, None]
    )[:, None].float()
    length_Q1 = (end_Q - start_Q)[:, None].double()
    # In this order and precision, as OpenCV rounds them; `size / length_Q1` is a product in torch.
    growth_Q1 = torch.full_like(length_Q1, size) / length_Q1
    scale_Q1 = 1 / growth_Q1

    border_QS1 = (output_S * scale_Q1)[:, :, None].float()
    scale_Q11 = scale_Q1[:, :, None].float()
    overlap_QSW = torch.minimum(along_Q1W + 1, border_QS1 + scale_Q11) - torch.maximum(
        along_Q1W, border_QS1
    )

    first_QS = (output_S * scale_Q1).floor()
    share_QS = ((output_S + 1) - (first_QS + 1) * growth_Q1).float()
    shrinks_Q1 = (sides_2Q.amax(dim=0) > size)[:, None]
    place_QS = torch.where(
        shrinks_Q1,
        first_QS + torch.where(share_QS > 0, share_QS.frac(), 0.0),
        (output_S + 0.5) * scale_Q1 - 0.5,
    )
    place_QS1 = torch.minimum(place_QS.clamp_min(0.0), length_Q1 - 1)[:, :, None].float()
    nearest_QSW = 1 - (along_Q1W - place_QS1).abs()

    is_area_Q11 = (sides_2Q.amin(dim=0) >= size)[:, None, None]
    return torch.where(is_area_Q11, overlap_QSW / scale_Q11, nearest_QSW).clamp_min_(0.0)


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
