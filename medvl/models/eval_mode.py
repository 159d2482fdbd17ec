"""A context manager for inference with a model that may be in training."""

import contextlib
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import nn

from medvl.losses.gather import no_gather


class HasModules(Protocol):
    """An object with submodules: an `nn.Module`, or a wrapper of one."""

    def modules(self) -> Iterator[nn.Module]:
        """Return an iterator over all submodules, as `nn.Module.modules` does."""


@contextlib.contextmanager
def evaluating(model: HasModules) -> Iterator[None]:
    """Switch to eval mode without gradients and without gathering across ranks; restore each module's mode on exit."""
    modes = [(module, module.training) for module in model.modules()]
    for module, _ in modes:
        module.training = False
    try:
        with torch.no_grad(), no_gather():
            yield
    finally:
        for module, mode in modes:
            module.training = mode
