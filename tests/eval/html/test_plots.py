"""Files of plots: what a reader needs to open and to edit them is within."""

import matplotlib
import numpy as np

from medvl.eval.html import plots


def test_text_stays_text_and_a_pdf_has_its_fonts() -> None:
    """As TrueType: journals refuse Type 3. The other tests leave the fonts out
    (tests/matplotlibrc).
    """
    middle_K = np.array([0.5])
    systems = [
        plots.Series(name="ours", value_K=middle_K, low_K=middle_K - 0.1, high_K=middle_K + 0.1)
    ]
    with matplotlib.rc_context({"pdf.use14corefonts": False}):
        plot = plots.interval_plot("name", ["first row"], systems, axis="share")
    assert b">first row</text>" in plot.svg
    assert b"/FontFile2" in plot.pdf
    assert b"/Type3" not in plot.pdf
