"""Conversion of optical depth to an image: exposure, noise, collimation, markers."""

import cv2
import numpy as np

from medvl.phantom.geometry import Camera, Image, Surface
from medvl.phantom.population.exposure import Exposure, Marker
from medvl.phantom.rendering.noise import random_crop, white_noise

WHITE = 4095
"""The brightest value of a 12-bit image."""


def develop(depth_HW: Image, exposure: Exposure, surface: Surface, rng: np.random.Generator) -> Image:
    """Convert optical depth to brightness from 0 to 1, dense tissue bright; modifies `depth_HW` in place."""
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
        cv2.putText(canvas, marker.text, origin, cv2.FONT_HERSHEY_SIMPLEX, scale, 250, weight, cv2.LINE_AA)
        cv2.max(image_HW, canvas.astype(np.float32) / 255, dst=image_HW)
