"""Plots of the pages as PNG files, without global matplotlib state."""

import dataclasses
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from medvl.eval.core.curves import CalibrationBins, RocCurve
from medvl.eval.core.metrics import Array

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

POSITIVE_COLOR, NEGATIVE_COLOR, LINE_COLOR, GREY = "#c2410c", "#64748b", "#1d4ed8", "#94a3b8"
_INCHES, _DPI = (2.9, 2.5), 200  # shown at about 290 CSS pixels: two device pixels each


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


def _finish(figure: "Figure", axes: "Axes", x: str, y: str) -> bytes:
    axes.set_xlabel(x, fontsize=8, color="#334155")
    axes.set_ylabel(y, fontsize=8, color="#334155")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _unit_square(axes: "Axes") -> None:
    axes.plot([0, 1], [0, 1], color=GREY, linewidth=0.8, linestyle=(0, (3, 3)))
    axes.set_xlim(-0.02, 1.02)
    axes.set_ylim(-0.02, 1.02)
    axes.set_xticks([0, 0.5, 1], ["0", "0.5", "1"])
    axes.set_yticks([0, 0.5, 1], ["0", "0.5", "1"])


def roc_plot(curve: RocCurve) -> bytes:
    """Plot a ROC curve with its pointwise 95 % band."""
    figure, axes = _canvas()
    _unit_square(axes)
    axes.fill_between(curve.grid_G, curve.low_G, curve.high_G, color=LINE_COLOR, alpha=0.16, linewidth=0)
    axes.plot(curve.false_positive_rate, curve.true_positive_rate, color=LINE_COLOR, linewidth=1.4)
    return _finish(figure, axes, "false positive rate", "true positive rate")


def score_plot(scores_N: Array, labels_N: Array, threshold: float | None) -> bytes:
    """Plot normalised histograms of the scores of positives and negatives, with the threshold as a line."""
    figure, axes = _canvas()
    known = ~np.isnan(labels_N)
    edges = np.histogram_bin_edges(scores_N[known], bins=24).tolist()
    sides = ((labels_N == 0, NEGATIVE_COLOR, "negative"), (labels_N == 1, POSITIVE_COLOR, "positive"))
    for chosen, color, name in sides:
        if chosen.any():
            axes.hist(scores_N[chosen], bins=edges, density=True, color=color, alpha=0.28)
            label = f"{name} ({int(chosen.sum())})"
            axes.hist(scores_N[chosen], bins=edges, density=True, histtype="step", color=color, label=label)
    if threshold is not None and not np.isnan(threshold):
        axes.axvline(threshold, color="#0f172a", linewidth=0.9, linestyle=(0, (4, 2)), label="threshold")
    axes.set_yticks([])
    axes.locator_params(axis="x", nbins=4)
    anchor = (0.5, 1.0)  # above the axes
    axes.legend(loc="lower center", bbox_to_anchor=anchor, ncols=3, fontsize=6.5, frameon=False, columnspacing=1)
    return _finish(figure, axes, "score", "density")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """Values of one system with intervals; NaN is not drawn."""

    name: str
    value_K: Array
    low_K: Array
    high_K: Array
    color: str = GREY


def accuracy_plot(names: Sequence[str], systems: Sequence[Series], baselines: Sequence[Series] = ()) -> bytes:
    """Plot one line per name: points with intervals for the systems, ticks for the baselines."""
    figure, axes = _canvas((7.6, 0.62 + 0.3 * len(names)))
    rows_K = np.arange(len(names), dtype=np.float64)
    axes.hlines(rows_K, 0, 1, color="#e2e8f0", linewidth=0.6, zorder=0)
    for number, series in enumerate(systems):
        at_K = rows_K + 0.24 * (number - (len(systems) - 1) / 2)
        axes.hlines(at_K, series.low_K, series.high_K, color=series.color, linewidth=1.4, alpha=0.55)
        axes.plot(series.value_K, at_K, "o", color=series.color, markersize=4.5, label=series.name)
    for series in baselines:
        axes.scatter(series.value_K, rows_K, s=80, marker="|", color=series.color, linewidth=1.6, label=series.name)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_yticks(rows_K, names)
    axes.set_xlim(-0.01, 1.01)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "0.25", "0.5", "0.75", "1"])
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=6, fontsize=7, frameon=False, columnspacing=1.2)
    return _finish(figure, axes, "accuracy", "")


def calibration_plot(bins: CalibrationBins) -> bytes:
    """Plot the fraction of positives against mean probability, with Wilson intervals."""
    figure, axes = _canvas()
    _unit_square(axes)
    axes.vlines(bins.probability_Q, bins.low_Q, bins.high_Q, color=LINE_COLOR, linewidth=0.8)
    axes.plot(bins.probability_Q, bins.observed_Q, "o-", color=LINE_COLOR, linewidth=1, markersize=3)
    return _finish(figure, axes, "mean probability", "fraction of positives")


def matrix_plot(values_KK: Array, x_label: str, y_label: str) -> bytes:
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
    return _finish(figure, axes, x_label, y_label)


def points_plot(points: Mapping[str, Array], colors: Mapping[str, str], axis_names: Sequence[str]) -> bytes:
    """Plot named sets of points (N, 2) in their colors; `axis_names` label the two axes."""
    figure, axes = _canvas()
    for name, points_N2 in points.items():
        label = f"{name} ({len(points_N2):,})"
        axes.scatter(points_N2[:, 0], points_N2[:, 1], s=5, alpha=0.5, linewidth=0, color=colors[name], label=label)
    axes.set_xticks([])
    axes.set_yticks([])
    anchor = (0.5, 1.0)
    legend = axes.legend(
        loc="lower center", bbox_to_anchor=anchor, ncols=3, fontsize=6.5, frameon=False, markerscale=2.5
    )
    for handle in legend.legend_handles:
        if handle is not None:
            handle.set_alpha(1)
    return _finish(figure, axes, axis_names[0], axis_names[1])
