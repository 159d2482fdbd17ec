"""What losses share: precision, means, checks of arguments, and rows of all ranks."""

import contextlib
import contextvars
import functools
import importlib.util
import shutil
import sysconfig
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Precision of losses, which compute in float32, their means, and checks of their arguments.


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
    """Return the mean of `count` elements from their sum; 0 with a zero gradient if there is
    none.

    The count may be a mean over micro-batches, and so below 1.
    """
    return total / torch.where(count > 0, count, 1)


def mean_or_zero(values: Tensor) -> Tensor:
    """Return the mean of all elements; 0 with a zero gradient if there is none."""
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


def check_share(name: str, value: float | Tensor) -> None:
    """Raise ValueError naming the argument unless the value is within [0, 1]; a tensor, which the
    host would wait for, is not looked at.
    """
    if not isinstance(value, Tensor) and not 0 <= value <= 1:
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


# All-gather of rows with gradient, for contrastive losses with the negatives of the global batch.
#
# Every rank gathers the rows of all ranks and computes the same loss over them. The backward pass
# sums the gradients of a row over all ranks and returns the sum to the rank that owns it. Each
# rank then has W times its share of the gradient (W ranks), and DDP's average over ranks gives
# the parameter gradients of one process with the global batch. A parameter of the loss itself,
# such as a learned temperature, has the same gradient everywhere, which the average does not
# change.
#
# Letters: B rows of this rank, N rows of all ranks in rank order, E embedding dim, T tokens, Q
# tokens of all rows.

_MAX_DIMS = 8

_local_only: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "medvl_gather_local_only", default=False
)
_host_groups: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def no_gather() -> Iterator[None]:
    """Make `gather` the identity in this context, so that ranks may run different numbers of
    batches (validation).
    """
    token = _local_only.set(True)
    try:
        yield
    finally:
        _local_only.reset(token)


def gather(x_BE: Tensor) -> Tensor:
    """Return the rows of all ranks in rank order, (N, E) or with any other trailing shape;
    differentiable.

    Ranks may have different numbers of rows, also none; the counts are exchanged through a host
    (gloo) group, without waiting for the device. Without an initialised process group, on one rank,
    and within `no_gather()`, return the input itself. All ranks must call it equally often.

    Raises ValueError where trailing shapes differ between ranks.
    """
    if _is_alone():
        return x_BE
    return _Gather.apply(x_BE, _row_counts(x_BE))


def gather_padded(x_BTE: Tensor, mask_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sequences of all ranks in rank order, (N, T, E), and their mask (N, T);
    differentiable.

    Ranks may pad to different lengths: padding is not sent, and the result is padded with zeros to
    the longest sequence of all. The mask must be True on the first tokens of every row. Returns its
    input in the same cases as `gather`.

    Raises ValueError where E differs between ranks.
    """
    if _is_alone():
        return x_BTE, mask_BT
    length_N = gather(mask_BT.sum(dim=1))
    tokens_QE = gather(x_BTE[mask_BT])
    place_T = torch.arange(max(length_N.tolist(), default=0), device=x_BTE.device)
    mask_NT = place_T < length_N[:, None]
    x_NTE = tokens_QE.new_zeros(*mask_NT.shape, *tokens_QE.shape[1:])
    x_NTE[mask_NT] = tokens_QE
    return x_NTE, mask_NT


def mean_over_ranks(value_B: Tensor, counted_B: Tensor) -> Tensor:
    """Return the mean of the counted values of all ranks, a scalar; 0 with a zero gradient where
    none is counted.

    Each rank sends two numbers. Values that are not counted must be finite; `counted_B` is bool.
    Differentiable.
    """
    value_B = value_B.float()
    sums_12 = torch.stack(
        [value_B.masked_fill(~counted_B, 0.0).sum(), counted_B.sum().to(value_B.dtype)]
    )[None]
    total, count = gather(sums_12).sum(dim=0)
    return total / count.clamp(min=1)


def rows_by_rank(rows: int) -> list[int]:
    """Return the numbers of rows of all ranks, in rank order; where `gather` returns its input,
    of this one alone.
    """
    return [rows] if _is_alone() else _row_counts(torch.empty(rows))


def host_group() -> Any:
    """Return the process group for small exchanges on the host: the default group if it has gloo,
    else a new one.

    The first call is collective: all ranks must make it.
    """
    world = dist.group.WORLD
    if "cpu:gloo" in dist.get_backend_config(world):
        return world
    if world not in _host_groups:
        _host_groups[world] = dist.new_group(backend="gloo")
    return _host_groups[world]


def _is_alone() -> bool:
    # The context variable is last, because torch.compile cannot trace it.
    return (
        not (dist.is_available() and dist.is_initialized())
        or dist.get_world_size() == 1
        or _local_only.get()
    )


def _row_counts(x_BE: Tensor) -> list[int]:
    """Return the number of rows of every rank, in rank order."""
    if not 1 <= x_BE.ndim <= _MAX_DIMS:
        raise ValueError(f"expected a tensor of 1 to {_MAX_DIMS} dimensions, got {x_BE.ndim}")
    shape = torch.tensor([*x_BE.shape, *[-1] * (_MAX_DIMS - x_BE.ndim)])
    shapes = [torch.empty_like(shape) for _ in range(dist.get_world_size())]
    dist.all_gather(shapes, shape, group=host_group())
    for rank, other in enumerate(shapes):
        if not torch.equal(other[1:], shape[1:]):
            other_shape = tuple(size for size in other.tolist() if size >= 0)
            local = f"rank {dist.get_rank()} has {tuple(x_BE.shape)}"
            raise ValueError(
                f"expected equal shapes after dimension 0: {local}, rank {rank} has {other_shape}"
            )
    return [int(other[0]) for other in shapes]


class _Gather(torch.autograd.Function):
    """Concatenation of the rows of all ranks, `counts` rows each; the gradient is summed over
    the ranks.
    """

    @staticmethod
    def forward(ctx: Any, x_BE: Tensor, counts: list[int]) -> Tensor:
        ctx.counts = counts
        longest = max(counts)
        padded = x_BE.contiguous()
        if len(x_BE) < longest:  # collectives need equal shapes; the padding is removed below
            padded = x_BE.new_zeros(longest, *x_BE.shape[1:])
            padded[: len(x_BE)] = x_BE
        blocks = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(blocks, padded)
        return torch.cat([block[:count] for block, count in zip(blocks, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        # Copy: all_reduce works in place, and autograd may still use the original.
        grad_NE = grads[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad_NE)
        return grad_NE.split(ctx.counts)[dist.get_rank()], None
