"""Plots of the pages as SVG and PDF, without pyplot's global state."""

import dataclasses
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from medvl.data.transforms.image import Box
from medvl.eval.core.metrics import Array, CalibrationBins, RocCurve
from medvl.models.heatmaps import on_image

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.legend import Legend


POSITIVE_COLOR = "#c2410c"
NEGATIVE_COLOR = "#64748b"
LINE_COLOR = "#1d4ed8"
GREY = "#94a3b8"
LINE_COLORS = ("#1d4ed8", "#c2410c", "#15803d", "#7e22ce", "#0e7490", "#be185d", "#a16207")
_ROUNDING = 1e-12  # scores within this share of each other are equal but for rounding
# the resolution is that of images within a plot
_INCHES = (2.9, 2.5)
_DPI = 200


@dataclasses.dataclass(frozen=True, slots=True)
class Plot:
    """Plot as two files of one name."""

    name: str
    """Name of the files without an ending, unique on the page."""
    svg: bytes
    pdf: bytes
    color_coded: bool = False
    """Colors are values, so that dark pages show the plot unchanged, on white."""


def _canvas(inches: tuple[float, float] = _INCHES) -> tuple["Figure", "Axes"]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=inches, dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["bottom", "left"]].set_color(GREY)
    axes.tick_params(labelsize=7, colors="#475569", length=3)
    return figure, axes


def _legend_above(axes: "Axes", **options: Any) -> "Legend":
    """Draw the legend above the axes, in three columns."""
    anchor = (0.5, 1.0)
    return axes.legend(
        loc="lower center", bbox_to_anchor=anchor, ncols=3, fontsize=6.5, frameon=False, **options
    )


def _finish(
    name: str, figure: "Figure", axes: "Axes", x: str, y: str, *, color_coded: bool = False
) -> Plot:
    axes.set_xlabel(x, fontsize=8, color="#334155")
    axes.set_ylabel(y, fontsize=8, color="#334155")
    return Plot(name, _save(figure, "svg"), _save(figure, "pdf"), color_coded)


def _save(figure: "Figure", kind: Literal["svg", "pdf"]) -> bytes:
    """Return a file of the figure without a date. Text stays text."""
    import matplotlib

    date = {"svg": "Date", "pdf": "CreationDate"}[kind]
    buffer = io.BytesIO()
    with matplotlib.rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": "medvl", "pdf.fonttype": 42}
    ):
        figure.savefig(buffer, format=kind, metadata={date: None}, transparent=True)
    return buffer.getvalue()


def _unit_square(axes: "Axes") -> None:
    axes.plot([0, 1], [0, 1], color=GREY, linewidth=0.8, linestyle=(0, (3, 3)))
    axes.set_xlim(-0.02, 1.02)
    axes.set_ylim(-0.02, 1.02)
    axes.set_xticks([0, 0.5, 1], ["0", "0.5", "1"])
    axes.set_yticks([0, 0.5, 1], ["0", "0.5", "1"])


def roc_plot(name: str, curve: RocCurve) -> Plot:
    """Plot a ROC curve with its pointwise 95 % band."""
    figure, axes = _canvas()
    _unit_square(axes)
    axes.fill_between(
        curve.grid_G, curve.low_G, curve.high_G, color=LINE_COLOR, alpha=0.16, linewidth=0
    )
    axes.plot(curve.false_positive_rate, curve.true_positive_rate, color=LINE_COLOR, linewidth=1.4)
    return _finish(name, figure, axes, "false positive rate", "true positive rate")


def roc_overlay(name: str, curves: Mapping[str, RocCurve], *, beside: bool = True) -> Plot:
    """Plot several ROC curves in one square, with their names, in the given order, beside it or
    in the corner.
    """
    import matplotlib

    figure, axes = _canvas((6.4, 3.9) if beside else _INCHES)
    _unit_square(axes)
    axes.set_aspect("equal")
    table = matplotlib.colormaps["tab10"]
    colors = (
        LINE_COLORS
        if len(curves) <= len(LINE_COLORS)
        else tuple(table(number) for number in range(table.N))
    )
    for number, (label, curve) in enumerate(curves.items()):
        dashes = "-" if number < len(colors) else "--"
        color = colors[number % len(colors)]
        axes.plot(
            curve.false_positive_rate,
            curve.true_positive_rate,
            dashes,
            color=color,
            linewidth=1.3,
            label=label,
        )
    if beside:
        axes.legend(loc="center left", bbox_to_anchor=(1.02, 0.5), fontsize=7, frameon=False)
    else:
        axes.legend(loc="lower right", fontsize=6, frameon=False)
    return _finish(name, figure, axes, "false positive rate", "true positive rate")


