"""Noise fields, generated once per process and cropped at random for every image."""

import functools

import cv2
import numpy as np

from medvl.phantom.geometry import Canvas, Image

_SIDE = 1024


@functools.cache
def white_noise() -> Image:
    """Return white Gaussian noise with sigma 1, (1024, 1024); always the same."""
    return np.random.Generator(np.random.PCG64(20240)).standard_normal((_SIDE, _SIDE), dtype=np.float32)


@functools.cache
def fractal_noise(octaves: int = 4) -> Image:
    """Return fractal noise from 0 to 1, (1024, 1024), with features of 64 pixels and less; always the same."""
    rng = np.random.Generator(np.random.PCG64(octaves))
    total: Image = np.zeros((_SIDE, _SIDE), np.float32)
    for octave in range(octaves):
        cells = 16 << octave
        coarse = rng.standard_normal((cells, cells), dtype=np.float32)
        total += cv2.resize(coarse, (_SIDE, _SIDE), interpolation=cv2.INTER_CUBIC) / 1.6**octave
    total -= total.min()
    return total / total.max()


@functools.cache
def fractal_noise_uint8() -> Canvas:
    """Return fractal noise of five octaves, 0 to 255."""
    return (255 * fractal_noise(5)).astype(np.uint8)


def random_crop(field_HW: Image, shape_HW: tuple[int, int], rng: np.random.Generator, zoom: float = 1.0) -> Image:
    """Return a random crop (at most the whole field), resized to `shape_HW`; a pixel of it becomes `zoom` pixels."""
    height, width = (min(_SIDE, max(2, round(side / zoom))) for side in shape_HW)
    top, left = int(rng.random() * (_SIDE - height + 1)), int(rng.random() * (_SIDE - width + 1))
    crop = field_HW[top : top + height, left : left + width]
    return crop if crop.shape == shape_HW else cv2.resize(crop, shape_HW[::-1], interpolation=cv2.INTER_LINEAR)
