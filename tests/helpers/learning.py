"""Training of small models in tests, and settings that show that what they reach is not luck.

    MEDVL_TEST_SEEDS=5     runs each test marked `training` with five seeds
    MEDVL_TEST_THREADS=2   number of torch's threads, otherwise one
    MEDVL_TEST_STEPS=0.7   makes this share of the steps: the margin by which a test passes

Every test marked `training` passes with five seeds, one and two threads, and 0.7 of its steps.
"""

import os
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import nn

from medvl.schema import Batch, Losses

SEEDS = int(os.environ.get("MEDVL_TEST_SEEDS", "1"))
_STEPS = float(os.environ.get("MEDVL_TEST_STEPS", "1"))


def shift_seeds(monkeypatch: pytest.MonkeyPatch, shift: int) -> None:
    """Add a number to every seed that `torch.manual_seed` gets within a test."""
    seed_torch = torch.manual_seed

    def manual_seed(seed: int) -> torch.Generator:
        return seed_torch(seed + shift)

    monkeypatch.setattr(torch, "manual_seed", manual_seed)
    torch.manual_seed(0)


def seed_of(name: int = 0) -> int:
    """Return the seed that `torch.manual_seed(name)` sets within this test, for other
    generators.
    """
    return torch.manual_seed(name).initial_seed()


def share_of(steps: int) -> int:
    """Return the number of steps, or the share of it that MEDVL_TEST_STEPS names."""
    return max(1, round(_STEPS * steps))


def fit(
    model: Callable[[Batch], Losses],
    batch: Batch,
    optimizer: torch.optim.Optimizer,
    steps: int,
    every_gradient: Iterable[nn.Parameter] = (),
) -> list[dict[str, float]]:
    """Make steps on one batch and return the losses of each: "total" and those of the terms.

    After each step, the parameters of `every_gradient` must have a gradient that is not zero.
    """
    seen = []
    needed = list(every_gradient)
    for _ in range(share_of(steps)):
        optimizer.zero_grad()
        losses = model(batch)
        losses.total.backward()
        assert all(parameter.grad is not None and parameter.grad.any() for parameter in needed)
        optimizer.step()
        values = {"total": losses.total, **losses.terms}
        seen.append({name: float(value.detach()) for name, value in values.items()})
    return seen
