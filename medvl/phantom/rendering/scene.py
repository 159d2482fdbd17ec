"""The layers of one projection, and how they add up.

An X-ray image is the sum of what lies along each ray, so a scene is a set of layers that are added: soft tissue, solid
things (organs, bones, metal), and fine structure inside the lungs; minus the air of the lungs, which every opacity
takes away. The unit is optical depth, about 1 for the chest wall. Layers that hold nothing sharp are kept coarse (see
`geometry.Surface.coarse`) and enlarged once.
"""

from collections.abc import Sequence

import cv2
import numpy as np

from medvl.phantom.geometry import Canvas, Image, Points, Surface
from medvl.phantom.rendering.noise import clouds, cutout, mist

_SOLID, _BRONCHI = 0.80, 0.12
"""Optical depth of these canvases at 255."""
_DETAIL = 0.55
"""Share of the air that fine structure at 255 fills."""


class Scene:
    """What has been drawn of one chest so far; `depth` adds it up."""

    def __init__(self, surface: Surface, lungs: Sequence[Points]) -> None:
        self.surface, self.coarse = surface, surface.coarse
        self.lung: Canvas = surface.fill(lungs)
        """Where there is air in front of the detector, 0 to 255."""
        self.air: Image = 0.50 + 0.17 * self.coarse.soft(lungs, 1.3)
        """Optical depth that full lungs lack, on the coarse surface; opacities multiply it."""
        self.soft: Image = np.zeros(self.coarse.shape_HW, np.float32)
        self.solid = surface.blank()
        self.detail = surface.blank()
        """Vessels and the like: bright, seen only where there is lung."""
        self.bronchi: Canvas | None = None
        self.blurred_vessels = 0.0
        """0 sharp, 1 lost in oedema."""

    def add(self, canvas: Canvas, depth: float) -> None:
        """Add something solid: `depth` is the optical depth of the canvas at 255."""
        cv2.addWeighted(self.solid, 1.0, canvas, depth / _SOLID, 0.0, dst=self.solid)

    def add_inside_lung(self, canvas: Canvas, depth: float) -> None:
        """Add something solid where there is lung."""
        self.add(cv2.multiply(canvas, self.lung, scale=1 / 255), depth)

    def hide_lung(self, organs: Canvas, share: float) -> None:
        """Take away up to that share of the lung where organs lie, in proportion to their thickness."""
        cv2.subtract(self.lung, cv2.convertScaleAbs(organs, alpha=share), dst=self.lung)

    def veil(self, outlines: Sequence[Points], strength: float, blur: float, mottle: float, seed: int) -> None:
        """Take the share `strength` of the air inside the outlines, with soft edges (`blur` centimetres).

        `mottle` makes it uneven: 0 is flat, 1 leaves holes.
        """
        veil_HW = self.coarse.soft(outlines, blur)
        if mottle:
            rng = np.random.Generator(np.random.PCG64(seed))
            zoom = self.coarse.pixels_per_cm / 22  # clouds of a few centimetres
            veil_HW *= 1 + mottle * (2.4 * cutout(clouds(), self.coarse.shape_HW, rng, zoom) - 1.3)
        self.air *= 1 - strength * np.clip(veil_HW, 0, 1)

    def clear(self, outlines: Sequence[Points]) -> None:
        """Take everything fine away inside the outlines: free gas has no vessels."""
        self.surface.fill(outlines, 0, self.detail)

    def flood(self, outlines: Sequence[Points], share: float = 1.0) -> None:
        """Replace that share of the lung by fluid inside the outlines, with a sharp edge."""
        fluid = self.surface.fill(outlines, round(255 * share))
        self.add_inside_lung(fluid, 0.15)
        cv2.multiply(self.lung, cv2.bitwise_not(fluid), dst=self.lung, scale=1 / 255)

    def bronchogram(self, outlines: Sequence[Points], branches: Sequence[Points], width: float) -> None:
        """Draw air-filled bronchi (arrays KN2) inside the outlines."""
        tree = self.surface.blank()
        for lines_KN2 in branches:
            self.surface.stroke(lines_KN2, width, canvas=tree)
        cv2.bitwise_and(tree, self.surface.fill(outlines), dst=tree)
        self.bronchi = tree if self.bronchi is None else cv2.max(self.bronchi, tree)

    def depth(self, rng: np.random.Generator) -> Image:
        """Optical depth (H, W), never negative; `rng` chooses the fine texture of the lung."""
        surface = self.surface
        total, inside = surface.enlarge(self.soft), surface.enlarge(self.air)
        detail = self.detail
        if self.blurred_vessels > 0.2:
            detail = surface.blur(detail, 0.22 * self.blurred_vessels)
        texture = cutout(mist(), surface.shape_HW, rng, surface.pixels_per_cm / 26)
        fine = cv2.addWeighted(detail, 1.0, texture, 0.5, 0.0)
        fine = cv2.addWeighted(fine, _DETAIL / 255, total, 0.0, -1.12, dtype=cv2.CV_32F)
        cv2.multiply(inside, fine, dst=inside)  # vessels show against air only: opacities hide them
        cv2.multiply(inside, self.lung, dst=inside, scale=1 / 255, dtype=cv2.CV_32F)
        cv2.add(total, inside, dst=total)
        cv2.addWeighted(self.solid, _SOLID / 255, total, 1.0, 0.0, dst=total, dtype=cv2.CV_32F)
        if self.bronchi is not None:
            cv2.addWeighted(self.bronchi, -_BRONCHI / 255, total, 1.0, 0.0, dst=total, dtype=cv2.CV_32F)
        surface.blur(total, max(0.045, 0.6 / surface.pixels_per_cm), total)  # the detector, and the patient's motion
        return np.maximum(total, 0.0, out=total)
