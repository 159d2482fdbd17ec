"""`draw`: a view as an image."""

import cv2
import numpy as np
from numpy.typing import NDArray

from medvl.errors import ConfigError
from medvl.phantom.geometry import Surface
from medvl.phantom.population.world import View
from medvl.phantom.rendering.film import WHITE, collimate, develop, stamp
from medvl.phantom.rendering.findings import broken_bones, paint_findings
from medvl.phantom.rendering.frontal import frontal_scene
from medvl.phantom.rendering.lateral import lateral_scene
from medvl.phantom.seeds import generator

_LEAST_PIXELS_PER_CM = 10.0  # drawn finer and shrunk where fewer are asked for: thin lines stay thin


def draw(view: View, size: int = 512) -> NDArray[np.uint16]:
    """The view as a 12-bit image (H, W), 0 to 4095, dense tissue bright, the longer side `size` pixels.

    The same view at another size shows the same chest; only the noise differs. Raises `ConfigError` on a size below 16.
    """
    if size < 16:
        raise ConfigError(f"size must be 16 pixels or more, not {size}")
    shape_HW = view.camera.shape(size)
    fine = max(1.0, _LEAST_PIXELS_PER_CM * view.camera.field / min(shape_HW))
    surface = Surface(view.camera, (round(shape_HW[0] * fine), round(shape_HW[1] * fine)))
    chest, rng = view.chest, generator(*view.key)
    if view.lateral:
        scene = lateral_scene(chest, surface, rng)
    else:
        scene = frontal_scene(chest, surface, rng, view.arms, broken_bones(chest, view.findings))
    scene.blurred_vessels = view.motion
    paint_findings(scene, chest, view.lateral, view.findings)
    image_HW = develop(scene.depth(rng), view.exposure, surface, rng)
    if fine > 1:
        image_HW = cv2.resize(image_HW, shape_HW[::-1], interpolation=cv2.INTER_AREA)
    stamp(image_HW, view.markers, view.camera)
    collimate(image_HW, view.exposure)
    np.clip(image_HW, 0.0, 1.0, out=image_HW)
    return (image_HW * WHITE + 0.5).astype(np.uint16)
