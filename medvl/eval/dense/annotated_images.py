"""What the evaluations of boxes and of masks share: which images are judged, and how rows of labels get a mean."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from medvl.data.loading.dense_targets import Kind, is_marked
from medvl.errors import EvaluationError
from medvl.eval.core.bootstrap import mean_over_labels
from medvl.eval.core.full_pass import FullPass, samples_by_key
from medvl.eval.core.interfaces import Loader
from medvl.eval.core.metric_rows import MetricGroup
from medvl.eval.core.metrics import Array
from medvl.models.downstream.dense_config import DenseConfig
from medvl.models.eval_mode import HasModules, evaluating
from medvl.schema import Sample

Judged = TypeVar("Judged")


class Dense(HasModules, Protocol):
    """A model that `medvl.models.downstream.dense_base` is the base of."""

    @property
    def config(self) -> DenseConfig:
        """Its labels are what is judged."""

    @property
    def device(self) -> torch.device:
        """Where it computes."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MarkedImage:
    """An image in which somebody looked for boxes or masks."""

    position: int
    """In the loader's source."""
    sample: Sample


def judge_images(
    model: Dense,
    loader: Loader,
    kind: Kind,
    judge: Callable[[Tensor, Sequence[MarkedImage]], Iterator[Judged]],
) -> tuple[list[Judged], dict[str, Any]]:
    """Every marked image of a loader judged once, in eval mode, and the account of it all.

    Args:
        model: a detector or a segmenter.
        loader: for evaluation.
        kind: what somebody must have looked for; images where nobody did are left out and counted.
        judge: given the pixels of marked images and these, what became of each.

    Raises:
        EvaluationError: there is no marked image, or the loader does not give every sample once.
    """
    place_of = samples_by_key(loader.source)
    given = FullPass(loader)
    judged: list[Judged] = []
    with evaluating(model):
        for batch in given:
            rows = [row for row, key in enumerate(batch.keys) if is_marked(place_of[key][1], kind)]
            if not rows:
                continue
            found = [place_of[batch.keys[row]] for row in rows]
            images = [MarkedImage(position=position, sample=sample) for position, sample in found]
            judged += judge(batch.image_BCHW[rows].to(model.device, non_blocking=True), images)
    if not judged:
        raise EvaluationError(f"no sample has {kind}, not even an empty list of them: nothing can be judged")
    nobody_looked = len(given.keys) - len(judged)
    return judged, {"images": len(judged), "nobody_looked": nobody_looked, "unreadable": given.unreadable}


def with_macro(block: MetricGroup) -> MetricGroup:
    """The block, whose rows are one metric's labels, with their mean behind them where there are several."""
    if len(block.rows) < 2:
        return block

    def statistic(counts_NR: Array) -> Array:
        values_RL = block.statistic(counts_NR)
        return np.concatenate([values_RL, mean_over_labels(values_RL)[:, None]], axis=1)

    return MetricGroup([*block.rows, dataclasses.replace(block.rows[0], target="macro", n_positive=None)], statistic)


def headline_target(labels: Sequence[str]) -> str:
    """The target to look at first: the only label, or the mean of several."""
    return labels[0] if len(labels) == 1 else "macro"
