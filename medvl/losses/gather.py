"""Rows of all ranks, with gradient: what gives a contrastive loss the negatives of the whole global batch.

Every rank gathers every rank's rows and computes the same loss over all of them. The backward pass sums what all ranks
ask of a row and hands it to the rank that owns it. Each rank then holds W times its share of the gradient (W ranks),
and DDP's average over ranks makes the parameter gradients those of one process with the whole batch; a parameter of
the loss itself, such as a learned temperature, has the same gradient everywhere and the average leaves it alone.

Letters: B rows of this rank, N rows of all ranks in rank order, E embedding dim, T tokens, Q tokens of all rows.
"""

import contextlib
import contextvars
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_MAX_DIMS = 8

_local_only: contextvars.ContextVar[bool] = contextvars.ContextVar("medvl_gather_local_only", default=False)
_host_groups: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def no_gather() -> Iterator[None]:
    """Within this context `gather` is the identity: ranks may then run different numbers of batches (validation)."""
    token = _local_only.set(True)
    try:
        yield
    finally:
        _local_only.reset(token)


def gather(x_BE: Tensor) -> Tensor:
    """The rows of all ranks in rank order, (N, E), differentiable; any trailing shape that all ranks share.

    Ranks may hold different numbers of rows, none included; the counts travel through a host (gloo) group, so the
    device is not waited for. Without an initialised process group, on one rank, and within `no_gather()` the input
    itself comes back. All ranks must call it equally often.

    Raises ValueError where trailing shapes differ between ranks.
    """
    if _is_alone():
        return x_BE
    return _Gather.apply(x_BE, _row_counts(x_BE))


def gather_padded(x_BTE: Tensor, mask_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Sequences of all ranks in rank order, (N, T, E), and their mask (N, T); differentiable.

    Ranks may pad to different lengths: what is padded does not travel, and comes back as zeros, to the longest sequence
    of all. The mask is True on the first tokens of every row. Where `gather` gives its input back, so does this.

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


def rows_by_rank(rows: int) -> list[int]:
    """Return the numbers of rows of all ranks, in rank order; where `gather` returns its input, of this one alone."""
    return [rows] if _is_alone() else _row_counts(torch.empty(rows))


def host_group() -> Any:
    """The process group for small host-side exchanges: the default group where it speaks gloo, else one of its own.

    A collective call at its first use: all ranks must come here together.
    """
    world = dist.group.WORLD
    if "cpu:gloo" in dist.get_backend_config(world):
        return world
    if world not in _host_groups:
        _host_groups[world] = dist.new_group(backend="gloo")
    return _host_groups[world]


def _is_alone() -> bool:
    return _local_only.get() or not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1


def _row_counts(x_BE: Tensor) -> list[int]:
    """Rows on every rank, in rank order."""
    if not 1 <= x_BE.ndim <= _MAX_DIMS:
        raise ValueError(f"gather takes tensors of 1 to {_MAX_DIMS} dimensions, got {x_BE.ndim}")
    shape = torch.tensor([*x_BE.shape, *[-1] * (_MAX_DIMS - x_BE.ndim)])
    shapes = [torch.empty_like(shape) for _ in range(dist.get_world_size())]
    dist.all_gather(shapes, shape, group=host_group())
    for rank, other in enumerate(shapes):
        if not torch.equal(other[1:], shape[1:]):
            theirs = tuple(size for size in other.tolist() if size >= 0)
            raise ValueError(
                f"gather needs equal shapes but for the first dimension: rank {dist.get_rank()} has "
                f"{tuple(x_BE.shape)}, rank {rank} has {theirs}"
            )
    return [int(other[0]) for other in shapes]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BE: Tensor, counts: list[int]) -> Tensor:
        ctx.counts = counts
        longest = max(counts)
        padded = x_BE.contiguous()
        if len(x_BE) < longest:  # collectives want equal shapes; the padding is cut off again below
            padded = x_BE.new_zeros(longest, *x_BE.shape[1:])
            padded[: len(x_BE)] = x_BE
        blocks = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(blocks, padded)
        return torch.cat([block[:count] for block, count in zip(blocks, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        # A copy: all_reduce works in place, and autograd may still hold the original.
        grad_NE = grads[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad_NE)
        return grad_NE.split(ctx.counts)[dist.get_rank()], None
