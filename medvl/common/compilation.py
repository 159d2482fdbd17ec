"""What compiled kernels and graphs need: few shapes, and functions that are called untraced.

oneDNN compiles a kernel for every shape and keeps the last 1,024 of them. If the number of rows
changes from batch to batch, as the number of real or masked tokens does, no kernel is reused:
16-bit products of a small BERT took 1.6 times as long on a CPU, and the kernels took gigabytes of
memory. A CUDA graph is recorded for every shape.
"""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")
FEW_ROWS = 64


def round_up(size: int, parts: int, least: int) -> int:
    """Return the next multiple of `least`, and of a power of two below `size` divided by `parts`.

    So at most `parts` sizes lie between two powers of two, and less than `size` / `parts` or
    `least` is added. All three are 1 or more, `parts` and `least` powers of two.
    """
    step = max(least, (1 << (size - 1).bit_length() >> 1) // parts)
    return -(-size // step) * step


def filling_rows(rows: int, device: torch.device) -> int:
    """Return the number of rows to add to a matrix product on a CPU, so that few different shapes
    occur.

    0 on a GPU and below 64 rows.
    """
    return -rows % FEW_ROWS if device.type == "cpu" and rows > FEW_ROWS else 0


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
