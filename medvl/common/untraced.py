"""A decorator for functions that torch.compile cannot trace."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def untraced(function: Callable[P, T]) -> Callable[P, T]:
    """Let compiled code call a function as it is, between two graphs.

    This is `torch.compiler.disable`, but the compiler, whose import takes a second, is not imported
    before a model is compiled.
    """
    disabled = torch._disable_dynamo(function)

    @functools.wraps(function)
    def call(*inputs: P.args, **options: P.kwargs) -> T:
        if torch.compiler.is_compiling():
            return disabled(*inputs, **options)
        return function(*inputs, **options)

    return call
