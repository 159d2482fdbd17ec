"""Generated images beside training images: the search for copies of training images, and the use of
generated images as training data.

Copies: each image is compared with all training images, not only with the image of its own prompt:
a copy of another patient's image is a copy too. Real test images, of other patients, are the
reference: they are not copies, so that a generated image that is nearer to a training image than
99 % of them is suspicious, and more than 1 % of such images are too many.

Use: classifiers are trained on real images, on synthetic ones, and on both.

Shape letters: Q queries, K neighbours, N training images, D dim; of the classifiers, N images, L
labels, S runs, K rows, R resamples.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from medvl.data.loading.sources import label_fraction
from medvl.errors import EvaluationError, SplitError
from medvl.eval.classification.scored_images import LabelPolicy
from medvl.eval.core.metric_rows import (
    MetricGroup,
    MetricRow,
    mean_metrics,
    means_over,
    median_metric,
    ranking_metrics,
)
from medvl.eval.core.metrics import Array
from medvl.eval.core.results import format_value
from medvl.eval.generation.distances import NearestImages
from medvl.eval.generation.findings import Resampling, findings_of, labels_of, renamed
from medvl.eval.generation.inputs import ImageSet, LoaderOptions
from medvl.eval.probing.features import FeatureTable, Standardizer
from medvl.eval.probing.protocol import choose_probe, suffix

QUANTILE = 0.01
"""Share of the real test images that are as near to a training image as those that count as too
near.
"""
NEIGHBOURS = 10
PIXEL_SIZE = 64
SPACES = ("pixels", "pixels, relative", "features", "features, relative")
"""Distances: L2 of pixels in [-1, 1] and of standardised features; relative ones are divided by the
mean distance of the 2nd to 10th nearest training images, so that a blurred image, which is near to
many, is not taken for a copy.
"""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Nearest:
    """The nearest training image of each image of a set."""

    distance: Mapping[str, Array]
    """Distance (N,) by space; NaN where pixels cannot be read."""
    position: Mapping[str, NDArray[np.int64]]
    """Position (N,) of the nearest training image in pixels and in features."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Memorisation:
    """Nearest training images of the test images and of each generated set, and the limits from
    the former.
    """

    real: Nearest
    sets: Mapping[str, Nearest]
    limit: Mapping[str, float]
    """Distance below which an image counts as too near, by space."""

    def too_near(self, name: str) -> Mapping[str, NDArray[np.bool_]]:
        """Return for each space which images of a set are nearer than 99 % of the real test
        images.
        """
        return {
            space: self.sets[name].distance[space] < limit for space, limit in self.limit.items()
        }


def search_copies(
    sets: Sequence[ImageSet],
    real: ImageSet,
    train_source: Any,
    train_features: FeatureTable,
    options: LoaderOptions,
    *,
    pixel_size: int = PIXEL_SIZE,
) -> Memorisation:
    """Find the nearest of all training images for generated and real test images.

    Memory holds the pixels of the queries, one batch of training images, and the features.

    Args:
        sets: generated images.
        real: test images, of other patients than the training images.
        train_source: all training images.
        train_features: features of all training images, of the encoder of `ImageSet.features`.
        options: how images are read.
        pixel_size: side of the squares that are compared.
    """
    queries = [*sets, real]
    standardize = Standardizer.fit(train_features.x_ND)
    in_features = NearestImages(
        torch.cat([standardize(each.features.x_ND) for each in queries]).float(), NEIGHBOURS
    )
    for part_ND in train_features.x_ND.split(8192):
        in_features.add(standardize(part_ND).float())
    in_pixels = NearestImages(
        torch.cat([_pixels(each, options, pixel_size) for each in queries]), NEIGHBOURS
    )
    batches = options.pixels(train_source, pixel_size)
    for batch_BD in batches:
        in_pixels.add(batch_BD)
    if in_pixels.distance_QK.shape[1] < NEIGHBOURS:
        message = (
            f"expected {NEIGHBOURS} or more training images, got {len(train_features.positions)}"
        )
        raise EvaluationError(message, "empty", field="train")
    places = {"pixels": np.array(batches.positions), "features": np.array(train_features.positions)}
    ends = np.cumsum([0, *(len(each.prompts) for each in queries)])
    nearest = [
        _nearest({"pixels": in_pixels, "features": in_features}, places, slice(start, end))
        for start, end in itertools.pairwise(ends.tolist())
    ]
    limit = {space: float(np.quantile(nearest[-1].distance[space], QUANTILE)) for space in SPACES}
    names = [each.name for each in sets]
    return Memorisation(
        real=nearest[-1], sets=dict(zip(names, nearest[:-1], strict=True)), limit=limit
    )


