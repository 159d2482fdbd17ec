"""Noise fields that are made once a process and cut out for every image."""

import functools

import cv2
import numpy as np

from medvl.phantom.geometry import Canvas, Image

_SIDE = 1024


@functools.cache
def grain() -> Image:
    """White Gaussian noise, sigma 1, (1024, 1024); always the same."""
    return np.random.Generator(np.random.PCG64(20240)).standard_normal((_SIDE, _SIDE), dtype=np.float32)


@functools.cache
def clouds(octaves: int = 4) -> Image:
    """Fractal noise from 0 to 1, (1024, 1024), with features of 64 pixels and finer; always the same."""
    rng = np.random.Generator(np.random.PCG64(octaves))
    total: Image = np.zeros((_SIDE, _SIDE), np.float32)
    for octave in range(octaves):
        cells = 16 << octave
        coarse = rng.standard_normal((cells, cells), dtype=np.float32)
        total += cv2.resize(coarse, (_SIDE, _SIDE), interpolation=cv2.INTER_CUBIC) / 1.6**octave
    total -= total.min()
    return total / total.max()


@functools.cache
def mist() -> Canvas:
    """Clouds with one more octave, 0 to 255."""
    return (255 * clouds(5)).astype(np.uint8)


def cutout(field_HW: Image, shape_HW: tuple[int, int], rng: np.random.Generator, zoom: float = 1.0) -> Image:
    """A random piece of a field as an image of that shape; one pixel of the field becomes `zoom` pixels.

    A piece larger than the field is the whole field, enlarged.
    """
    height, width = (min(_SIDE, max(2, round(side / zoom))) for side in shape_HW)
    top, left = int(rng.random() * (_SIDE - height + 1)), int(rng.random() * (_SIDE - width + 1))
    piece = field_HW[top : top + height, left : left + width]
    return piece if piece.shape == shape_HW else cv2.resize(piece, shape_HW[::-1], interpolation=cv2.INTER_LINEAR)
