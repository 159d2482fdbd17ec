"""Drawing of views and slices."""

import cv2
import numpy as np
from numpy.typing import NDArray

from medvl.errors import ConfigError
from medvl.phantom.geometry import Surface
from medvl.phantom.population.slices import Slice
from medvl.phantom.population.world import View
from medvl.phantom.rendering.ct_mr_slices import draw_slice
from medvl.phantom.rendering.film import WHITE, collimate, develop, draw_markers
from medvl.phantom.rendering.findings import draw_findings, fractured_bones
from medvl.phantom.rendering.frontal import frontal_scene
from medvl.phantom.rendering.lateral import lateral_scene
from medvl.phantom.seeds import generator

_MIN_PIXELS_PER_CM = 10.0  # smaller images are drawn at this resolution and reduced, to keep thin lines thin


def draw(view: View, size: int = 512) -> NDArray[np.uint16]:
    """Draw a view as a 12-bit image (H, W), 0 to 4095, dense tissue bright, the longer side `size` pixels.

    Sizes of one view differ only in their noise. Raises ConfigError ("out_of_range") for a size below 16.
    """
    if size < 16:
        raise ConfigError(f"size must be 16 pixels or more, got {size}", "out_of_range", field="size")
    shape_HW = view.camera.shape(size)
    factor = max(1.0, _MIN_PIXELS_PER_CM * view.camera.field / min(shape_HW))
    surface = Surface(view.camera, (round(shape_HW[0] * factor), round(shape_HW[1] * factor)))
    chest, rng = view.chest, generator(*view.key)
    if view.lateral:
        scene = lateral_scene(chest, surface, rng)
    else:
        scene = frontal_scene(chest, surface, rng, view.arms, fractured_bones(chest, view.findings))
    scene.blurred_vessels = view.motion
    draw_findings(scene, chest, view.lateral, view.findings)
    image_HW = develop(scene.depth(rng), view.exposure, surface, rng)
    if factor > 1:
        image_HW = cv2.resize(image_HW, shape_HW[::-1], interpolation=cv2.INTER_AREA)
    draw_markers(image_HW, view.markers, view.camera)
    collimate(image_HW, view.exposure)
    np.clip(image_HW, 0.0, 1.0, out=image_HW)
    return (image_HW * WHITE + 0.5).astype(np.uint16)


def draw_image(source: View | Slice, size: int = 512) -> NDArray[np.uint16]:
    """Draw a radiograph or a CT or MR slice as a 12-bit image (H, W), the longer side `size` pixels."""
    return draw(source, size) if isinstance(source, View) else draw_slice(source, size)
