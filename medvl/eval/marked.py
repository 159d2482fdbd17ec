"""What the evaluations of boxes and of masks share: which images are judged, and how rows of labels get a mean."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from medvl.data.marks import Kind, is_marked
from medvl.errors import EvaluationError
from medvl.eval.metrics import Array
from medvl.eval.predict import check_coverage
from medvl.eval.protocols import Loader
from medvl.eval.results import checkpoint_sha256
from medvl.eval.rows import Block
from medvl.eval.scored import places
from medvl.eval.stats import mean_over_labels
from medvl.models.dense_config import DenseConfig
from medvl.schema import Sample
from medvl.train.validate import HasModules, evaluating

Judged = TypeVar("Judged")


class Dense(HasModules, Protocol):
    """A model that `medvl.models.dense` is the base of."""

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
    place_of = places(loader.source)
    skipped_before = Counter(loader.skipped)
    keys: list[str] = []
    judged: list[Judged] = []
    with evaluating(model):
        for batch in loader:
            keys += batch.keys
            rows = [row for row, key in enumerate(batch.keys) if is_marked(place_of[key][1], kind)]
            if not rows:
                continue
            found = [place_of[batch.keys[row]] for row in rows]
            images = [MarkedImage(position=position, sample=sample) for position, sample in found]
            judged += judge(batch.image_BCHW[rows].to(model.device, non_blocking=True), images)
    unreadable = Counter(loader.skipped) - skipped_before
    check_coverage(keys, unreadable.total(), len(loader.source))
    if not judged:
        raise EvaluationError(f"no sample has {kind}, not even an empty list of them: nothing can be judged")
    account = {"images": len(judged), "nobody_looked": len(keys) - len(judged), "unreadable": dict(unreadable)}
    return judged, account


def with_macro(block: Block) -> Block:
    """The block, whose rows are one metric's labels, with their mean behind them where there are several."""
    if len(block.rows) < 2:
        return block

    def statistic(counts_NR: Array) -> Array:
        values_RL = block.statistic(counts_NR)
        return np.concatenate([values_RL, mean_over_labels(values_RL)[:, None]], axis=1)

    return Block([*block.rows, dataclasses.replace(block.rows[0], target="macro", n_positive=None)], statistic)


def input_hashes(checkpoint: str | Path | None, loader: Loader, valid_loader: Loader | None) -> dict[str, str | None]:
    """What went into an evaluation, for `Results.inputs`."""
    return {
        "checkpoint": None if checkpoint is None else checkpoint_sha256(checkpoint),
        "manifest": loader.source.fingerprint,
        "validation_manifest": None if valid_loader is None else valid_loader.source.fingerprint,
    }


def headline_target(labels: Sequence[str]) -> str:
    """The target to look at first: the only label, or the mean of several."""
    return labels[0] if len(labels) == 1 else "macro"
