"""Values of a run's metrics on bootstrap resamples, the same for all runs, so that their differences are paired.

Shape letters: N items, R resamples, K rows.
"""

import dataclasses
import hashlib
import json
import zipfile
from pathlib import Path

import numpy as np

from medvl.common.files import new_file
from medvl.errors import EvaluationError
from medvl.eval import read_results
from medvl.eval.compare.predictions import read_items
from medvl.eval.core.bootstrap import count_units, resample_counts
from medvl.eval.core.metrics import Array

FILE = "resamples.npz"


@dataclasses.dataclass(frozen=True)
class Resampled:
    """Metrics of a run on resamples of its items."""

    items: str
    """Hash of the items, their groups and their references: runs with the same one are paired."""
    values_R: Array


def write_resamples(folder: Path, resamples: int) -> None:
    """Write the resampled metrics of an evaluation of two or more groups, where its predictions determine them."""
    results = read_results(folder)
    items = read_items(folder, results)
    if items is None or not resamples or count_units(len(items.names), items.groups) < 2:
        return
    whole = dataclasses.replace(items, metric_groups=items.without_subgroups)
    values = [whole.statistic(counts_NR) for counts_NR in resample_counts(len(items.names), resamples, 0, items.groups)]
    identity = [items.names, items.groups, *([items.references] if items.references else [])]
    content = json.dumps(identity, default=str).encode()
    with new_file(folder / FILE) as file:
        np.savez_compressed(
            file,
            names=np.array(whole.rows),
            values_RK=np.concatenate(values).astype(np.float32),
            items=np.array(hashlib.sha256(content).hexdigest()),
        )


def read_resamples(folder: Path, name: str) -> Resampled | None:
    """Return the resampled values of a row, such as "auroc/macro"; None where the evaluation has none.

    Raises EvaluationError where the file is damaged.
    """
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            names = stored["names"].tolist()
            if name not in names:
                return None
            values_R = stored["values_RK"][:, names.index(name)].astype(np.float64)
            return Resampled(items=str(stored["items"]), values_R=values_R)
    except (ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        message = f"{path} is damaged ({error}); remove {folder}, and the same command evaluates again"
        raise EvaluationError(message, "malformed", field="out") from None
