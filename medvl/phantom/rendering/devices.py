"""Drawing of support devices."""

import numpy as np

from medvl.phantom.population.devices import Device
from medvl.phantom.rendering.scene import Scene


def draw_device(scene: Scene, device: Device) -> None:
    """Add a device to the scene."""
    metal = scene.surface.stroke(device.lines, device.width, device.brightness)
    if device.hollow:
        scene.surface.stroke(device.lines, 0.62 * device.width, device.brightness // 3, metal)
        stripes = [line + np.array([0.12 * device.width, 0.0]) for line in device.lines]
        scene.surface.stroke(stripes, 0.12, 2 * device.brightness, metal)
    scene.add(scene.surface.fill(device.solids, 200, metal), 0.9)
