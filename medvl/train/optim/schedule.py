"""The learning rate of each step.

Closed forms of the step's number, so that nothing has to be replayed to resume; only `Plateau` remembers something.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

from medvl.train.config import Constant, Cosine, Linear, Plateau, Schedule


@dataclasses.dataclass(kw_only=True)
class LearningRate:
    """The base learning rate over a run of `total_steps`. Steps count from 0."""

    schedule: Schedule
    lr: float
    total_steps: int
    mode: Literal["min", "max"] = "min"
    """Of the metric that `observe` is given."""
    plateaus: int = 0
    """Times that `Plateau` has lowered the rate."""
    best: float | None = None
    bad: int = 0
    """Validations since the best one, or since the rate was last lowered."""

    @property
    def needs_total(self) -> bool:
        """Whether a run of another length would have other rates from the start."""
        return isinstance(self.schedule, (Linear, Cosine))

    def at(self, step: int) -> float:
        """The rate of update number `step`; a decaying one would reach `min_lr` at number `total_steps`."""
        warmup = self.schedule.warmup_steps
        if step < warmup:
            return self._after_warmup(0.0) * (step + 1) / warmup
        return self._after_warmup((step - warmup) / max(self.total_steps - warmup, 1))

    def observe(self, value: float) -> bool:
        """Take the metric of a validation into account; True where that lowers the rate. A NaN is no improvement.

        The rule of torch's ReduceLROnPlateau with a relative threshold.
        """
        if not isinstance(self.schedule, Plateau):
            return False
        if math.isfinite(value) and (self.best is None or self._improves(value, self.best)):
            self.best, self.bad = value, 0
            return False
        self.bad += 1
        if self.bad <= self.schedule.patience:
            return False
        self.plateaus, self.bad = self.plateaus + 1, 0
        return True

    def state_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {"plateaus": self.plateaus, "best": self.best, "bad": self.bad}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        self.plateaus, self.best, self.bad = state["plateaus"], state["best"], state["bad"]

    def _after_warmup(self, progress: float) -> float:
        """The rate at a share of the way from the end of the warm-up to the end of the run."""
        match self.schedule:
            case Constant():
                return self.lr
            case Linear(min_lr=low):
                return low + (self.lr - low) * (1 - progress)
            case Cosine(min_lr=low):
                return low + (self.lr - low) * (1 + math.cos(math.pi * progress)) / 2
            case Plateau(factor=factor, min_lr=low):
                return max(self.lr * factor**self.plateaus, low)

    def _improves(self, value: float, best: float) -> bool:
        threshold = self.schedule.threshold if isinstance(self.schedule, Plateau) else 0.0
        margin = threshold * abs(best)
        return value < best - margin if self.mode == "min" else value > best + margin