def memorisation_rows(
    images: ImageSet, memorisation: Memorisation, resampling: Resampling
) -> tuple[MetricRow, ...]:
    """Return the share of generated images that are too near to a training image, and the median
    distances.

    "too_near" is 0.01 for real test images by definition; "nearer_than_all" is the share that is
    nearer than every real test image.
    """
    nearest = memorisation.sets[images.name]
    near = memorisation.too_near(images.name)
    least = [nearest.distance[space] < memorisation.real.distance[space].min() for space in SPACES]
    groups: list[MetricGroup] = [
        too_near_metrics(np.stack([near[space] for space in SPACES], axis=1), images.name),
        mean_metrics(
            "nearer_than_all",
            np.stack(least, axis=1).astype(np.float64),
            SPACES,
            subgroup=images.name,
        ),
        *(distance_median(nearest.distance[space], space, images.name) for space in SPACES),
    ]
    return resampling.measure(groups, images.patients)


def too_near_metrics(near_NK: NDArray[np.bool_], name: str) -> MetricGroup:
    """Return the share of the images of a set that are too near to a training image, by space
    (`SPACES`).
    """
    return mean_metrics("too_near", near_NK.astype(np.float64), SPACES, subgroup=name)


def describe_copies(rows: Sequence[MetricRow]) -> list[str]:
    """Return a sentence on each set with a larger share of images near to a training image than
    real test images.

    The lower end of the interval of the share is above the 1 % of real images. Where this holds for
    no relative distance, the sentence names the other cause: blurred images are near to many
    training images.
    """
    rows_of: dict[str, list[MetricRow]] = {}
    for row in rows:
        if row.metric == "too_near" and row.low > QUANTILE:
            rows_of.setdefault(row.subgroup, []).append(row)
    sentences = []
    for name, near in rows_of.items():
        sure = any(row.target.endswith("relative") for row in near)
        shares = ", ".join(f"{row.target} {format_value(row)}" for row in near)
        doubt = (
            ", but not by relative distances: blurred images, or copies of images that "
            "occur several times"
        )
        sentences.append(
            f"{'Memorisation' if sure else 'Near to training images'}, {name}: {shares}, where "
            f"real images have {QUANTILE}{'' if sure else doubt}."
        )
    return sentences


def real_distance_rows(
    real: ImageSet, memorisation: Memorisation, resampling: Resampling
) -> tuple[MetricRow, ...]:
    """Return the median distances of the real test images."""
    return resampling.measure(
        [distance_median(memorisation.real.distance[space], space, "real") for space in SPACES],
        real.patients,
    )


def distance_median(distance_N: Array, space: str, name: str) -> MetricGroup:
    """Return the median distance to the nearest training image."""
    return renamed(median_metric("nearest_distance", distance_N, space), "nearest_distance", name)


def _pixels(images: ImageSet, options: LoaderOptions, size: int) -> Tensor:
    batches = options.pixels(images.source, size)
    vectors_ND = batches.stacked()
    place = {position: row for row, position in enumerate(batches.positions)}
    missing = [position for position in images.scored.positions if position not in place]
    if missing:
        raise EvaluationError(
            f"{len(missing)} images of {images.name} could not be read again", "unreadable"
        )
    return vectors_ND[[place[position] for position in images.scored.positions]]


def _nearest(
    spaces: Mapping[str, NearestImages], places: Mapping[str, NDArray[np.int64]], rows: slice
) -> Nearest:
    distance = {}
    position = {}
    for name, search in spaces.items():
        distance_QK = search.distance_QK[rows]
        distance[name] = distance_QK[:, 0]
        others_Q = distance_QK[:, 1:].mean(axis=1)
        distance[f"{name}, relative"] = np.divide(
            distance_QK[:, 0], others_Q, out=np.ones(len(distance_QK)), where=others_Q > 0
        )
        position[name] = places[name][search.position_QK[rows, 0]]
    return Nearest(distance=distance, position=position)


