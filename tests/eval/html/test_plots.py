"""Files of plots: what a reader needs to open and to edit them is within. Other tests leave the
drawing out (tests/conftest.py).
"""

import inspect
from collections.abc import Callable

import matplotlib
import numpy as np
import pytest

from medvl.eval.core.metrics import CalibrationBins, RocCurve
from medvl.eval.html import plots
from medvl.eval.html.plots import Plot, Series

pytestmark = pytest.mark.usefixtures("drawn_plots")

THREE_K = np.array([0.0, 0.5, 1.0])
GAP_K = np.array([0.25, np.nan, 0.75])
CURVE = RocCurve(THREE_K, THREE_K, THREE_K, THREE_K - 0.1, THREE_K + 0.1)
SERIES = [Series(name="ours", value_K=GAP_K, low_K=GAP_K - 0.1, high_K=GAP_K + 0.1)]
LINES: dict[str, tuple[list[float], list[float]]] = {
    "first of two": ([1.0, 10.0], [0.25, 0.75]),
    "second of two": ([1.0], [np.nan]),
}
POINTS = {"both": np.zeros((2, 2)), "none": np.zeros((0, 2))}
COLORS = dict.fromkeys(POINTS, plots.GREY)
LABELLED = {"near": (1.0, 0.25), "far": (10.0, 0.75)}
"""More than a factor of five apart: the axis is logarithmic."""
CASES: dict[Callable[..., Plot], tuple[Callable[[], Plot], tuple[str, ...]]] = {
    plots.roc_plot: (lambda: plots.roc_plot("n", CURVE), ("false positive rate",)),
    plots.roc_overlay: (
        lambda: plots.roc_overlay("n", {"Edema": CURVE, "Mass": CURVE}),
        ("Edema", "Mass"),
    ),
    plots.score_plot: (
        lambda: plots.score_plot("n", THREE_K, np.array([0.0, 1.0, np.nan]), 0.5),
        ("positive (1)", "negative (1)", "threshold"),
    ),
    plots.interval_plot: (
        lambda: plots.interval_plot("n", ["a", "b", "c"], SERIES, SERIES, axis="share", line=0.0),
        ("a", "b", "c", "share", "ours"),
    ),
    plots.interval_lines: (
        lambda: plots.interval_lines("n", THREE_K, SERIES * 2, x="share", y="score"),
        ("0.5", "share", "score", "ours"),
    ),
    plots.calibration_plot: (
        lambda: plots.calibration_plot("n", CalibrationBins(*[THREE_K] * 5)),
        ("mean probability",),
    ),
    plots.matrix_plot: (
        lambda: plots.matrix_plot("n", np.eye(3), "text", "image"),
        ("text", "image"),
    ),
    plots.points_plot: (
        lambda: plots.points_plot("n", POINTS, COLORS, ["first", "second"]),
        ("both (2)", "none (0)", "first", "second"),
    ),
    plots.line_plot: (
        lambda: plots.line_plot("n", LINES, "steps", "loss", log_x=True),
        ("first of two", "second of two", "steps", "loss", "10"),
    ),
    plots.labelled_points: (
        lambda: plots.labelled_points("n", LABELLED, "hours", "score"),
        ("near", "far", "hours", "score"),
    ),
}
"""Plot -> a call of it, and texts of its file."""


@pytest.mark.parametrize("function", CASES, ids=lambda function: function.__name__)
def test_a_plot_is_drawn_into_both_files(function: Callable[..., Plot]) -> None:
    make, texts = CASES[function]
    plot = make()
    assert plot.svg.startswith(b"<?xml")
    assert plot.pdf.startswith(b"%PDF")
    for text in texts:
        assert f">{text}</text>".encode() in plot.svg, text


def test_every_plot_has_a_case() -> None:
    functions = [
        function
        for name, function in inspect.getmembers(plots, inspect.isfunction)
        if not name.startswith("_") and inspect.signature(function).return_annotation is Plot
    ]
    assert set(functions) == set(CASES)


def test_text_stays_text_and_a_pdf_has_its_fonts() -> None:
    """As TrueType: journals refuse Type 3. The other tests leave the fonts out
    (tests/matplotlibrc).
    """
    with matplotlib.rc_context({"pdf.use14corefonts": False}):
        plot = plots.interval_plot("name", ["first row", "", ""], SERIES, axis="share")
    assert b">first row</text>" in plot.svg
    assert b"/FontFile2" in plot.pdf
    assert b"/Type3" not in plot.pdf
