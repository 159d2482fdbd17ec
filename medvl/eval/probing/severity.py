"""Ordinal AUCs of severity: a graded finding as one label for each step of its scale.

Of the levels none, mild, moderate and severe these are "severity >= mild", "severity >= moderate" and "severity >=
severe", as in the evaluation of pulmonary edema by Liao et al. (MICCAI 2021, arXiv 2103.04537): 0 against 1, 2 and 3; 0
and 1 against 2 and 3; 0, 1 and 2 against 3. Their mean is the row "macro".
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from medvl.errors import EvaluationError
from medvl.eval.probing.features import FeatureTable


def parse_levels(text: str) -> tuple[str, tuple[str, ...]]:
    """Return the column and the levels of "COLUMN=LEVEL,LEVEL,...", lowest first.

    Raises EvaluationError where there are fewer than two levels, or one twice.
    """
    column, _, listed = text.partition("=")
    levels = tuple(level.strip() for level in listed.split(","))
    if not column or len(levels) < 2 or len(set(levels)) < len(levels) or not all(levels):
        message = f"expected COLUMN=LEVEL,LEVEL,... with two levels or more, lowest first, got {text!r}"
        raise EvaluationError(message, "malformed", field="levels")
    return column, levels


def ordinal_table(table: FeatureTable, column: str, levels: Sequence[str]) -> FeatureTable:
    """Return a table whose labels are the steps of a scale, "COLUMN >= LEVEL" for every level but the lowest.

    Args:
        table: features with a label `COLUMN=LEVEL` for each level (`medvl shards table --category-column`).
        column: name of the column.
        levels: its values, lowest first. Images that have none of them, or several, are left out.

    Raises EvaluationError where a level is not a label of the table, or no image is left.
    """
    names = [f"{column}={level}" for level in levels]
    known = [name for name in table.label_names if name.startswith(f"{column}=")]
    missing = [name for name in names if name not in known]
    if missing:
        message = f"expected the labels {', '.join(names)} in the shards, got {', '.join(known) or 'none of them'}"
        raise EvaluationError(f"{message}; name the levels as in the table", "unknown_name", field="levels")
    is_level_NV = table.labels_NL[:, [table.label_names.index(name) for name in names]] == 1
    graded_M = np.flatnonzero(is_level_NV.sum(axis=1) == 1)
    if not len(graded_M):
        raise EvaluationError(f"no image has one of the labels {', '.join(names)}", "empty", field="levels")
    labels_ML = is_level_NV[graded_M].argmax(axis=1)[:, None] >= np.arange(1, len(levels))
    return dataclasses.replace(
        table,
        x_ND=table.x_ND[torch.from_numpy(graded_M)],
        labels_NL=labels_ML.astype(table.labels_NL.dtype),
        label_names=tuple(f"{column} >= {level}" for level in levels[1:]),
        samples=tuple(table.samples[row] for row in graded_M),
        positions=tuple(table.positions[row] for row in graded_M),
    )
