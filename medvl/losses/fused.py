"""Functions of losses that torch.compile fuses into few kernels, where a GPU's tensors have a compiler."""

import functools
import importlib.util
import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def fused_if_possible(function: Callable[..., Any], tensor: Tensor) -> Callable[..., Any]:
    """Return the function compiled, where the tensor's device has a compiler; otherwise the function itself.

    Within a function that is compiled as a whole, the function itself: it becomes a part of that graph, and the search
    for a compiler cannot be traced.
    """
    if torch.compiler.is_compiling():
        return function
    return _fused(function) if tensor.is_cuda and can_fuse() else function


@functools.cache
def can_fuse() -> bool:
    """Return whether Triton is installed, and what it calls: a C compiler, and Python's headers."""
    has_headers = Path(sysconfig.get_path("include"), "Python.h").is_file()
    has_compiler = any(map(shutil.which, ("gcc", "clang", "cc")))
    return importlib.util.find_spec("triton") is not None and has_compiler and has_headers


@functools.cache
def _fused(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)
