"""Images that two folders of shards share, whatever their names: found by perceptual hash.

An image is hashed by the signs of its low frequencies (C. Zauner, Implementation and Benchmarking of Perceptual Image
Hash Functions, 2010), 255 bits of them instead of the usual 64: radiographs and slices are so alike that 64 bits mix
them up. It is hashed twice, whole and cut to its largest bright region, as copies are often cropped of their margins
and of what is written there.

Measured on 2,050 CT and MR slices, 1,562 chest radiographs and the 314 images of VQA-RAD: at `SAME` bits of 255,
1,204 of 1,205 copies at half their size in JPEG of quality 50 are found, 97 percent of those with a gamma of 1.3, 81
percent of those with a black margin around, and all 19 slices that are known to be in VQA-RAD, two of them cropped
there. Of 7 million pairs of images of different cases, those that it takes for the same are the same by eye.
Neighbouring slices of one scan are, now and then: they must not be on both sides of a split either. A copy that is
cropped within the body, written on, flipped or rotated is mostly not found.
"""

import dataclasses
import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import cv2
import numpy as np
from tqdm import tqdm

from medvl.data.shards.format import ShardSource
from medvl.errors import ImageError

SAME = 16
"""Images whose hashes differ in at most this many of 255 bits are the same."""

_SIDE, _FREQUENCIES = 64, 16
_LOOK, _DARK, _BRUSH = 256, 24, 5  # the bright region is looked for at that many pixels; thinner strokes are writing
_BLOCK = 4096


def perceptual_hash(image_HW: np.ndarray) -> np.ndarray | None:
    """bool (2, 255): of the whole uint8 image and of its largest bright region; None where there is nothing in it.

    The image is averaged down to 64 x 64 pixels; a bit says whether one of the 16 x 16 lowest frequencies of its cosine
    transform (without the mean) lies above their median. So size, aspect ratio, compression, brightness and contrast
    hardly change it.
    """
    whole, region = _signs(image_HW), _signs(_bright_region(image_HW))
    return None if whole is None or region is None else np.stack([whole, region])


@dataclasses.dataclass(frozen=True, slots=True)
class HashedImages:
    """The hashes of a folder of shards."""

    keys: tuple[str, ...]
    bits_N2K: np.ndarray
    left_out: Counter[str]
    """Images without a hash, by reason: they cannot be read, or are of one colour."""


@dataclasses.dataclass(frozen=True, slots=True)
class SharedImage:
    """A pair of images that are the same."""

    key: str
    other: str
    distance: int
    """Bits of 255 that differ, of the nearer pair of hashes."""


def hash_images(source: ShardSource, *, progress: bool = False) -> HashedImages:
    """Hash every image of a folder, on all cores. Raises ShardError when a shard is damaged."""
    keys, hashes, left_out = [], [], Counter[str]()
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:  # decoding, resizing and the transform release the lock
        results = pool.map(lambda position: _hash_one(source, position), range(len(source)))
        for position, found in enumerate(tqdm(results, "hash", len(source), unit="img", disable=not progress)):
            if isinstance(found, str):
                left_out[found] += 1
            else:
                keys.append(source.key(position))
                hashes.append(found)
    bits_N2K = np.stack(hashes) if hashes else np.zeros((0, 2, _FREQUENCIES**2 - 1), bool)
    return HashedImages(tuple(keys), bits_N2K, left_out)


def shared_images(images: HashedImages, others: HashedImages, *, limit: int = SAME) -> list[SharedImage]:
    """Every pair of an image and another that differ in at most `limit` bits, the nearest first."""
    pairs = [
        SharedImage(images.keys[row], others.keys[column], distance)
        for row, column, distance in _near(images.bits_N2K, others.bits_N2K, limit)
    ]
    return sorted(pairs, key=lambda pair: (pair.distance, pair.key, pair.other))


def _hash_one(source: ShardSource, position: int) -> np.ndarray | str:
    try:
        bits = perceptual_hash(source.pixels(position))
    except ImageError as error:
        return error.code
    return "of_one_colour" if bits is None else bits


def _signs(image_HW: np.ndarray) -> np.ndarray | None:
    small_HW = cv2.resize(image_HW, (_SIDE, _SIDE), interpolation=cv2.INTER_AREA).astype(np.float32)
    if np.ptp(small_HW) < 2:
        return None  # all signs would be those of rounding errors
    lowest = cv2.dct(small_HW)[:_FREQUENCIES, :_FREQUENCIES].ravel()[1:]
    return lowest > np.median(lowest)


def _bright_region(image_HW: np.ndarray) -> np.ndarray:
    """`image_HW` cut to the rectangle around its largest connected region that is not nearly black."""
    scale = _LOOK / max(image_HW.shape)
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


def _near(bits_N2K: np.ndarray, other_M2K: np.ndarray, limit: int) -> Iterator[tuple[int, int, int]]:
    """(n, m, distance) of near pairs; the Hamming distances come from a product of sign matrices: exact, and fast."""
    length = bits_N2K.shape[2]
    for start in range(0, len(bits_N2K), _BLOCK):
        signs_2NK = _as_signs(bits_N2K[start : start + _BLOCK])
        for other_start in range(0, len(other_M2K), _BLOCK):
            other_2KM = _as_signs(other_M2K[other_start : other_start + _BLOCK]).transpose(0, 2, 1)
            distance_NM = (length - (signs_2NK @ other_2KM).max(axis=0)) / 2
            for row, column in zip(*np.nonzero(distance_NM <= limit), strict=True):
                yield start + int(row), other_start + int(column), int(distance_NM[row, column])


def _as_signs(bits_N2K: np.ndarray) -> np.ndarray:
    """float32 (2, N, K) of 1 and -1."""
    return (2 * bits_N2K.astype(np.float32) - 1).transpose(1, 0, 2)
