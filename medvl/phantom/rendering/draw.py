"""Drawing of views and slices."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from medvl.common.files import write_atomic
from medvl.errors import ConfigError
from medvl.phantom.geometry import Image, Points, Surface, ellipse
from medvl.phantom.population.findings import PART_SAMPLERS, RENDERED_LABELS, SEVERITIES, Finding
from medvl.phantom.population.volumes import MODALITIES, Slice
from medvl.phantom.population.world import View, World, generator, sample_view
from medvl.phantom.rendering.findings import boxes, draw_findings, fractured_bones
from medvl.phantom.rendering.radiographs import frontal_scene, lateral_scene
from medvl.phantom.rendering.scene import (
    WHITE,
    collimate,
    develop,
    draw_markers,
    random_crop,
    white_noise,
)

# Drawing of axial CT and MR slices, which give questions about modality, plane and organ several
# answers.
#
# A slice consists of ellipses in centimetres, each of one tissue, and round masses. x grows
# towards the patient's left (the right of the image), y towards the back. The shapes are
# plausible, not anatomically accurate.

_TISSUES = {
    "air": (0.0, 0.02), "lung": (0.09, 0.05), "fat": (0.30, 0.62), "fluid": (0.40, 0.96),
    "muscle": (0.52, 0.36), "brain": (0.50, 0.52), "liver": (0.58, 0.42), "spleen": (0.60, 0.60),
    "kidney": (0.66, 0.70), "blood": (0.63, 0.12), "bone": (1.0, 0.07), "mass": (0.86, 0.90),
}  # fmt: skip
"""Brightness in CT and in T2-weighted MR."""
Region = tuple[str, float, float, float, float]
"""Tissue, centre x and y, radii."""
_ORGANS: Mapping[str, tuple[Region, ...]] = {
    "head": (
        ("fat", 0, 0, 7.6, 9.4), ("bone", 0, 0, 7.2, 9.0), ("brain", 0, 0, 6.5, 8.3),
        ("fluid", -1.1, -1.0, 0.6, 2.4), ("fluid", 1.1, -1.0, 0.6, 2.4),
    ),
    "chest": (
        ("fat", 0, 0, 17.5, 12.0), ("muscle", 0, 0, 16.3, 10.8), ("lung", -8.2, -0.4, 6.2, 8.6),
        ("lung", 8.2, -0.4, 6.2, 8.6), ("blood", 1.6, -3.2, 4.8, 4.2), ("bone", 0, -10.3, 1.6, 0.6),
        ("bone", 0, 6.8, 2.0, 1.8), ("blood", 2.8, 5.4, 1.2, 1.2),
    ),
    "abdomen": (
        ("fat", 0, 0, 17.0, 12.5), ("muscle", 0, 0, 15.4, 10.9), ("fat", 0, -1.0, 14.0, 9.0),
        ("liver", -7.0, -1.6, 6.2, 7.2), ("spleen", 9.6, 1.8, 3.4, 4.4), ("kidney", -6.6, 6.0, 2.2,
        2.6), ("kidney", 6.6, 6.0, 2.2, 2.6), ("bone", 0, 6.6, 2.2, 1.9), ("blood", 1.0, 3.6, 1.1,
        1.1),
    ),
}  # fmt: skip


def draw_slice(part: Slice, size: int = 512) -> NDArray[np.uint16]:
    """Draw a slice as a 12-bit image (size, size), 0 to 4095; sizes differ only in their noise."""
    surface = Surface(part.camera, part.camera.shape(size))
    rng = generator(*part.key, 1)
    masses: list[Region] = [("mass", m.x, m.y, m.diameter / 2, m.diameter / 2) for m in part.masses]
    image_HW = np.zeros(surface.shape_HW, np.float32)
    for tissue, outline in _outlines([*_ORGANS[part.organ], *masses], part.stretch):
        level = _TISSUES[tissue][MODALITIES.index(part.modality)] * float(rng.uniform(0.94, 1.06))
        cover_HW = surface.fill([outline]).astype(np.float32) / 255
        image_HW += cover_HW * (level - image_HW)
    image_HW = surface.blur(image_HW, 0.09)
    noise_HW: Image = random_crop(white_noise(), image_HW.shape[:2], rng)
    cv2.addWeighted(image_HW, 1.0, noise_HW, 0.02, 0.0, dst=image_HW)
    return (np.clip(image_HW, 0.0, 1.0) * WHITE + 0.5).astype(np.uint16)


def _outlines(regions: Sequence[Region], stretch: tuple[float, float]) -> list[tuple[str, Points]]:
    return [
        (tissue, ellipse((x, y), (rx, ry), points=48) * stretch) for tissue, x, y, rx, ry in regions
    ]


# smaller images are drawn at this resolution and reduced, to keep thin lines thin
_MIN_PIXELS_PER_CM = 10.0


def draw(view: View, size: int = 512) -> NDArray[np.uint16]:
    """Draw a view as a 12-bit image (H, W), 0 to 4095, dense tissue bright, the longer side `size`
    pixels.

    Sizes of one view differ only in their noise. Raises ConfigError ("out_of_range") for a size
    below 16.
    """
    if size < 16:
        raise ConfigError(
            f"size must be 16 pixels or more, got {size}", "out_of_range", field="size"
        )
    shape_HW = view.camera.shape(size)
    factor = max(1.0, _MIN_PIXELS_PER_CM * view.camera.field / min(shape_HW))
    surface = Surface(view.camera, (round(shape_HW[0] * factor), round(shape_HW[1] * factor)))
    chest = view.chest
    rng = generator(*view.key)
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
    """Draw a radiograph or a CT or MR slice as a 12-bit image (H, W), the longer side `size`
    pixels.
    """
    return draw(source, size) if isinstance(source, View) else draw_slice(source, size)


# Contact sheet of every finding at every severity, for visual inspection.

_STREAM = 97
_CAPTION = 18  # pixels below each image
_YELLOW = (0, 220, 255)
_WHITE = (235, 235, 235)


def contact_sheet(
    world: World,
    out_png: Path | str,
    *,
    labels: Sequence[str] = RENDERED_LABELS,
    tile: int = 320,
    mark: bool = False,
) -> Path:
    """Write a PNG with one row per finding: normal, mild, moderate, severe, and severe in lateral
    view.

    Args:
        world: population of the patients.
        out_png: path of the file, which is returned.
        labels: findings to show, in this order. Raises ConfigError ("unknown_name") for unknown
            ones.
        tile: pixels of the longer side of each image.
        mark: draw the ground truth boxes.
    """
    unknown = [label for label in labels if label not in PART_SAMPLERS]
    if unknown or not labels:
        message = (
            f"labels must be among {', '.join(RENDERED_LABELS)}; got {', '.join(unknown) or 'none'}"
        )
        raise ConfigError(message, "unknown_name", field="labels")
    rows = []
    for number, label in enumerate(labels):
        views = _row(world, number, label)
        tiles = [_captioned_view(view, caption, tile, mark) for caption, view in views]
        rows.append(np.hstack(tiles))
    out_png = Path(out_png)
    out_png.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(out_png, cv2.imencode(".png", np.vstack(rows))[1].tobytes())
    return out_png


def _row(world: World, number: int, label: str) -> list[tuple[str, View]]:
    """Return captions and views of one finding, each of another patient."""
    views = []
    for column, severity in enumerate(("normal", *SEVERITIES, "severe")):
        chest = world.patient(5 * number + column).chest
        key = (world.seed, _STREAM, number, column)
        findings: tuple[Finding, ...] = ()
        if severity in SEVERITIES:
            extent = (SEVERITIES.index(severity) + 0.5) / len(SEVERITIES)
            parts = PART_SAMPLERS[label](generator(*key), extent)
            findings = (Finding(label=label, parts=parts),)
        position = "LATERAL" if column == len(SEVERITIES) + 1 else "PA"
        caption = f"{severity} {label}" if findings else "normal"
        views.append((caption, sample_view(key, position, chest, findings)))
    return views


def _captioned_view(view: View, caption: str, tile: int, mark: bool) -> NDArray[np.uint8]:
    """Return a view in a square of `tile` pixels with its caption below, (tile + caption, tile,
    3).
    """
    image_HW = (draw(view, tile) >> 4).astype(np.uint8)
    canvas = np.zeros((tile + _CAPTION, tile, 3), np.uint8)
    top = (tile - image_HW.shape[0]) // 2
    left = (tile - image_HW.shape[1]) // 2
    canvas[top : top + image_HW.shape[0], left : left + image_HW.shape[1]] = image_HW[..., None]
    if mark:
        for box in boxes(view, tile):
            x = left + box.x
            y = top + box.y
            cv2.rectangle(canvas, (x, y), (x + box.width - 1, y + box.height - 1), _YELLOW)
    places = "; ".join(
        dict.fromkeys(part.zone or part.kind for f in view.findings for part in f.parts)
    )
    text = f"{caption}  ({places})" if places and "shape" not in places else caption
    cv2.putText(
        canvas, text, (4, tile + 13), cv2.FONT_HERSHEY_SIMPLEX, 0.36, _WHITE, 1, cv2.LINE_AA
    )
    return canvas
