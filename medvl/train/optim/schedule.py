"""Learning rate of each step.

The rates are closed forms of the step number, so a resumed run replays nothing; only `Plateau` has state.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal

from medvl.train.config import Constant, Cosine, CosineRestarts, Linear, OptimConfig, Plateau, StepDecay


class LearningRate:
    """Base learning rate over a run. Steps count from 0.

    Args:
        optim: `lr` and `schedule`.
        total_steps: updates of the run.
        mode: whether a smaller or a larger metric is better in `observe`.
        steps_per_epoch: updates of an epoch, for `StepDecay` and `CosineRestarts`.
    """

    def __init__(
        self, optim: OptimConfig, total_steps: int, mode: Literal["min", "max"] = "min", steps_per_epoch: int = 1
    ) -> None:
        self._lr, self._schedule, self._mode = optim.lr, optim.schedule, mode
        self.total_steps, self._steps_per_epoch = total_steps, steps_per_epoch
        self.plateaus = 0
        """Times that `Plateau` has lowered the rate."""
        self.best: float | None = None
        self.bad = 0
        """Validations since the best one, or since the rate was last lowered."""

    @property
    def depends_on_length(self) -> bool:
        """Whether a run of another length has other rates from the start."""
        return isinstance(self._schedule, (Linear, Cosine))

    @property
    def depends_on_metric(self) -> bool:
        """Whether `observe` may lower the rate."""
        return isinstance(self._schedule, Plateau)

    def at(self, step: int) -> float:
        """Return the rate of update number `step`; a decaying rate would reach `min_lr` at number `total_steps`."""
        warmup = self._schedule.warmup_steps
        if step < warmup:
            return self._after_warmup(0.0) * (step + 1) / warmup
        if isinstance(self._schedule, StepDecay):
            return self._lr * self._schedule.factor ** (step // self._steps_per_epoch // self._schedule.epochs)
        if isinstance(self._schedule, CosineRestarts):
            return self._after_warmup(step // self._steps_per_epoch % self._schedule.epochs / self._schedule.epochs)
        return self._after_warmup((step - warmup) / max(self.total_steps - warmup, 1))

    def observe(self, value: float) -> bool:
        """Record the metric of a validation; return whether the rate was lowered. A NaN counts as no improvement.

        The rule is that of torch's ReduceLROnPlateau with a relative threshold.
        """
        if not isinstance(self._schedule, Plateau):
            return False
        if math.isfinite(value) and (self.best is None or self._improves(value, self.best)):
            self.best, self.bad = value, 0
            return False
        self.bad += 1
        if self.bad <= self._schedule.patience:
            return False
        self.plateaus, self.bad = self.plateaus + 1, 0
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return {"plateaus": self.plateaus, "best": self.best, "bad": self.bad}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.plateaus, self.best, self.bad = state["plateaus"], state["best"], state["bad"]

    def _after_warmup(self, progress: float) -> float:
        """Return the rate at a fraction of the way from the end of the warm-up to the end of the run."""
        lr = self._lr
        match self._schedule:
            case Constant() | StepDecay():
                return lr
            case Linear(min_lr=low):
                return low + (lr - low) * (1 - progress)
            case Cosine(min_lr=low) | CosineRestarts(min_lr=low):
                return low + (lr - low) * (1 + math.cos(math.pi * progress)) / 2
            case Plateau(factor=factor, min_lr=low):
                return max(lr * factor**self.plateaus, low)

    def _improves(self, value: float, best: float) -> bool:
        threshold = self._schedule.threshold if isinstance(self._schedule, Plateau) else 0.0
        margin = threshold * abs(best)
        return value < best - margin if self._mode == "min" else value > best + margin