REAL = "real"
BOTH = "real and synthetic"
SYNTHETIC = "synthetic"
GAIN = "both minus real"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class UseOptions:
    """Fractions of the real training patients, and runs per fraction below 1."""

    fractions: tuple[float, ...] = (0.01, 0.1, 1.0)
    seeds: int = 5

    def __post_init__(self) -> None:
        if (
            not self.fractions
            or self.seeds < 1
            or not all(0 < fraction <= 1 for fraction in self.fractions)
        ):
            message = (
                f"expected fractions in (0, 1] and seeds of 1 or more, got "
                f"{self.fractions} and {self.seeds}"
            )
            raise EvaluationError(
                message, "out_of_range", field="seeds" if self.seeds < 1 else "fractions"
            )


def use_rows(
    train: FeatureTable,
    synthetic: FeatureTable,
    valid: FeatureTable,
    test: FeatureTable,
    policy: LabelPolicy,
    options: UseOptions,
    resampling: Resampling,
) -> tuple[MetricRow, ...]:
    """Return the AUROC on real test images of linear probes on real, on synthetic, and on both.

    Features are standardised by the real training images. The penalty is chosen on the real
    validation images. Real patients are drawn as in the linear probe, nested by seed; all synthetic
    images are used with each. "use_auroc@1%" is the mean over runs, "use_auroc_sd@1%" their
    standard deviation, and "both minus real" the difference of the runs of equal patients, with an
    interval over test patients.

    Raises SplitError if a prompt of the synthetic images is the text of a test or validation
    patient.
    """
    for table, name in ((test, "test"), (valid, "validation")):
        shared = set(synthetic.patients) & set(table.patients)
        if shared:
            message = (
                f"{len(shared)} {name} patients have a prompt of the synthetic training "
                f"images; generate them from"
            )
            raise SplitError(f"{message} training texts", "leak", field="synthetic_train")
    names = findings_of(train, policy)
    standardize = Standardizer.fit(train.x_ND)
    x = {}
    y = {}
    for key, table in {
        "train": train,
        "synthetic": synthetic,
        "valid": valid,
        "test": test,
    }.items():
        x[key], y[key] = standardize(table.x_ND), labels_of(table, names, policy)

    def scores(x_ND: Tensor, y_NL: Array) -> Array:
        choice = choose_probe(x_ND, y_NL, x["valid"], y["valid"])
        return choice.probe.probability_NL(x["test"])

    groups = []
    for fraction in options.fractions:
        real = []
        both = []
        for seed in range(options.seeds if fraction < 1 else 1):
            drawn = label_fraction(train.patients, fraction, seed)
            real.append(scores(x["train"][drawn], y["train"][drawn]))
            joined = torch.cat([x["train"][drawn], x["synthetic"]])
            both.append(scores(joined, np.concatenate([y["train"][drawn], y["synthetic"]])))
        groups.append(_over_runs(real, both, names, y["test"], suffix(fraction)))
    alone = scores(x["synthetic"], y["synthetic"])
    only = ranking_metrics("auroc", alone, y["test"], names, means=means_over(names, y["test"]))
    rows = [
        dataclasses.replace(row, metric="use_auroc@0%", subgroup=SYNTHETIC) for row in only.rows
    ]
    return resampling.measure([*groups, MetricGroup(rows, only.statistic)], test.patients)


def _over_runs(
    real: Sequence[Array],
    both: Sequence[Array],
    names: Sequence[str],
    labels_NL: Array,
    ending: str,
) -> MetricGroup:
    means = means_over(names, labels_NL)
    parts = [
        [ranking_metrics("auroc", each, labels_NL, names, means=means) for each in runs]
        for runs in (real, both)
    ]
    plain = parts[0][0].rows
    kinds = [("use_auroc", REAL), ("use_auroc", BOTH), ("use_auroc_gain", GAIN)]
    if len(real) > 1:
        kinds += [("use_auroc_sd", REAL), ("use_auroc_sd", BOTH)]
    rows = [
        dataclasses.replace(row, metric=f"{metric}{ending}", subgroup=subgroup)
        for metric, subgroup in kinds
        for row in plain
    ]

    def statistic(counts_NR: Array) -> Array:
        real_SRK, both_SRK = (
            np.stack([part.statistic(counts_NR) for part in runs]) for runs in parts
        )
        values = [real_SRK.mean(axis=0), both_SRK.mean(axis=0), (both_SRK - real_SRK).mean(axis=0)]
        if len(real) > 1:
            values += [real_SRK.std(axis=0, ddof=1), both_SRK.std(axis=0, ddof=1)]
        return np.concatenate(values, axis=1)

    return MetricGroup(rows, statistic)
