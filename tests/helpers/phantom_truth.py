"""Comparison of converted shards with the ground truth of the phantom that they were made from."""

from collections import defaultdict
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from medvl.data.annotations import frontal_or_lateral
from medvl.data.images.read import read_pixels
from medvl.data.privacy import MAX_AGE
from medvl.data.shards.format import split_folders
from medvl.data.shards.source import ShardSource
from medvl.phantom import read_truth

_ROUNDING = 4.0
"""Mean difference of grey levels between a stored image and its source, for JPEG and resizing."""


def check_truth(root: Path, out: Path, *, other_meaning: Collection[str] = ()) -> int:
    """Check every sample of `out` against the row of its image in `root`'s ground truth: pixels,
    sex, age, kind of view, and labels that are certain. Return the number of samples with a row.

    `other_meaning` are labels of the corpus that mean another thing than the phantom's of the name.
    """
    truth: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in read_truth(root):
        truth[Path(row["path"]).name].append(row)
    lines = (out.with_name(f"{out.name}-private") / "sources.tsv").read_text().splitlines()
    paths = {key: Path(path) for key, path in (line.split("\t") for line in lines)}
    compared = 0
    for folder in split_folders(out):
        source = ShardSource(folder)
        for place in range(len(source)):
            sample = source.sample(place)
            path = paths[sample.key]
            (row,) = [
                each for each in truth[path.name] if path.as_posix().endswith(each["path"])
            ] or [{}]
            _check_pixels(source.pixels(place), path, sample.extra.get("crop"))
            assert sample.sex in (None, row.get("sex"))
            assert sample.age in (None, min(MAX_AGE, row.get("age", -1)))
            kind = frontal_or_lateral(sample.view)
            assert kind in (None, frontal_or_lateral(row.get("view")))
            known = {
                name: value for name, value in sample.labels.items() if name not in other_meaning
            }
            _check_labels(known, row.get("labels", {}))
            compared += bool(row)
    return compared


def _check_pixels(stored: np.ndarray, path: Path, crop: Any) -> None:
    original, _ = read_pixels(path, color=stored.ndim == 3)
    if crop is not None:
        rows = slice(crop["y"], crop["y"] + crop["height"])
        original = original[rows, crop["x"] : crop["x"] + crop["width"]]
    height, width = stored.shape[:2]
    expected = cv2.resize(original, (width, height), interpolation=cv2.INTER_AREA)
    assert np.abs(stored.astype(float) - expected).mean() < _ROUNDING, path


def _check_labels(labels: Mapping[str, int], truth: Mapping[str, int]) -> None:
    """Compare labels of the phantom's names that are 1 or 0; reports are uncertain of some."""
    shared = {name: value for name, value in labels.items() if name in truth and value >= 0}
    assert shared.items() <= truth.items()
