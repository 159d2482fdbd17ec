"""Limit of the memory that the configuration of a checkpoint can allocate, from the size of its weights."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from medvl.errors import CheckpointError

_FACTOR, _SLACK = 4, 2**26
"""Limit of the elements that building a model may allocate: a multiple of those in the files, plus a constant for
buffers that are not saved."""


class AllocationLimit(TorchDispatchMode):
    """Context in which new tensors may have a few times the elements of safetensors files, all together.

    The shapes in a configuration are not checked before its model is built. So that a damaged or foreign configuration
    cannot exhaust the memory, each new tensor is measured on the meta device before it is allocated.

    Raises CheckpointError ("mismatch") within the context, and what `safetensors.safe_open` raises where the file is
    damaged.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        super().__init__()
        elements = 0
        for path in files:
            with safetensors.safe_open(path, framework="pt") as file:
                names = file.keys()
                elements += sum(math.prod(file.get_slice(name).get_shape()) for name in names)
        self._weights, self._left = files[0], _FACTOR * elements + _SLACK

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator, counting the elements that it allocates if it creates a tensor from nothing."""
        kwargs = dict(kwargs or {})
        if "device" in kwargs and torch.device(kwargs["device"] or "cpu").type != "meta":
            self._count(func, args, kwargs)
        return func(*args, **kwargs)

    def _count(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        try:
            planned = func(*args, **{**kwargs, "device": torch.device("meta")})
            self._left -= planned.numel() if isinstance(planned, Tensor) else 0
        except RuntimeError:  # more bytes than 64 bits can count
            self._left = -1
        if self._left < 0:
            message = f"{self._weights} does not fit the configuration beside it, whose model has far more parameters"
            raise CheckpointError(message, "mismatch")
