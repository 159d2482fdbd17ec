"""Curves in patient centimetres, the camera that projects them, and the surface they are drawn on.

Frontal coordinates: x grows towards the patient's left (the right of the image), y grows downwards,
and the origin is
the carina. Lateral coordinates: x grows from the sternum to the spine, y as before. N is the number
of points, K of curves; the last axis of 2 is (x, y).
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import cv2
import numpy as np
from numpy.typing import ArrayLike, NDArray

Points = NDArray[np.float64]
Image = NDArray[Any]
"""float32 (H, W); the annotations of cv2 do not distinguish dtypes."""
Canvas = NDArray[Any]
"""uint8 (H, W)."""

_FRACTION_BITS = 5  # fractional bits of cv2's fixed-point coordinates
COARSE_PIXELS_PER_CM = 3.2
"""Resolution of soft structures, which are enlarged; their edges are wider than half a
centimetre.
"""


@functools.cache
def _catmull_rom(samples: int) -> Points:
    """Return the weights (samples, 4) of four neighbouring control points along the middle one
    of their three spans.
    """
    t = np.arange(samples)[:, None] / samples
    columns = (-t + 2 * t**2 - t**3, 2 - 5 * t**2 + 3 * t**3, t + 4 * t**2 - 3 * t**3, t**3 - t**2)
    return np.concatenate(columns, axis=1) / 2


def spline(control_KN2: ArrayLike, *, closed: bool = False, samples: int = 8) -> Points:
    """Return the uniform Catmull-Rom spline through control points (..., N, 2), with `samples`
    points per span.

    An open curve starts at the first control point and ends at the last one.
    """
    control = np.asarray(control_KN2, dtype=np.float64)
    if closed:
        padded = np.concatenate([control[..., -1:, :], control, control[..., :2, :]], axis=-2)
    else:
        first = 2 * control[..., :1, :] - control[..., 1:2, :]
        last = 2 * control[..., -1:, :] - control[..., -2:-1, :]
        padded = np.concatenate([first, control, last], axis=-2)
    spans = padded.shape[-2] - 3
    windows = np.stack([padded[..., i : i + spans, :] for i in range(4)], axis=-2)
    curve = (_catmull_rom(samples) @ windows).reshape(*control.shape[:-2], spans * samples, 2)
    return curve if closed else np.concatenate([curve, control[..., -1:, :]], axis=-2)


@functools.cache
def circle(points: int) -> Points:
    """Return the unit circle (points, 2), clockwise in the image; cached, so do not modify it."""
    angle = np.arange(points) * (2 * np.pi / points)
    return np.stack([np.cos(angle), np.sin(angle)], axis=1)


def ellipse(
    center: tuple[float, float], radii: tuple[float, float], degrees: float = 0.0, points: int = 24
) -> Points:
    """Return the outline (points, 2) of an ellipse rotated by `degrees` clockwise in the image."""
    cosine = math.cos(math.radians(degrees))
    sine = math.sin(math.radians(degrees))
    axes = np.array([[radii[0] * cosine, radii[0] * sine], [-radii[1] * sine, radii[1] * cosine]])
    return circle(points) @ axes + center


def ribbon(lines: Points, width: float | Points) -> Points:
    """Return the outlines (..., 2N, 2) of bands around lines (..., N, 2); `width` is one value
    or one per point.
    """
    along = np.empty_like(lines)
    along[..., 1:-1, :] = lines[..., 2:, :] - lines[..., :-2, :]
    along[..., 0, :] = lines[..., 1, :] - lines[..., 0, :]
    along[..., -1, :] = lines[..., -1, :] - lines[..., -2, :]
    half = width / (2 * np.maximum(np.hypot(along[..., 0], along[..., 1]), 1e-9))
    offset = along[..., ::-1] * half[..., None]
    offset[..., 0] *= -1
    return np.concatenate([lines + offset, (lines - offset)[..., ::-1, :]], axis=-2)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Camera:
    """Projection from patient centimetres to pixels (a similarity transform)."""

    field: float
    """Centimetres along the shorter side of the image."""
    aspect: float
    """Width divided by height."""
    center: tuple[float, float]
    """Point (x, y) at the middle of the image."""
    degrees: float = 0.0
    """Clockwise rotation of the patient."""

    def shape(self, size: int) -> tuple[int, int]:
        """Return (H, W) of an image whose longer side is `size` pixels."""
        if self.aspect >= 1:
            return max(1, round(size / self.aspect)), size
        return size, max(1, round(size * self.aspect))

    def matrix(self, shape_HW: tuple[int, int]) -> Points:
        """Return the matrix (2, 3) from centimetres to pixels, where integers are the borders
        between pixels.
        """
        height, width = shape_HW
        scale = min(height, width) / self.field
        turn = math.radians(self.degrees)
        linear = scale * np.array(
            [[math.cos(turn), -math.sin(turn)], [math.sin(turn), math.cos(turn)]]
        )
        shift = np.array([width / 2, height / 2]) - linear @ np.array(self.center)
        return np.concatenate([linear, shift[:, None]], axis=1)


class Surface:
    """Drawing surface that renders outlines in centimetres as 8-bit canvases (0 to 255)."""

    def __init__(self, camera: Camera, shape_HW: tuple[int, int]) -> None:
        self.camera = camera
        self.shape_HW = shape_HW
        self.matrix = camera.matrix(shape_HW)
        self.pixels_per_cm = min(shape_HW) / camera.field

    @functools.cached_property
    def coarse(self) -> "Surface":
        """Surface of the same view at low resolution, for soft structures."""
        ratio = min(1.0, COARSE_PIXELS_PER_CM / self.pixels_per_cm)
        height, width = self.shape_HW
        return Surface(self.camera, (max(1, round(height * ratio)), max(1, round(width * ratio))))

    def blank(self) -> Canvas:
        """Return a canvas of zeros (H, W)."""
        return np.zeros(self.shape_HW, np.uint8)

    def pixels(self, points: Points) -> Points:
        """Convert points (..., 2) from centimetres to pixels, whose centres are integers."""
        return points @ self.matrix[:, :2].T + (self.matrix[:, 2] - 0.5)

    def _fixed(self, points: Points) -> NDArray[np.int32]:
        return np.rint(self.pixels(points) * (1 << _FRACTION_BITS)).astype(np.int32)

    def fill(
        self, outlines: Sequence[Points] | Points, value: int = 255, canvas: Canvas | None = None
    ) -> Canvas:
        """Fill outlines (a list, or an array KN2) on `canvas` or a new one; later ones cover
        earlier ones.

        cv2 includes the pixels of the border, so outlines grow by half a pixel.
        """
        canvas = self.blank() if canvas is None else canvas
        for fixed in self._fixed_each(outlines):
            cv2.fillPoly(canvas, [fixed], value, cv2.LINE_AA, _FRACTION_BITS)
        return canvas

    def stroke(
        self,
        lines: Sequence[Points] | Points,
        width: float,
        value: int = 255,
        canvas: Canvas | None = None,
    ) -> Canvas:
        """Draw lines of `width` centimetres (a list, or an array KN2); lines thinner than a pixel
        are fainter.

        Thick lines are filled bands, because cv2 draws thick lines ten times more slowly.
        """
        canvas = self.blank() if canvas is None else canvas
        pixels = width * self.pixels_per_cm
        if pixels > 1.5:
            bands = (
                ribbon(lines, width)
                if isinstance(lines, np.ndarray)
                else [ribbon(line, width) for line in lines]
            )
            return self.fill(bands, value, canvas)
        fixed = self._fixed_each(lines)
        cv2.polylines(
            canvas, fixed, False, round(value * min(1.0, pixels)), 1, cv2.LINE_AA, _FRACTION_BITS
        )
        return canvas

    def _fixed_each(self, shapes: Sequence[Points] | Points) -> list[NDArray[np.int32]]:
        return (
            list(self._fixed(shapes))
            if isinstance(shapes, np.ndarray)
            else [self._fixed(shape) for shape in shapes]
        )

    def soft(self, outlines: Sequence[Points], blur: float) -> Image:
        """Return filled outlines, 0 to 1, blurred by `blur` centimetres (one sigma); for use on
        `coarse`.
        """
        return self.blur(self.fill(outlines).astype(np.float32) / 255, blur)

    def blur(self, image_HW: Image, sigma: float, out_HW: Image | None = None) -> Image:
        """Return the image after a Gaussian blur of `sigma` centimetres, truncated at 2.5 sigma."""
        pixels = max(0.3, sigma * self.pixels_per_cm)
        width = 2 * math.ceil(2.5 * pixels) + 1
        return cv2.GaussianBlur(
            image_HW, (width, width), pixels, dst=out_HW, borderType=cv2.BORDER_REPLICATE
        )

    def enlarge(self, coarse_HW: Image) -> Image:
        """Enlarge an image of the coarse surface to this one."""
        return cv2.resize(coarse_HW, self.shape_HW[::-1], interpolation=cv2.INTER_LINEAR)

    @functools.cached_property
    def grid(self) -> tuple[Image, Image]:
        """Coordinates in centimetres (x_HW, y_HW) of every pixel; for use on `coarse`. Do not
        modify.
        """
        height, width = self.shape_HW
        inverse = cv2.invertAffineTransform(self.matrix)
        columns, rows = np.meshgrid(np.arange(width) + 0.5, np.arange(height) + 0.5)
        x = inverse[0, 0] * columns + inverse[0, 1] * rows + inverse[0, 2]
        y = inverse[1, 0] * columns + inverse[1, 1] * rows + inverse[1, 2]
        return x.astype(np.float32), y.astype(np.float32)
