"""Limit of the memory that building a model can allocate, from the size of the weights that it is built for."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from medvl.errors import MedvlError

_FACTOR, _SLACK = 4, 2**26
"""Limit of the elements that building a model may allocate: a multiple of those of the weights, plus a constant for
buffers that are not saved."""


class AllocationLimit(TorchDispatchMode):
    """Context in which new tensors may have a few times a number of elements, all together.

    The sizes in a configuration, or in the names of a file's tensors, are not checked before the model is built. So
    that damaged or foreign ones cannot exhaust the memory, each new tensor is measured on the meta device before it is
    allocated.

    Args:
        elements: number of elements of the weights.
        error: raised within the context where the limit is exceeded.
    """

    def __init__(self, elements: int, error: MedvlError) -> None:
        super().__init__()
        self._left, self._error = _FACTOR * elements + _SLACK, error

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
            raise self._error


def elements_of(files: Iterable[Path]) -> int:
    """Return the number of elements in safetensors files. Raises what `safetensors.safe_open` does for damaged ones."""
    elements = 0
    for path in files:
        with safetensors.safe_open(path, framework="pt") as file:
            names = file.keys()
            elements += sum(math.prod(file.get_slice(name).get_shape()) for name in names)
    return elements