def score_plot(name: str, scores_N: Array, labels_N: Array, threshold: float | None) -> Plot:
    """Plot normalised histograms of the scores of positives and negatives, with the threshold as
    a line.
    """
    figure, axes = _canvas()
    known = ~np.isnan(labels_N)
    edges = _bin_edges(scores_N[known])
    sides = (
        (labels_N == 0, NEGATIVE_COLOR, "negative"),
        (labels_N == 1, POSITIVE_COLOR, "positive"),
    )
    for mask_N, color, side in sides:
        if mask_N.any():
            axes.hist(scores_N[mask_N], bins=edges, density=True, color=color, alpha=0.28)
            label = f"{side} ({int(mask_N.sum())})"
            axes.hist(
                scores_N[mask_N],
                bins=edges,
                density=True,
                histtype="step",
                color=color,
                label=label,
            )
    if threshold is not None and not np.isnan(threshold):
        axes.axvline(
            threshold, color="#0f172a", linewidth=0.9, linestyle=(0, (4, 2)), label="threshold"
        )
    axes.set_yticks([])
    axes.locator_params(axis="x", nbins=4)
    _legend_above(axes, columnspacing=1)
    return _finish(name, figure, axes, "score", "density")


def _bin_edges(values_N: Array, bins: int = 24) -> list[float]:
    """Return the edges of bins over all values; values that differ by rounding only share one,
    as equal ones do.
    """
    low = float(values_N.min())
    high = float(values_N.max())
    if high - low <= _ROUNDING * max(abs(low), abs(high)):
        low = low - 0.5
        high = high + 0.5
    return np.linspace(low, high, bins + 1).tolist()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """Values of one system with intervals; NaN is not drawn."""

    name: str
    value_K: Array
    low_K: Array
    high_K: Array
    color: str = GREY


def interval_plot(
    name: str,
    rows: Sequence[str],
    systems: Sequence[Series],
    baselines: Sequence[Series] = (),
    *,
    axis: str,
    line: float | None = None,
) -> Plot:
    """Plot one line per row: points with intervals for the systems, ticks for the baselines.

    The axis covers exactly the range of all values and intervals.

    Args:
        name: name of the files.
        rows: names of the lines, from the top.
        systems: values with intervals.
        baselines: values drawn as ticks.
        axis: label of the axis.
        line: value of a vertical line, such as a difference of 0.
    """
    figure, axes = _canvas((7.6, 0.7 + (0.2 + 0.1 * max(len(systems), 1)) * len(rows)))
    rows_K = np.arange(len(rows), dtype=np.float64)
    axes.grid(axis="y", color="#e2e8f0", linewidth=0.6)
    axes.set_axisbelow(True)
    if line is not None:
        axes.axvline(line, color="#0f172a", linewidth=0.9)
    for number, series in enumerate(systems):
        at_K = rows_K + 0.7 / max(len(systems), 2) * (number - (len(systems) - 1) / 2)
        axes.hlines(
            at_K, series.low_K, series.high_K, color=series.color, linewidth=1.4, alpha=0.55
        )
        axes.plot(series.value_K, at_K, "o", color=series.color, markersize=4, label=series.name)
    for series in baselines:
        axes.scatter(
            series.value_K,
            rows_K,
            s=80,
            marker="|",
            color=series.color,
            linewidth=1.6,
            label=series.name,
        )
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_yticks(rows_K, rows)
    axes.locator_params(axis="x", nbins=7)
    axes.legend(
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        ncols=6,
        fontsize=7,
        frameon=False,
        columnspacing=1.2,
    )
    return _finish(name, figure, axes, axis, "")


