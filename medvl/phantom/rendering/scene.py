"""Layers of one projection and their sum.

An X-ray image integrates along each ray, so a scene is a sum of layers: soft tissue, solid
structures (organs, bones, metal) and fine structure inside the lungs, minus the air of the lungs,
which opacities reduce. The unit is optical depth, about 1 for the chest wall. Layers without sharp
edges are coarse (see `geometry.Surface.coarse`) and enlarged once.
"""

import functools
from collections.abc import Sequence

import cv2
import numpy as np
import simplejpeg
from numpy.typing import NDArray

from medvl.phantom.geometry import Camera, Canvas, Image, Points, Surface
from medvl.phantom.population.world import Exposure, Marker

# Noise fields, generated once per process and cropped at random for every image.

_SIDE = 1024


@functools.cache
def white_noise() -> Image:
    """Return white Gaussian noise with sigma 1, (1024, 1024); always the same."""
    return np.random.Generator(np.random.PCG64(20240)).standard_normal(
        (_SIDE, _SIDE), dtype=np.float32
    )


@functools.cache
def fractal_noise(octaves: int = 4) -> Image:
    """Return fractal noise from 0 to 1, (1024, 1024), with features of 64 pixels and less;
    always the same.
    """
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


def random_crop(
    field_HW: Image, shape_HW: tuple[int, int], rng: np.random.Generator, zoom: float = 1.0
) -> Image:
    """Return a random crop (at most the whole field), resized to `shape_HW`; a pixel of it
    becomes `zoom` pixels.
    """
    height, width = (min(_SIDE, max(2, round(side / zoom))) for side in shape_HW)
    top = int(rng.random() * (_SIDE - height + 1))
    left = int(rng.random() * (_SIDE - width + 1))
    crop = field_HW[top : top + height, left : left + width]
    return (
        crop
        if crop.shape == shape_HW
        else cv2.resize(crop, shape_HW[::-1], interpolation=cv2.INTER_LINEAR)
    )


_SOLID = 0.80
_BRONCHI = 0.12
"""Optical depth of these canvases at 255."""
_DETAIL = 0.55
"""Share of the air that fine structure at 255 replaces."""


class Scene:
    """Layers of a chest, to be summed with `depth`."""

    def __init__(self, surface: Surface, lungs: Sequence[Points]) -> None:
        self.surface = surface
        self.coarse = surface.coarse
        self.lung: Canvas = surface.fill(lungs)
        """Visibility of the lungs, 0 to 255."""
        self.air: Image = 0.50 + 0.17 * self.coarse.soft(lungs, 1.3)
        """Reduction of optical depth by aerated lungs, on the coarse surface; opacities scale it
        down.
        """
        self.soft: Image = np.zeros(self.coarse.shape_HW, np.float32)
        self.solid = surface.blank()
        self.detail = surface.blank()
        """Vessels and other fine structure, visible only inside the lungs."""
        self.bronchi: Canvas | None = None
        self.blurred_vessels = 0.0
        """Blur of the vessels by oedema and motion, 0 to 1."""

    def add(self, canvas: Canvas, depth: float) -> None:
        """Add a solid structure; `depth` is the optical depth of the canvas at 255."""
        cv2.addWeighted(self.solid, 1.0, canvas, depth / _SOLID, 0.0, dst=self.solid)

    def add_inside_lung(self, canvas: Canvas, depth: float) -> None:
        """Add a solid structure inside the lungs."""
        self.add(cv2.multiply(canvas, self.lung, scale=1 / 255), depth)

    def reduce_lung(self, organs: Canvas, share: float) -> None:
        """Reduce the lung by up to `share` behind organs, in proportion to their thickness."""
        cv2.subtract(self.lung, cv2.convertScaleAbs(organs, alpha=share), dst=self.lung)

    def add_opacity(
        self, outlines: Sequence[Points], strength: float, blur: float, mottle: float, seed: int
    ) -> None:
        """Reduce the air inside the outlines by the share `strength`.

        `blur` is the softness of the edges in centimetres, `mottle` the unevenness from 0 (uniform)
        to 1 (with holes).
        """
        opacity_HW = self.coarse.soft(outlines, blur)
        if mottle:
            rng = np.random.Generator(np.random.PCG64(seed))
            zoom = self.coarse.pixels_per_cm / 22  # features of a few centimetres
            opacity_HW *= 1 + mottle * (
                2.4 * random_crop(fractal_noise(), self.coarse.shape_HW, rng, zoom) - 1.3
            )
        self.air *= 1 - strength * np.clip(opacity_HW, 0, 1)

    def clear_detail(self, outlines: Sequence[Points]) -> None:
        """Remove fine structure inside the outlines, as free gas has no vessels."""
        self.surface.fill(outlines, 0, self.detail)

    def add_fluid(self, outlines: Sequence[Points], share: float = 1.0) -> None:
        """Replace a share of the lung by fluid inside the outlines, with a sharp edge."""
        fluid = self.surface.fill(outlines, round(255 * share))
        self.add_inside_lung(fluid, 0.15)
        cv2.multiply(self.lung, cv2.bitwise_not(fluid), dst=self.lung, scale=1 / 255)

    def bronchogram(
        self, outlines: Sequence[Points], branches: Sequence[Points], width: float
    ) -> None:
        """Draw air-filled bronchi (arrays KN2) inside the outlines."""
        tree = self.surface.blank()
        for lines_KN2 in branches:
            self.surface.stroke(lines_KN2, width, canvas=tree)
        cv2.bitwise_and(tree, self.surface.fill(outlines), dst=tree)
        self.bronchi = tree if self.bronchi is None else cv2.max(self.bronchi, tree)

    def depth(self, rng: np.random.Generator) -> Image:
        """Return the total optical depth (H, W), not negative; `rng` selects the lung texture."""
        surface = self.surface
        total = surface.enlarge(self.soft)
        inside = surface.enlarge(self.air)
        detail = self.detail
        if self.blurred_vessels > 0.2:
            detail = surface.blur(detail, 0.22 * self.blurred_vessels)
        texture = random_crop(
            fractal_noise_uint8(), surface.shape_HW, rng, surface.pixels_per_cm / 26
        )
        fine = cv2.addWeighted(detail, 1.0, texture, 0.5, 0.0)
        fine = cv2.addWeighted(fine, _DETAIL / 255, total, 0.0, -1.12, dtype=cv2.CV_32F)
        cv2.multiply(inside, fine, dst=inside)  # opacities hide vessels
        cv2.multiply(inside, self.lung, dst=inside, scale=1 / 255, dtype=cv2.CV_32F)
        cv2.add(total, inside, dst=total)
        cv2.addWeighted(self.solid, _SOLID / 255, total, 1.0, 0.0, dst=total, dtype=cv2.CV_32F)
        if self.bronchi is not None:
            cv2.addWeighted(
                self.bronchi, -_BRONCHI / 255, total, 1.0, 0.0, dst=total, dtype=cv2.CV_32F
            )
        # blur of the detector and of motion
        surface.blur(total, max(0.045, 0.6 / surface.pixels_per_cm), total)
        return np.maximum(total, 0.0, out=total)


