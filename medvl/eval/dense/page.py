"""Shared parts of the detection and segmentation pages."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from medvl.eval.core.publish import PageHeader
from medvl.eval.core.results import Results
from medvl.eval.dense.annotated_images import headline_target
from medvl.eval.html.header import header_facts, headline
from medvl.eval.html.page import Page, Pictures, Section, write_page
from medvl.eval.html.tables import Cell, Table, metric_cell

SIDE = 384
"""Longer side of a picture, in pixels."""
TRUTH_COLOR, PREDICTION_COLOR = (34, 211, 238), (251, 146, 60)
LIMITS = (
    "A research evaluation, not for clinical use: a small decoder on an encoder that was not trained for this task, so "
    "the numbers compare encoders and are not the best that could be reached.",
    "Intervals are percentiles of a bootstrap over patients. They include sampling error, not disagreement between the "
    "annotators of the boxes or masks.",
    "Images on this page belong to the data set and stay under its terms of use.",
)


def write_dense_page(
    results: Results,
    labels: Sequence[str],
    path: str | Path,
    *,
    title: str,
    subtitle: str,
    names: Mapping[str, str],
    headlines: Sequence[str],
    facts: Sequence[tuple[str, str]],
    caption: str,
    pictures: Pictures | None,
    tables: Sequence[Table] = (),
) -> Path:
    """Write a page with a table of the metrics in `names` (metric -> title), `tables` and pictures; return its path."""
    metrics = {row.metric for row in results.rows}
    names = {metric: name for metric, name in names.items() if metric in metrics}
    sections: list[Section] = [_table(results, labels, names, caption), *tables]
    page = Page(
        title=title,
        subtitle=f"{subtitle} of {results.details['patients']:,} patients",
        headlines=[
            headline(names[metric], results.row(metric, headline_target(labels)))
            for metric in headlines
            if metric in names
        ],
        facts=facts,
        sections=sections if pictures is None or not pictures.strips else [*sections, pictures],
        limits=LIMITS,
    )
    return write_page(page, path)


def _table(results: Results, labels: Sequence[str], names: Mapping[str, str], caption: str) -> Table:
    rows = {(row.metric, row.target): row for row in results.rows if not row.subgroup}
    targets = [*labels, "macro"] if len(labels) > 1 else list(labels)
    lines: list[Sequence[Cell | str]] = [
        [
            "Mean over labels" if target == "macro" else target,
            *(metric_cell(rows.get((metric, target)), bar=True) for metric in names),
        ]
        for target in targets
    ]
    return Table(title="Summary by label", columns=["", *names.values()], rows=lines, caption=caption)


def dense_facts(results: Results, header: PageHeader, extra: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the header's facts: `extra`, and how many images were left out."""
    not_annotated, unreadable = results.details["not_annotated"], sum(results.details["unreadable"].values())
    left_out = ("Left out", f"{not_annotated:,} images without annotation, {unreadable} unreadable")
    return header_facts(results, header, units="patients", extra=[*extra, left_out])


def resize_to_picture(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the image as (H, W, 3) with a longer side of `SIDE` pixels."""
    import cv2

    scale = SIDE / max(pixels.shape[:2])
    size = (max(1, round(pixels.shape[1] * scale)), max(1, round(pixels.shape[0] * scale)))
    image = cv2.resize(pixels, size, interpolation=cv2.INTER_AREA if scale < 1 else cv2.INTER_CUBIC)
    color_HWC = np.repeat(image[:, :, None], 3, axis=2) if image.ndim == 2 else image
    return np.ascontiguousarray(color_HWC).astype(np.uint8)
