"""A contact sheet: every finding in every severity, to be looked at."""

from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from medvl.errors import ConfigError
from medvl.phantom.population.finding_sites import PART_SAMPLERS
from medvl.phantom.population.findings import DRAWN, SEVERITIES, Finding
from medvl.phantom.population.world import View, World, take_view
from medvl.phantom.rendering.draw import draw
from medvl.phantom.rendering.ground_truth import boxes
from medvl.phantom.seeds import generator

_STREAM = 97
_CAPTION = 18  # pixels below each picture
_YELLOW, _WHITE = (0, 220, 255), (235, 235, 235)


def contact_sheet(
    world: World,
    out_png: Path | str,
    *,
    labels: Sequence[str] = DRAWN,
    tile: int = 320,
    mark: bool = False,
) -> Path:
    """Write one PNG with a row a finding: a normal chest, then mild, moderate and severe, then severe from the side.

    Args:
        world: whose patients to show; another seed gives another sheet.
        out_png: the file to write.
        labels: the findings to show, in that order.
        tile: pixels of the longer side of each picture.
        mark: draw the truth's boxes.

    Returns:
        The file written.

    Raises:
        ConfigError: a label is not one that can be drawn.
    """
    unknown = [label for label in labels if label not in PART_SAMPLERS]
    if unknown or not labels:
        raise ConfigError(f"labels: {', '.join(unknown) or 'none given'}; the findings are {', '.join(DRAWN)}")
    rows = []
    for number, label in enumerate(labels):
        views = _row(world, number, label)
        pictures = [_picture(view, caption, tile, mark) for caption, view in views]
        rows.append(np.hstack(pictures))
    out_png = Path(out_png)
    out_png.parent.mkdir(parents=True, exist_ok=True)
    out_png.write_bytes(cv2.imencode(".png", np.vstack(rows))[1].tobytes())
    return out_png


def _row(world: World, number: int, label: str) -> list[tuple[str, View]]:
    """Captions and views of one finding; each picture is another patient."""
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
        views.append((caption, take_view(key, position, chest, findings)))
    return views


def _picture(view: View, caption: str, tile: int, mark: bool) -> NDArray[np.uint8]:
    """A view in a square of `tile` pixels with its caption below, (tile + caption, tile, 3)."""
    image_HW = (draw(view, tile) >> 4).astype(np.uint8)
    canvas = np.zeros((tile + _CAPTION, tile, 3), np.uint8)
    top, left = (tile - image_HW.shape[0]) // 2, (tile - image_HW.shape[1]) // 2
    canvas[top : top + image_HW.shape[0], left : left + image_HW.shape[1]] = image_HW[..., None]
    if mark:
        for box in boxes(view, tile):
            x, y = left + box.x, top + box.y
            cv2.rectangle(canvas, (x, y), (x + box.width - 1, y + box.height - 1), _YELLOW)
    where = "; ".join(dict.fromkeys(part.zone or part.kind for f in view.findings for part in f.parts))
    text = f"{caption}  ({where})" if where and "shape" not in where else caption
    cv2.putText(canvas, text, (4, tile + 13), cv2.FONT_HERSHEY_SIMPLEX, 0.36, _WHITE, 1, cv2.LINE_AA)
    return canvas