# Conversion of optical depth to an image: exposure, noise, collimation, markers.

WHITE = 4095
"""The brightest value of a 12-bit image."""


def develop(
    depth_HW: Image, exposure: Exposure, surface: Surface, rng: np.random.Generator
) -> Image:
    """Convert optical depth to brightness from 0 to 1, dense tissue bright; modifies `depth_HW`
    in place.
    """
    if exposure.equalize:
        small = cv2.resize(depth_HW, surface.coarse.shape_HW[::-1])
        slow = surface.enlarge(surface.coarse.blur(small, 3.5))
        cv2.addWeighted(depth_HW, 1.0, slow, -0.5 * exposure.equalize, 0.0, dst=depth_HW)
        np.maximum(depth_HW, 0.0, out=depth_HW)
    shade = cv2.exp(np.multiply(depth_HW, -exposure.penetration, out=depth_HW), dst=depth_HW)
    bright = np.subtract(1.0, shade, out=shade)
    curve = cv2.addWeighted(bright, exposure.contrast, bright, 0.0, 1.0 - exposure.contrast)
    cv2.multiply(bright, curve, dst=bright)
    noise = random_crop(white_noise(), bright.shape[:2], rng)
    cv2.addWeighted(noise, exposure.noise, noise, 0.0, 1.0, dst=curve)
    cv2.multiply(bright, curve, dst=bright, scale=1.0 - exposure.black)
    return np.add(bright, exposure.black, out=bright)


def collimate(image_HW: Image, exposure: Exposure) -> None:
    """Set the collimated borders to 0 in place."""
    height, width = image_HW.shape
    top, right, bottom, left = exposure.collimation
    image_HW[: round(top * height)] = 0
    image_HW[height - round(bottom * height) :] = 0
    image_HW[:, : round(left * width)] = 0
    image_HW[:, width - round(right * width) :] = 0


def draw_markers(image_HW: Image, markers: tuple[Marker, ...], camera: Camera) -> None:
    """Draw the lead letters in place."""
    height, width = image_HW.shape
    pixels_per_cm = min(height, width) / camera.field
    for marker in markers:
        canvas = np.zeros(image_HW.shape, np.uint8)
        scale = marker.height * pixels_per_cm / 22  # cv2's letters are 22 pixels high at scale 1
        weight = max(1, round(0.16 * marker.height * pixels_per_cm))
        origin = (round(marker.x * width), round(marker.y * height))
        cv2.putText(
            canvas, marker.text, origin, cv2.FONT_HERSHEY_SIMPLEX, scale, 250, weight, cv2.LINE_AA
        )
        cv2.max(image_HW, canvas.astype(np.float32) / 255, dst=image_HW)


# Encoding of 12-bit images as 8-bit files.


def encode_jpeg(image_HW: NDArray[np.uint16]) -> bytes:
    """Return a 12-bit image as an 8-bit grey JPEG of quality 95."""
    grey_HW1 = np.ascontiguousarray((image_HW >> 4).astype(np.uint8)[..., None])
    return simplejpeg.encode_jpeg(grey_HW1, quality=95, colorspace="GRAY")


def encode_png(image_HW: NDArray[np.uint16]) -> bytes:
    """Return a 12-bit image as an 8-bit grey PNG."""
    return cv2.imencode(".png", (image_HW >> 4).astype(np.uint8))[1].tobytes()


def encode_deep_png(image_HW: NDArray[np.uint16]) -> bytes:
    """Return a 12-bit image as a grey PNG of 16 bits with the same values."""
    return cv2.imencode(".png", image_HW)[1].tobytes()
