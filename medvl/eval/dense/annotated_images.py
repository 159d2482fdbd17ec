"""Shared parts of the detection and segmentation evaluations: pass over annotated images, and
mean over labels.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from medvl.data.loading.dense_targets import Kind, is_annotated
from medvl.errors import EvaluationError
from medvl.eval.core.full_pass import FullPass, Loader, samples_by_key
from medvl.eval.core.metric_rows import MetricGroup
from medvl.eval.core.metrics import Array, defined_labels, mean_over_labels
from medvl.models.base import HasModules, evaluating
from medvl.schema import Batch, Sample

EvaluatedImage = TypeVar("EvaluatedImage")


class LabelledConfig(Protocol):
    """Settings of a model with labels."""

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels, in the order of the model's outputs."""


class DenseModel(HasModules, Protocol):
    """A detector or segmenter."""

    @property
    def config(self) -> LabelledConfig:
        """Configuration; its labels are evaluated."""

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AnnotatedImage:
    """An image that was annotated with boxes or masks, possibly without any."""

    position: int
    """Index in the loader's source."""
    sample: Sample


def evaluate_images(
    model: DenseModel,
    loader: Loader,
    kind: Kind,
    evaluate: Callable[[Batch, Sequence[AnnotatedImage]], Iterator[EvaluatedImage]],
) -> tuple[list[EvaluatedImage], dict[str, Any]]:
    """Evaluate every annotated image of a loader once, in eval mode; also return the counts for
    `Results.details`.

    Args:
        model: a detector or a segmenter.
        loader: loader opened for evaluation.
        kind: the annotation that is needed; images without it are left out and counted.
        evaluate: function from a batch of annotated images and these images to one result per
            image.

    Raises EvaluationError if there is no annotated image, or the loader does not give every sample
    once.
    """
    samples = samples_by_key(loader.source)
    batches = FullPass(loader)
    results: list[EvaluatedImage] = []
    with evaluating(model):
        for batch in batches:
            rows = [
                row for row, key in enumerate(batch.keys) if is_annotated(samples[key][1], kind)
            ]
            if not rows:
                continue
            images = [
                AnnotatedImage(position=position, sample=sample)
                for position, sample in (samples[batch.keys[row]] for row in rows)
            ]
            results += evaluate(batch.rows(rows).to(model.device, non_blocking=True), images)
    if not results:
        raise EvaluationError(
            f"no sample has {kind}, not even an empty list of them: use annotated shards", "empty"
        )
    counts = {
        "images": len(results),
        "not_annotated": len(batches.keys) - len(results),
        "unreadable": batches.unreadable,
    }
    return results, counts


def with_macro(group: MetricGroup, n: int) -> MetricGroup:
    """Append the mean over labels to a group of `n` items whose rows are one metric's labels, if
    there are several.
    """
    if len(group.rows) < 2:
        return group
    fixed_L = defined_labels(group.statistic, n)

    def statistic(counts_NR: Array) -> Array:
        values_RL = group.statistic(counts_NR)
        return np.concatenate([values_RL, mean_over_labels(values_RL, fixed_L)[:, None]], axis=1)

    return MetricGroup(
        [*group.rows, dataclasses.replace(group.rows[0], target="macro", n_positive=None)],
        statistic,
    )


def headline_target(labels: Sequence[str]) -> str:
    """Return the target of the headline numbers: the only label, or the mean over several."""
    return labels[0] if len(labels) == 1 else "macro"
