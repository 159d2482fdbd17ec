"""Means of losses between two records, and whether a metric still gets better."""

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


class Window:
    """Running sums on the device since the last record: read once a record, never in a step.

    They are part of a checkpoint, so that the record after a resumed step is that of an undisturbed run.
    """

    def __init__(self, world: RankInfo) -> None:
        self._world = world
        self._names: list[str] = []
        self._sums: Tensor | None = None
        self._steps = 0

    def add(self, outcome: StepResult) -> None:
        """Count an update that was made."""
        rows = [torch.stack([losses.total, *losses.terms.values()]).double() for losses in outcome.losses]
        values = torch.cat([torch.stack(rows).mean(dim=0), outcome.grad_norm.double().reshape(1)])
        names = ["loss", *(f"loss/{name}" for name in outcome.losses[0].terms), "grad_norm"]
        if self._sums is None or not self._names:
            self._names, self._sums = names, torch.zeros_like(values)
        if names != self._names:
            raise TrainingError(f"a model must return the same terms at each step: {names} after {self._names}")
        self._sums += values
        self._steps += 1

    def read(self) -> dict[str, float]:
        """Means over the steps and ranks since the last call; empty where no update was made. A call of all ranks."""
        ranks = self._world.exchange(self._local())
        names, steps = ranks[0]["names"], sum(rank["steps"] for rank in ranks)
        self._sums, self._steps = None, 0
        if not steps:
            return {}
        return {name: sum(rank["sums"][i] for rank in ranks) / steps for i, name in enumerate(names)}

    def state_dict(self) -> list[dict[str, Any]]:
        """Every rank's sums; JSON values. A call of all ranks."""
        return self._world.exchange(self._local())

    def load_state_dict(self, ranks: list[dict[str, Any]]) -> None:
        """Go on from what `state_dict` gave; with another number of ranks the window starts empty."""
        if len(ranks) != self._world.size:
            return
        own = ranks[self._world.rank]
        self._names, self._steps = list(own["names"]), own["steps"]
        self._sums = torch.tensor(own["sums"], dtype=torch.float64, device=self._world.device) if own["steps"] else None

    def _local(self) -> dict[str, Any]:
        sums = self._sums.tolist() if self._sums is not None else []
        return {"names": self._names, "steps": self._steps, "sums": sums}


class Speed:
    """Pairs a second, the share of time spent waiting for data, and the time that is left."""

    def __init__(self, world: RankInfo) -> None:
        self._world = world
        self._pairs = self._steps = 0
        self._waited = 0.0
        self._started = time.perf_counter()

    def add(self, pairs: int) -> None:
        """Count a step."""
        self._pairs += pairs
        self._steps += 1

    def pause(self, seconds: float) -> None:
        """Leave out time that was spent on something else than steps: validation, checkpoints."""
        self._started += seconds

    def read(self, wait_seconds: float, steps_left: int) -> dict[str, float]:
        """The figures since the last call, from the time waited in all so far. A call of all ranks."""
        elapsed = max(time.perf_counter() - self._started, 1e-9)
        waited = wait_seconds - self._waited
        ranks = self._world.exchange([self._pairs, waited])
        steps = self._steps
        self._waited = wait_seconds
        self._pairs = self._steps = 0
        self._started = time.perf_counter()
        return {
            "pairs_per_second": sum(pairs for pairs, _ in ranks) / elapsed,
            "wait_share": max(waited for _, waited in ranks) / elapsed,
            "seconds_per_step": elapsed / max(steps, 1),
            "seconds_left": elapsed / max(steps, 1) * steps_left,
        }


@dataclasses.dataclass(kw_only=True)
class Tracker:
    """The best validation so far by one metric, and how many there have been since."""

    mode: Literal["min", "max"]
    patience: int | None
    best: float | None = None
    best_step: int | None = None
    bad: int = 0
    """Validations in a row without improvement."""

    def observe(self, step: int, value: float) -> bool:
        """Take a validation into account; True where it is the best one so far. A NaN never is."""
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
        """JSON values."""
        return {"value": self.best, "step": self.best_step, "bad": self.bad}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        self.best, self.best_step, self.bad = state["value"], state["step"], state["bad"]
