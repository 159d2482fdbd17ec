"""Precision of losses, which compute in float32, their means, and checks of their arguments."""

import functools
import importlib.util
import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def full_precision(tensor: Tensor) -> torch.autocast:
    """Disable autocast on the tensor's device: it would compute products in 16 bits in spite of
    `.float()`.
    """
    return torch.autocast(tensor.device.type, enabled=False)


def product_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype for operands of a loss's largest products: that of a GPU's 16-bit
    autocast, else float32.
    """
    if tensor.is_cuda and torch.is_autocast_enabled("cuda"):
        return torch.get_autocast_dtype("cuda")
    return torch.float32


def mean_of(total: Tensor, count: Tensor) -> Tensor:
    """Return the mean of `count` elements from their sum; 0 with a zero gradient where there is
    none.

    The count may be a mean over micro-batches, and so below 1.
    """
    return total / torch.where(count > 0, count, 1)


def mean_or_zero(values: Tensor) -> Tensor:
    """Return the mean of all elements; 0 with a zero gradient where there is none."""
    return values.sum() / max(values.numel(), 1)


def one_number(name: str, value: Tensor | float) -> Tensor | float:
    """Return a scale, bias or temperature as float32 without dimensions, so that it changes no
    dtype and no shape.

    Raises ValueError naming the argument unless it is one number.
    """
    if not isinstance(value, Tensor):
        return value
    if value.numel() != 1:
        raise ValueError(f"{name} must be one number, got a tensor of shape {shapes(value)}")
    return value.float().reshape(())


def shapes(*tensors: Tensor) -> str:
    """Return the shapes of tensors, for error messages."""
    return " and ".join(str(tuple(tensor.shape)) for tensor in tensors)


def check_share(name: str, value: float) -> None:
    """Raise ValueError naming the argument unless the value is within [0, 1]."""
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must be within [0, 1], got {value}")


# Functions of losses that torch.compile fuses into few kernels, where a GPU's tensors have a
# compiler.


def fused_if_possible(function: Callable[..., Any], tensor: Tensor) -> Callable[..., Any]:
    """Return the function compiled, where the tensor's device has a compiler; otherwise the
    function itself.

    Within a function that is compiled as a whole, the function itself: it becomes a part of that
    graph, and the search for a compiler cannot be traced.
    """
    if torch.compiler.is_compiling():
        return function
    return _compile(function) if tensor.is_cuda and can_fuse() else function


@functools.cache
def can_fuse() -> bool:
    """Return whether Triton is installed, and what it calls: a C compiler, and Python's headers."""
    has_headers = Path(sysconfig.get_path("include"), "Python.h").is_file()
    has_compiler = any(map(shutil.which, ("gcc", "clang", "cc")))
    return importlib.util.find_spec("triton") is not None and has_compiler and has_headers


@functools.cache
def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)
