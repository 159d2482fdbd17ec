"""From optical depth to the picture: exposure, noise, the plate's border, the side marker."""

import dataclasses

import cv2
import numpy as np

from medvl.phantom.geometry import Camera, Image, Surface
from medvl.phantom.rendering.noise import cutout, grain

WHITE = 4095
"""The brightest value of a 12-bit image."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Exposure:
    """How the picture was taken and developed."""

    penetration: float
    """Optical depth times this; more makes everything brighter."""
    contrast: float
    """Bend of the tone curve, 0 to 1; more makes the lungs darker."""
    equalize: float
    """How much of the slow variation the console takes out, 0 to 1."""
    noise: float
    """Standard deviation in parts of the full range, where the picture is brightest."""
    black: float
    """Level of the unexposed background, in parts of the full range."""
    collimation: tuple[float, float, float, float]
    """Share of the image hidden at the top, right, bottom and left."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Marker:
    """Lead letters on the plate."""

    text: str
    x: float
    """Position of the text in parts of width and height."""
    y: float
    height: float
    """Centimetres."""


def sample_exposure(rng: np.random.Generator, position: str) -> Exposure:
    """Portable AP pictures are flatter, noisier and less evenly cut than PA ones."""
    portable = position == "AP"
    edges = rng.uniform(0.0, 0.05, 4) * (rng.random(4) < (0.45 if portable else 0.2))
    return Exposure(
        penetration=float(rng.normal(1.42 if portable else 1.5, 0.13)),
        contrast=float(np.clip(rng.normal(0.25 if portable else 0.42, 0.12), 0, 0.7)),
        equalize=float(rng.uniform(0.0, 0.22)),
        noise=float(rng.uniform(0.008, 0.022) * (1.3 if portable else 1.0)),
        black=float(rng.uniform(0.0, 0.04)),
        collimation=(float(edges[0]), float(edges[1]), float(edges[2]), float(edges[3])),
    )


def develop(depth_HW: Image, exposure: Exposure, surface: Surface, rng: np.random.Generator) -> Image:
    """Optical depth to brightness from 0 to 1, dense bright, before markers; changes `depth_HW` in place."""
    if exposure.equalize:
        small = cv2.resize(depth_HW, surface.coarse.shape_HW[::-1])
        slow = surface.enlarge(surface.coarse.blur(small, 3.5))
        cv2.addWeighted(depth_HW, 1.0, slow, -0.5 * exposure.equalize, 0.0, dst=depth_HW)
        np.maximum(depth_HW, 0.0, out=depth_HW)
    shade = cv2.exp(np.multiply(depth_HW, -exposure.penetration, out=depth_HW), dst=depth_HW)
    bright = np.subtract(1.0, shade, out=shade)
    curve = cv2.addWeighted(bright, exposure.contrast, bright, 0.0, 1.0 - exposure.contrast)
    cv2.multiply(bright, curve, dst=bright)
    noise = cutout(grain(), bright.shape[:2], rng)
    cv2.addWeighted(noise, exposure.noise, noise, 0.0, 1.0, dst=curve)
    cv2.multiply(bright, curve, dst=bright, scale=1.0 - exposure.black)
    return np.add(bright, exposure.black, out=bright)


def collimate(image_HW: Image, exposure: Exposure) -> None:
    """Black out the shielded borders in place."""
    height, width = image_HW.shape
    top, right, bottom, left = exposure.collimation
    image_HW[: round(top * height)] = 0
    image_HW[height - round(bottom * height) :] = 0
    image_HW[:, : round(left * width)] = 0
    image_HW[:, width - round(right * width) :] = 0


def stamp(image_HW: Image, markers: tuple[Marker, ...], camera: Camera) -> None:
    """Write the lead letters in place."""
    height, width = image_HW.shape
    pixels_per_cm = min(height, width) / camera.field
    for marker in markers:
        canvas = np.zeros(image_HW.shape, np.uint8)
        scale = marker.height * pixels_per_cm / 22  # cv2's letters are 22 pixels high at scale 1
        weight = max(1, round(0.16 * marker.height * pixels_per_cm))
        where = (round(marker.x * width), round(marker.y * height))
        cv2.putText(canvas, marker.text, where, cv2.FONT_HERSHEY_SIMPLEX, scale, 250, weight, cv2.LINE_AA)
        cv2.max(image_HW, canvas.astype(np.float32) / 255, dst=image_HW)


def sample_markers(rng: np.random.Generator, position: str) -> tuple[Marker, ...]:
    """A letter for the side, sometimes AP or PORTABLE beside it."""
    if position == "LATERAL":
        if rng.random() < 0.4:
            return ()
        return (Marker(text="L", x=rng.uniform(0.06, 0.12), y=rng.uniform(0.08, 0.2), height=1.0),)
    left = rng.random() < 0.6
    x = rng.uniform(0.86, 0.93) if left else rng.uniform(0.04, 0.1)
    markers = [Marker(text="L" if left else "R", x=x, y=rng.uniform(0.06, 0.16), height=rng.uniform(0.9, 1.4))]
    if position == "AP" and rng.random() < 0.6:
        word = str(rng.choice(["AP", "PORTABLE", "SUPINE", "ERECT"]))
        markers.append(Marker(text=word, x=0.05 if left else 0.78, y=rng.uniform(0.04, 0.1), height=0.55))
    return tuple(markers)
