"""Images shared by two folders of shards, found by perceptual hash.

An image is hashed by the signs of its low frequencies (C. Zauner, Implementation and Benchmarking of Perceptual Image
Hash Functions, 2010), with 255 bits instead of the usual 64, which are too few to tell radiographs and slices apart.
The whole image and its largest bright region are hashed, because copies are often cropped of their margins and of the
writing in them.

Measured on 2,050 CT and MR slices, 1,562 chest radiographs and the 314 images of VQA-RAD, at a limit of `SAME` bits:
1,204 of 1,205 copies at half their size in JPEG of quality 50 are found, 97 percent of those with a gamma of 1.3, 81
percent of those with a black margin, and all 19 slices that are known to be in VQA-RAD, two of them cropped there. Of 7
million pairs of images of different cases, the matches were the same image on inspection. Neighbouring slices of one
scan sometimes match; they must not be in two splits either. A copy that is cropped within the body, written on, flipped
or rotated is usually missed.
"""

import dataclasses
import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import cv2
import numpy as np
from tqdm import tqdm

from medvl.data.shards.source import ShardSource
from medvl.errors import ImageError

SAME = 16
"""Maximum number of differing bits, of 255, for two images to count as the same."""

_SIDE, _FREQUENCIES = 64, 16
_REGION_SIDE, _DARK, _BRUSH = 256, 24, 5  # size for the search of the bright region; thinner strokes are writing
_BLOCK = 4096


def perceptual_hash(image_HW: np.ndarray) -> np.ndarray | None:
    """Return the hashes of a uint8 image and of its largest bright region, bool (2, 255); None if it is uniform.

    The image is averaged down to 64 x 64 pixels. A bit is set if one of the 16 x 16 lowest frequencies of its cosine
    transform (without the mean) is above their median. Size, aspect ratio, compression, brightness and contrast hardly
    change the hash.
    """
    whole, region = _signs(image_HW), _signs(_bright_region(image_HW))
    return None if whole is None or region is None else np.stack([whole, region])


@dataclasses.dataclass(frozen=True, slots=True)
class HashedImages:
    """Hashes of the images of a folder of shards."""

    keys: tuple[str, ...]
    bits_N2K: np.ndarray
    not_hashed: Counter[str]
    """Images without a hash, by reason: unreadable, or of one colour."""


@dataclasses.dataclass(frozen=True, slots=True)
class SharedImage:
    """Keys of two images that are the same."""

    key: str
    other: str
    distance: int
    """Number of differing bits, of 255, between the closer pair of hashes."""


def hash_images(source: ShardSource, *, progress: bool = False) -> HashedImages:
    """Hash every image of a folder on all cores. Raises ShardError when a shard is damaged."""
    keys, hashes, not_hashed = [], [], Counter[str]()
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:  # decoding, resizing and the transform release the GIL
        results = pool.map(lambda position: _hash_one(source, position), range(len(source)))
        for position, result in enumerate(tqdm(results, "hash", len(source), unit="img", disable=not progress)):
            if isinstance(result, str):
                not_hashed[result] += 1
            else:
                keys.append(source.key(position))
                hashes.append(result)
    bits_N2K = np.stack(hashes) if hashes else np.zeros((0, 2, _FREQUENCIES**2 - 1), bool)
    return HashedImages(tuple(keys), bits_N2K, not_hashed)


def shared_images(images: HashedImages, others: HashedImages, *, limit: int = SAME) -> list[SharedImage]:
    """Return all pairs whose hashes differ in at most `limit` bits, closest first."""
    pairs = [
        SharedImage(images.keys[row], others.keys[column], distance)
        for row, column, distance in _close_pairs(images.bits_N2K, others.bits_N2K, limit)
    ]
    return sorted(pairs, key=lambda pair: (pair.distance, pair.key, pair.other))


def _hash_one(source: ShardSource, position: int) -> np.ndarray | str:
    try:
        bits = perceptual_hash(source.pixels(position, color=False))
    except ImageError as error:
        return error.code
    return "of_one_colour" if bits is None else bits


def _signs(image_HW: np.ndarray) -> np.ndarray | None:
    small_HW = cv2.resize(image_HW, (_SIDE, _SIDE), interpolation=cv2.INTER_AREA).astype(np.float32)
    if np.ptp(small_HW) < 2:
        return None  # the signs would be rounding errors
    lowest = cv2.dct(small_HW)[:_FREQUENCIES, :_FREQUENCIES].ravel()[1:]
    return lowest > np.median(lowest)


def _bright_region(image_HW: np.ndarray) -> np.ndarray:
    """Return `image_HW` cropped to its largest connected region that is not nearly black."""
    scale = _REGION_SIDE / max(image_HW.shape)
    shape = [max(1, round(side * scale)) for side in image_HW.shape]
    small_HW = cv2.resize(image_HW, (shape[1], shape[0]), interpolation=cv2.INTER_AREA)
    bright_HW = (small_HW > _DARK).astype(np.uint8)
    thick_HW = cv2.morphologyEx(bright_HW, cv2.MORPH_OPEN, np.ones((_BRUSH, _BRUSH), np.uint8))
    count, _, boxes, _ = cv2.connectedComponentsWithStats(thick_HW)
    if count < 2:  # only the background
        return image_HW
    largest = 1 + int(boxes[1:, cv2.CC_STAT_AREA].argmax())
    x, y, width, height = boxes[largest, :4] / scale
    return image_HW[int(y) : int(np.ceil(y + height)), int(x) : int(np.ceil(x + width))]


def _close_pairs(bits_N2K: np.ndarray, other_M2K: np.ndarray, limit: int) -> Iterator[tuple[int, int, int]]:
    """Yield (n, m, distance) of close pairs; Hamming distances from products of sign matrices are exact and fast."""
    length = bits_N2K.shape[2]
    for start in range(0, len(bits_N2K), _BLOCK):
        signs_2NK = _as_signs(bits_N2K[start : start + _BLOCK])
        for other_start in range(0, len(other_M2K), _BLOCK):
            other_2KM = _as_signs(other_M2K[other_start : other_start + _BLOCK]).transpose(0, 2, 1)
            distance_NM = (length - (signs_2NK @ other_2KM).max(axis=0)) / 2
            for row, column in zip(*np.nonzero(distance_NM <= limit), strict=True):
                yield start + int(row), other_start + int(column), int(distance_NM[row, column])


def _as_signs(bits_N2K: np.ndarray) -> np.ndarray:
    """Return float32 (2, N, K) of 1 and -1."""
    return (2 * bits_N2K.astype(np.float32) - 1).transpose(1, 0, 2)
