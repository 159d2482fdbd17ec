"""Contact sheet of every finding at every severity, for visual inspection."""

from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from medvl.common.files import write_atomic
from medvl.errors import ConfigError
from medvl.phantom.population.findings import PART_SAMPLERS, RENDERED_LABELS, SEVERITIES, Finding
from medvl.phantom.population.world import View, World, sample_view
from medvl.phantom.rendering.draw import draw
from medvl.phantom.rendering.ground_truth import boxes
from medvl.phantom.seeds import generator

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
