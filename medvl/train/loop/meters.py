"""Meters of losses, speed and the best validation."""

import dataclasses
import math
import time
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from medvl.errors import TrainingError
from medvl.train.loop.step import StepResult
from medvl.train.parallel.distributed import RankInfo


class LossMeter:
    """Running sums of losses and gradient norms on the device; read once per record, never in a step.

    They are part of a checkpoint, so that the first record after a resumed step equals that of an uninterrupted run.
    """

    def __init__(self, ranks: RankInfo) -> None:
        self._ranks = ranks
        self._names: list[str] = []
        self._sums: Tensor | None = None
        self._steps = 0

    def add(self, result: StepResult) -> None:
        """Add an update. Raises TrainingError where the model returns other terms than before."""
        rows = [torch.stack([losses.total, *losses.terms.values()]).double() for losses in result.losses]
        values = torch.cat([torch.stack(rows).mean(dim=0), result.grad_norm.double().reshape(1)])
        names = ["loss", *(f"loss/{name}" for name in result.losses[0].terms), "grad_norm"]
        if self._sums is None or not self._names:
            self._names, self._sums = names, torch.zeros_like(values)
        if names != self._names:
            raise TrainingError(
                f"the model must return the same loss terms in each step, got {names} after {self._names}", "mismatch"
            )
        self._sums += values
        self._steps += 1

    def read(self) -> dict[str, float]:
        """Return means over steps and ranks since the last call; empty without an update. Collective call."""
        parts = self._ranks.exchange(self._local())
        names, steps = parts[0]["names"], sum(part["steps"] for part in parts)
        self._sums, self._steps = None, 0
        if not steps:
            return {}
        return {name: sum(part["sums"][i] for part in parts) / steps for i, name in enumerate(names)}

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the sums of all ranks as JSON values. Collective call."""
        return self._ranks.exchange(self._local())

    def load_state_dict(self, parts: list[dict[str, Any]]) -> None:
        """Restore the sums of `state_dict`; with another number of ranks the meter starts empty."""
        if len(parts) != self._ranks.size:
            return
        own = parts[self._ranks.rank]
        self._names, self._steps = list(own["names"]), own["steps"]
        self._sums = torch.tensor(own["sums"], dtype=torch.float64, device=self._ranks.device) if own["steps"] else None

    def _local(self) -> dict[str, Any]:
        sums = self._sums.tolist() if self._sums is not None else []
        return {"names": self._names, "steps": self._steps, "sums": sums}


class SpeedMeter:
    """Pairs per second, share of time spent waiting for data, and remaining time."""

    def __init__(self, ranks: RankInfo) -> None:
        self._ranks = ranks
        self._pairs = self._steps = 0
        self._waited = 0.0
        self._started = time.perf_counter()

    def add(self, pairs: int) -> None:
        """Add a step."""
        self._pairs += pairs
        self._steps += 1

    def pause(self, seconds: float) -> None:
        """Exclude time that was not spent on steps: validation, checkpoints."""
        self._started += seconds

    def read(self, wait_seconds: float, steps_left: int) -> dict[str, float]:
        """Return the figures since the last call. Collective call.

        Args:
            wait_seconds: total time spent waiting for data since the start.
            steps_left: steps until the end of the run.
        """
        elapsed = max(time.perf_counter() - self._started, 1e-9)
        waited = wait_seconds - self._waited
        parts = self._ranks.exchange([self._pairs, waited])
        steps = self._steps
        self._waited = wait_seconds
        self._pairs = self._steps = 0
        self._started = time.perf_counter()
        return {
            "pairs_per_second": sum(pairs for pairs, _ in parts) / elapsed,
            "wait_share": max(waited for _, waited in parts) / elapsed,
            "seconds_per_step": elapsed / max(steps, 1),
            "seconds_left": elapsed / max(steps, 1) * steps_left,
        }


@dataclasses.dataclass(kw_only=True)
class BestTracker:
    """Best validation so far by one metric, and the number of validations since."""

    mode: Literal["min", "max"]
    patience: int | None
    best: float | None = None
    best_step: int | None = None
    bad: int = 0
    """Validations in a row without improvement."""

    def observe(self, step: int, value: float) -> bool:
        """Record a validation; return whether it is the best so far. A NaN never is."""
        better = math.isfinite(value) and (
            self.best is None or (value < self.best if self.mode == "min" else value > self.best)
        )
        if better:
            self.best, self.best_step, self.bad = value, step, 0
        else:
            self.bad += 1
        return better

    @property
    def exhausted(self) -> bool:
        """Whether training should stop early."""
        return self.patience is not None and self.bad >= self.patience

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return {"value": self.best, "step": self.best_step, "bad": self.bad}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.best, self.best_step, self.bad = state["value"], state["step"], state["bad"]
