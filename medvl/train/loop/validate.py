"""Validation during training: losses over the validation batches, and evaluators."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from medvl.common.seeding import derive, reseed
from medvl.errors import ConfigError, TrainingError
from medvl.schema import Batch
from medvl.train.optim.precision import Precision
from medvl.train.parallel.distributed import RankInfo

Evaluator = Callable[[Any], Mapping[str, float]]
"""Function from a model in eval mode to metrics by name. Called on rank 0 only, while the other ranks wait."""


def validation_loss(
    model: nn.Module,
    batches: Iterable[Batch],
    ranks: RankInfo,
    precision: Precision,
    seed: int,
    place: Callable[[Batch], Batch],
) -> dict[str, float]:
    """Return the losses over all batches as `loss` and `loss/<term>`: means weighted by the sizes of the batches.

    `batches` are this rank's: numbers r, r + W, r + 2 W, ... of all for rank r of W. A contrastive loss takes its
    negatives from one batch. Random numbers (masking) are seeded by the number of the batch and sums are exactly
    rounded, so the result is the same for any number of ranks.

    Raises TrainingError where two ranks have the same batch, or there is none.
    """
    rows: list[Tensor] = []
    sizes: list[int] = []
    names: list[str] = []
    first_keys: list[str] = []
    for position, batch in enumerate(batches):
        reseed(derive(seed, "validation", ranks.rank + position * ranks.size), ranks.device)
        with precision.autocast():
            losses = model(place(batch))
        names = ["loss", *(f"loss/{name}" for name in losses.terms)]
        rows.append(torch.stack([losses.total, *losses.terms.values()]).double())
        sizes.append(len(batch))
        first_keys.append(batch.keys[0])
    values = torch.stack(rows).tolist() if rows else []
    parts = ranks.exchange({"names": names, "sizes": sizes, "values": values, "first": first_keys[:1]})
    firsts = [key for part in parts for key in part["first"]]
    if len(set(firsts)) != len(firsts):
        raise TrainingError("ranks have the same validation batches; open the loader with rank and world", "mismatch")
    total = sum(size for part in parts for size in part["sizes"])
    if not total:
        raise TrainingError("the valid loader yields no batch; leave it out, or give it data", "empty")
    weighted = [(size, row) for part in parts for size, row in zip(part["sizes"], part["values"], strict=True)]
    names = next(part["names"] for part in parts if part["names"])
    return {name: _exact_sum(size * row[i] for size, row in weighted) / total for i, name in enumerate(names)}


def run_evaluators(model: nn.Module, evaluators: Sequence[Evaluator]) -> dict[str, float]:
    """Return the metrics of all evaluators. Raises ConfigError where two return the same name."""
    results: dict[str, float] = {}
    for evaluator in evaluators:
        for name, value in evaluator(model).items():
            if name in results:
                raise ConfigError(f"two evaluators return a metric {name!r}; rename one", "conflict", field="evals")
            results[name] = float(value)
    return results


def _exact_sum(values: Iterable[float]) -> float:
    """Return the sum, rounded once so that order does not matter; NaN where a value is not finite."""
    listed = list(values)
    return math.fsum(listed) if all(map(math.isfinite, listed)) else math.nan
