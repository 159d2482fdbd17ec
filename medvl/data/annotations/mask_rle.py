"""Run-length encoded masks in the format of the SIIM-ACR release.

The text is a list of pairs "gap length gap length ...": pixels outside and then inside the mask, column by column from
the top left corner; each gap is counted from the end of the previous run. "-1" is an empty mask.
"""

import numpy as np
from numpy.typing import NDArray

from medvl.errors import CorpusError

EMPTY = "-1"


def decode_runs(runs: str, height: int, width: int) -> NDArray[np.bool_]:
    """Return the mask (height, width). Raises CorpusError when the text is malformed or exceeds the mask."""
    if runs.strip() == EMPTY:
        return np.zeros((height, width), np.bool_)
    try:
        steps = np.array(runs.split(), dtype=np.int64)
    except (ValueError, OverflowError):
        raise CorpusError("expected integers for the runs of a mask", "malformed", field="masks") from None
    if not len(steps) or len(steps) % 2 or (steps < 0).any() or (steps[1::2] == 0).any():
        raise CorpusError("expected pairs of a gap and a length for the runs of a mask", "malformed", field="masks")
    # Check the sum before allocating anything of that size; the first test also catches a sum that overflows.
    if (steps > height * width).any() or steps.sum() > height * width:
        raise CorpusError(f"the runs of a mask exceed its {height} x {width} pixels", "out_of_range", field="masks")
    inside = np.repeat(np.arange(len(steps)) % 2 == 1, steps)
    column_major = np.zeros(height * width, np.bool_)
    column_major[: len(inside)] = inside
    return column_major.reshape(width, height).T


def encode_runs(mask_HW: NDArray[np.bool_]) -> str:
    """Return the run-length text of a mask, as `decode_runs` reads it."""
    column_major = np.concatenate([[False], mask_HW.T.ravel().astype(np.bool_), [False]])
    edges = np.flatnonzero(column_major[1:] != column_major[:-1])
    if not len(edges):
        return EMPTY
    return " ".join(map(str, np.diff(edges, prepend=0).tolist()))
