"""Validation during training: losses over the validation batches, and evaluators."""

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from medvl.common.seeding import derive, reseed
from medvl.errors import CheckpointError, ConfigError, TrainingError
from medvl.schema import Batch
from medvl.train.config import TrainConfig
from medvl.train.fault_tolerance import checkpoint
from medvl.train.fault_tolerance.checkpoint import Checkpoints
from medvl.train.loop.logger import RunLogger
from medvl.train.loop.state import TrainState
from medvl.train.loop.step import StepResult
from medvl.train.optim.optimizer import Precision
from medvl.train.parallel.distributed import RankInfo

Evaluator = Callable[[Any], Mapping[str, float]]
"""Function from a model in eval mode to metrics by name. Called on rank 0 only, while the other
ranks wait.
"""


def validation_loss(
    model: nn.Module,
    batches: Iterable[Batch],
    ranks: RankInfo,
    precision: Precision,
    seed: int,
    place: Callable[[Batch], Batch],
) -> dict[str, float]:
    """Return the losses over all batches as `loss` and `loss/<term>`: means weighted by the sizes
    of the batches.

    `batches` are this rank's: numbers r, r + W, r + 2 W, ... of all for rank r of W. A contrastive
    loss takes its negatives from one batch. Random numbers (masking) are seeded by the number of
    the batch and sums are exactly rounded, so the result is the same for any number of ranks.

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
    parts = ranks.exchange(
        {"names": names, "sizes": sizes, "values": values, "first": first_keys[:1]}
    )
    firsts = [key for part in parts for key in part["first"]]
    if len(set(firsts)) != len(firsts):
        raise TrainingError(
            "ranks have the same validation batches; open the loader with rank and world",
            "mismatch",
        )
    total = sum(size for part in parts for size in part["sizes"])
    if not total:
        raise TrainingError(
            "the valid loader yields no batch; leave it out, or give it data", "empty"
        )
    sums = [
        (size, row)
        for part in parts
        for size, row in zip(part["sizes"], part["values"], strict=True)
    ]
    names = next(part["names"] for part in parts if part["names"])
    return {
        name: _exact_sum(size * row[i] for size, row in sums) / total
        for i, name in enumerate(names)
    }


def run_evaluators(model: nn.Module, evaluators: Sequence[Evaluator]) -> dict[str, float]:
    """Return the metrics of all evaluators. Raises ConfigError where two return the same name."""
    results: dict[str, float] = {}
    for evaluator in evaluators:
        for name, value in evaluator(model).items():
            if name in results:
                raise ConfigError(
                    f"two evaluators return a metric {name!r}; rename one",
                    "conflict",
                    field="evals",
                )
            results[name] = float(value)
    return results


def _exact_sum(values: Iterable[float]) -> float:
    """Return the sum, rounded once so that order does not matter; NaN where a value is not
    finite.
    """
    terms = list(values)
    return math.fsum(terms) if all(map(math.isfinite, terms)) else math.nan


# Policy for skipped updates: count and log them, stop at the budget, roll back after four in a
# row.

_log = logging.getLogger(__name__)

STREAK = 4
"""Skipped updates in a row that trigger a rollback."""
_SHOWN_KEYS = 8


class RollbackPolicy:
    """Handling of skipped updates. Calls are collective."""

    def __init__(
        self, state: TrainState, config: TrainConfig, logger: RunLogger, checkpoints: Checkpoints
    ) -> None:
        self._state = state
        self._config = config
        self._logger = logger
        self._checkpoints = checkpoints

    def __call__(self, result: StepResult, step: int) -> bool:
        """Count the skipped update number `step`; return whether the weights were rolled back.

        Raises TrainingError where the budget is exceeded.
        """
        state = self._state
        budget = self._config.nonfinite_budget
        state.skipped += 1
        state.streak += 1
        samples = self._log_samples(result, step)
        if state.skipped > budget:
            message = (
                f"{state.skipped} updates were skipped, nonfinite_budget is {budget}; the last "
                f"was step {step + 1} "
                f"with the samples {samples}. Check them (all in metrics.jsonl), lower optim.lr "
                f"or set optim.clip_norm"
            )
            raise TrainingError(message, "nonfinite", field="nonfinite_budget")
        return (
            state.streak == STREAK
            and state.rollbacks < self._config.rollbacks
            and self._roll_back()
        )

    def _log_samples(self, result: StepResult, step: int) -> str:
        """Log the samples that caused the skip, or all candidates; return the first ones as a
        text.
        """
        all_keys = [key for keys in result.keys for key in keys]
        suspects, candidates = zip(
            *self._state.ranks.exchange([result.nonfinite_keys(), all_keys]), strict=True
        )
        keys = sorted(key for rank in (suspects if any(suspects) else candidates) for key in rank)
        self._logger.record(
            "skip", step + 1, {"reason": "spike" if result.spike else "not finite", "keys": keys}
        )
        more = f" and {len(keys) - _SHOWN_KEYS} more" if len(keys) > _SHOWN_KEYS else ""
        samples = ", ".join(keys[:_SHOWN_KEYS]) + more
        reason = "loss spike" if result.spike else "non-finite loss or gradient"
        _log.warning("step %d: %s, update skipped; samples: %s", step + 1, reason, samples)
        return samples

    def _roll_back(self) -> bool:
        """Restore the weights of the newest valid checkpoint from before the streak; return
        False without one.
        """
        state = self._state
        path = state.ranks.on_main(self._earlier_checkpoint)
        if path is None:
            return False
        state.restore_weights(checkpoint.read(Path(path)))
        state.streak = 0
        state.rollbacks += 1
        _log.warning(
            "%d updates skipped in a row: weights rolled back to %s, data continue (rollback %d "
            "of %d)",
            *(STREAK, path, state.rollbacks, self._config.rollbacks),
        )
        self._logger.record("rollback", state.step, {"checkpoint": Path(path).name})
        return True

    def _earlier_checkpoint(self) -> str | None:
        """Return a valid checkpoint from before the last update that was made; later ones hold
        the current weights.
        """
        for step in self._checkpoints.steps():
            folder = self._checkpoints.at(step)
            if folder is None or step >= self._state.step - STREAK:
                continue
            try:
                checkpoint.verify(folder)
            except CheckpointError as error:
                _log.warning("%s; not used for the rollback", error)
                continue
            return str(folder)
        return None
