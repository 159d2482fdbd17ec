"""Run-length encoded masks, as the SIIM-ACR release writes them.

A text of pairs "gap length gap length ...": so many pixels outside, then so many inside, down the columns from the
upper left corner, each gap counted from the end of the run before. "-1" is a mask without a pixel.
"""

import numpy as np
from numpy.typing import NDArray

from medvl.errors import CorpusError

EMPTY = "-1"


def decode_runs(runs: str, height: int, width: int) -> NDArray[np.bool_]:
    """The mask (height, width) of a text of runs. Raises CorpusError when it is no such text, or leaves the mask."""
    if runs.strip() == EMPTY:
        return np.zeros((height, width), np.bool_)
    try:
        steps = np.array(runs.split(), dtype=np.int64)
    except (ValueError, OverflowError):
        raise CorpusError("the runs of a mask are not whole numbers") from None
    if not len(steps) or len(steps) % 2 or (steps < 0).any() or (steps[1::2] == 0).any():
        raise CorpusError("the runs of a mask are not pairs of a gap and a length")
    # A sum that does not fit the mask is refused before anything of that size is made; so is one that wraps around.
    if (steps > height * width).any() or steps.sum() > height * width:
        raise CorpusError(f"the runs of a mask leave its {height} x {width} pixels")
    inside = np.repeat(np.arange(len(steps)) % 2 == 1, steps)
    column_major = np.zeros(height * width, np.bool_)
    column_major[: len(inside)] = inside
    return column_major.reshape(width, height).T


def encode_runs(mask_HW: NDArray[np.bool_]) -> str:
    """The text of runs of a mask: what `decode_runs` reads."""
    column_major = np.concatenate([[False], mask_HW.T.ravel().astype(np.bool_), [False]])
    edges = np.flatnonzero(column_major[1:] != column_major[:-1])
    if not len(edges):
        return EMPTY
    return " ".join(map(str, np.diff(edges, prepend=0).tolist()))