def interval_lines(name: str, x_K: Array, lines: Sequence[Series], *, x: str, y: str) -> Plot:
    """Plot values with intervals against the numbers `x_K`, one line for each series; `x` and
    `y` name the axes.
    """
    figure, axes = _canvas()
    for series in lines:
        axes.vlines(x_K, series.low_K, series.high_K, color=series.color, linewidth=1, alpha=0.5)
        axes.plot(
            x_K,
            series.value_K,
            "o-",
            color=series.color,
            linewidth=1.2,
            markersize=3,
            label=series.name,
        )
    axes.set_xticks(x_K, [f"{value:g}" for value in x_K])
    if len(lines) > 1:
        _legend_above(axes, columnspacing=1)
    return _finish(name, figure, axes, x, y)


def calibration_plot(name: str, bins: CalibrationBins) -> Plot:
    """Plot the fraction of positives against mean probability, with Wilson intervals."""
    figure, axes = _canvas()
    _unit_square(axes)
    axes.vlines(bins.probability_Q, bins.low_Q, bins.high_Q, color=LINE_COLOR, linewidth=0.8)
    axes.plot(
        bins.probability_Q, bins.observed_Q, "o-", color=LINE_COLOR, linewidth=1, markersize=3
    )
    return _finish(name, figure, axes, "mean probability", "fraction of positives")


def matrix_plot(name: str, values_KK: Array, x_label: str, y_label: str) -> Plot:
    """Plot a matrix as an image, first row on top, with a color bar."""
    figure, axes = _canvas()
    image = axes.imshow(values_KK, cmap="viridis", interpolation="nearest")
    axes.spines[["bottom", "left"]].set_visible(False)
    axes.set_xticks([])
    axes.set_yticks([])
    scale = figure.colorbar(image, ax=axes, shrink=0.85)
    for edge in scale.ax.spines.values():
        edge.set_visible(False)
    scale.ax.tick_params(labelsize=7, colors="#475569", length=2)
    return _finish(name, figure, axes, x_label, y_label, color_coded=True)


def points_plot(
    name: str, points: Mapping[str, Array], colors: Mapping[str, str], axis_names: Sequence[str]
) -> Plot:
    """Plot named sets of points (N, 2) in their colors; `axis_names` label the two axes."""
    figure, axes = _canvas()
    for side, points_N2 in points.items():
        label = f"{side} ({len(points_N2):,})"
        color = colors[side]
        axes.scatter(
            points_N2[:, 0],
            points_N2[:, 1],
            s=5,
            alpha=0.5,
            linewidth=0,
            color=color,
            label=label,
            rasterized=True,
        )
    axes.set_xticks([])
    axes.set_yticks([])
    legend = _legend_above(axes, markerscale=2.5)
    for handle in legend.legend_handles:
        if handle is not None:
            handle.set_alpha(1)
    return _finish(name, figure, axes, axis_names[0], axis_names[1])


def line_plot(
    name: str,
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    x_label: str,
    y_label: str,
    *,
    log_x: bool = False,
) -> Plot:
    """Plot named lines (x, y), with points where they are few and their names beside the axes."""
    import matplotlib

    figure, axes = _canvas((6.4, 3.9))
    table = matplotlib.colormaps["tab20"]
    for number, (label, (x, y)) in enumerate(lines.items()):
        marker = "o" if len(x) <= 12 else ""
        axes.plot(
            x,
            y,
            marker=marker,
            markersize=3,
            linewidth=1.2,
            color=table(number % table.N),
            label=label,
        )
    if log_x:
        places = sorted({place for x, _ in lines.values() for place in x})
        axes.set_xscale("log")
        axes.set_xticks(places, [f"{place:g}" for place in places])
        axes.minorticks_off()
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=6.5, frameon=False)
    return _finish(name, figure, axes, x_label, y_label)


