"""What a model is worth in the middle of its training: validation loss, and evaluators."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from medvl.common.seeding import derive, reseed
from medvl.errors import ConfigError, TrainingError
from medvl.schema import Batch
from medvl.train.optim.precision import Precision
from medvl.train.parallel.distributed import RankInfo, broadcast

Evaluator = Callable[[Any], Mapping[str, float]]
"""Metrics of a model in eval mode, by name. Called on rank 0 only, while the other ranks wait."""


def share_buffers(model: nn.Module, world: RankInfo) -> None:
    """Rank 0's running statistics become those of all ranks: they are what a checkpoint holds."""
    if world.size > 1:
        broadcast(list(model.buffers()))


def validation_loss(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    world: RankInfo,
    precision: Precision,
    seed: int,
    place: Callable[[Batch], Batch],
) -> dict[str, float]:
    """The losses over all batches, as `loss` and `loss/<term>`: means weighted by the batches' sizes.

    `batches` are this rank's: numbers r, r + W, r + 2 W, ... of the whole for rank r of W. Each counts as it is, a
    contrastive loss taking its negatives from the one batch, and sums are exactly rounded. So the result is the same
    for any number of ranks. Whatever is drawn (masking) is drawn from the batch's number.

    Raises TrainingError where two ranks hold the same batch, or there is none.
    """
    rows: list[Tensor] = []
    sizes: list[int] = []
    names: list[str] = []
    first_keys: list[str] = []
    for position, batch in enumerate(batches):
        reseed(derive(seed, "validation", world.rank + position * world.size), world.device)
        with precision.autocast():
            losses = model(place(batch))
        names = ["loss", *(f"loss/{name}" for name in losses.terms)]
        rows.append(torch.stack([losses.total, *losses.terms.values()]).double())
        sizes.append(len(batch))
        first_keys.append(batch.keys[0])
    values = torch.stack(rows).tolist() if rows else []
    ranks = world.exchange({"names": names, "sizes": sizes, "values": values, "first": first_keys[:1]})
    firsts = [key for rank in ranks for key in rank["first"]]
    if len(set(firsts)) != len(firsts):
        raise TrainingError("the valid loader gives several ranks the same batches: open it with its rank and world")
    total = sum(size for rank in ranks for size in rank["sizes"])
    if not total:
        raise TrainingError("the valid loader gives no batch: leave it out, or give it data")
    weighted = [(size, row) for rank in ranks for size, row in zip(rank["sizes"], rank["values"], strict=True)]
    found = next(rank["names"] for rank in ranks if rank["names"])
    return {name: _exact_sum(size * row[i] for size, row in weighted) / total for i, name in enumerate(found)}


def run_evaluators(model: nn.Module, evaluators: Sequence[Evaluator]) -> dict[str, float]:
    """The metrics of all evaluators. Raises ConfigError where two give the same name."""
    results: dict[str, float] = {}
    for evaluator in evaluators:
        for name, value in evaluator(model).items():
            if name in results:
                raise ConfigError(f"two evaluators give a metric {name!r}: rename one")
            results[name] = float(value)
    return results


def _exact_sum(values: Iterable[float]) -> float:
    """Rounded once, so the order of the values does not matter; NaN where a value is not finite."""
    listed = list(values)
    return math.fsum(listed) if all(map(math.isfinite, listed)) else math.nan