def labelled_points(
    name: str, points: Mapping[str, tuple[float, float]], x_label: str, y_label: str
) -> Plot:
    """Plot named points (x, y) with their names; x is logarithmic where it spans more than a
    factor of five.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    figure, axes = _canvas((6.4, 3.9))
    for label, (x, y) in points.items():
        axes.plot([x], [y], "o", markersize=4, color=LINE_COLOR)
        axes.annotate(
            label, (x, y), xytext=(4, 2), textcoords="offset points", fontsize=6.5, color="#334155"
        )
    places = [x for x, _ in points.values()]
    if max(places) > 5 * min(places):
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda place, _: f"{place:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.margins(x=0.12)
    return _finish(name, figure, axes, x_label, y_label)


# Heatmaps over the grid of a model's input, drawn on the original image.
#
# H, W pixels of the image; h, w cells of the grid.

_OUTSIDE_BRIGHTNESS = 0.35  # brightness of pixels outside the model's input
_OPACITY = 0.62  # overlay opacity at the maximum
# lowest peak, in units of the mean, that is drawn in full color; flatter maps stay pale
_FULL_COLOR_PEAK = 2.0


def to_pixels(
    map_hw: NDArray[np.floating], box: Box, height: int, width: int
) -> NDArray[np.float64]:
    """Return the map (H, W) on the pixels of the image (`medvl.models.heatmaps.on_image`), 0
    outside the box.
    """
    map_HW = on_image(
        torch.from_numpy(np.asarray(map_hw, dtype=np.float64))[None], box, height, width
    )[0]
    return map_HW.nan_to_num(0.0).double().numpy()


def peak_ratio(map_hw: NDArray[np.floating]) -> float:
    """Return the maximum divided by the mean of the cells; 0 for a map of zeros."""
    mean = float(map_hw.mean())
    return float(map_hw.max()) / mean if mean > 0 else 0.0


def color_ends(map_hw: NDArray[np.floating]) -> tuple[float, float]:
    """Return the values at which color starts and is full: the mean, and the maximum or twice
    the mean if higher.
    """
    mean = float(map_hw.mean())
    return mean, mean * max(peak_ratio(map_hw), _FULL_COLOR_PEAK)


def mark_peak(image_HWC: NDArray[np.uint8], row: int, column: int) -> NDArray[np.uint8]:
    """Return the image (H, W, 3) with a ring, white with black edges, around a pixel."""
    import cv2

    marked_HWC = np.ascontiguousarray(image_HWC)
    radius = max(4, round(max(marked_HWC.shape[:2]) / 40))
    for gray, width in ((0, 4), (255, 2)):
        cv2.circle(marked_HWC, (column, row), radius, (gray, gray, gray), width, cv2.LINE_AA)
    return marked_HWC


def draw_map(
    pixels: NDArray[np.uint8], map_hw: NDArray[np.floating], box: Box, *, peak: bool = False
) -> NDArray[np.uint8]:
    """Return the image (H, W, 3) with the heatmap on it, darkened outside the model's input.

    Color starts at the mean of the map and is full at its maximum, or at twice the mean if that is
    higher.

    Args:
        pixels: image (H, W) or (H, W, 3).
        map_hw: non-negative map.
        box: part of the image that the map covers (`EvalTransform.box`).
        peak: mark the center of the highest cell with a ring.
    """
    import matplotlib

    height, width = pixels.shape[:2]
    image_HWC = np.repeat(pixels[:, :, None], 3, axis=2) if pixels.ndim == 2 else pixels
    mean = map_hw.mean() or 1.0
    excess_HW = to_pixels(map_hw / mean, box, height, width) - 1
    heat_HW = np.clip(excess_HW / (max(peak_ratio(map_hw), _FULL_COLOR_PEAK) - 1), 0, 1)
    color_HWC = matplotlib.colormaps["YlOrRd"](0.2 + 0.65 * heat_HW)[:, :, :3] * 255
    opacity_HW1 = (_OPACITY * heat_HW**0.6)[:, :, None]
    overlay_HWC = (1 - opacity_HW1) * image_HWC + opacity_HW1 * color_HWC
    inside_HW = to_pixels(np.ones((1, 1)), box, height, width)[:, :, None]
    overlay_HWC *= _OUTSIDE_BRIGHTNESS + (1 - _OUTSIDE_BRIGHTNESS) * inside_HW
    drawn_HWC = np.asarray(overlay_HWC.round().astype(np.uint8))
    if not peak:
        return drawn_HWC
    row, column = np.unravel_index(np.argmax(map_hw), map_hw.shape)
    top = box.top + (row + 0.5) / map_hw.shape[0] * box.height
    left = box.left + (column + 0.5) / map_hw.shape[1] * box.width
    return mark_peak(drawn_HWC, int(top), int(left))
