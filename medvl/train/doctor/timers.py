"""Clocks and counters for speed: each a small function of what it measures."""

import dataclasses
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from medvl.schema import Batch
from medvl.train.optim.precision import Precision

_COUNTED = 8
"""Samples whose operations are counted: enough, since all but the matrix of a contrastive loss grows with the batch."""


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_each(function: Callable[[int], object], device: torch.device, seconds: float, least: int = 3) -> float:
    """Mean time of `function(0)`, `function(1)`, ... called for so many seconds, and at least so many times.

    The device is waited for at the start and at the end only, so that calls overlap as they do in a run.
    """
    synchronize(device)
    started, calls = time.perf_counter(), 0
    while calls < least or time.perf_counter() - started < seconds:
        function(calls)
        calls += 1
    synchronize(device)
    return (time.perf_counter() - started) / calls


def seconds_of(function: Callable[[], object], device: torch.device) -> float:
    """Time of one call, with what the device does for it."""
    synchronize(device)
    started = time.perf_counter()
    function()
    synchronize(device)
    return time.perf_counter() - started


def matmul_flops(device: torch.device, precision: Precision, seconds: float = 1.0) -> float:
    """Operations a second of a large matrix product in the precision of the run: a ceiling that can be reached.

    8,192 squared on a GPU, 1,536 on a CPU; the best of the products that fit into the time, as other programs may have
    a part of the machine.
    """
    size = 8192 if device.type == "cuda" else 1536
    generator = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(size, size, device=device, generator=generator) for _ in range(2))
    with precision.autocast():
        left, right = (left @ right).mul(1 / size), right  # in the dtype that a product of the run has
        right = right.to(left.dtype)
        out = left @ right
        best, until = float("inf"), time.perf_counter() + seconds
        while time.perf_counter() < until or best == float("inf"):
            best = min(best, seconds_of(lambda: torch.mm(left, right, out=out), device))
    return 2 * size**3 / best


def flops_of_a_sample(model: nn.Module, batch: Batch, precision: Precision) -> float:
    """Operations of forward and backward a sample, multiply and add as two, counted by torch on a few of the batch.

    Attention is counted in its plain form, without what a fused kernel computes twice; what is not a product of
    matrices or a convolution counts nothing. The model is called as it is before compilation, and its gradients are
    left empty.
    """
    few = first_rows(batch, _COUNTED)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        with precision.autocast():
            loss = model.forward(few).total
        loss.backward()
    for parameter in model.parameters():
        parameter.grad = None
    return counter.get_total_flops() / len(few)


def first_rows(batch: Batch, count: int) -> Batch:
    """The first samples of a batch; all of one in which samples share images."""
    if batch.image_of_B is not None:
        return batch
    size = len(batch)

    def cut(value: Any) -> Any:
        return value[:count] if isinstance(value, Tensor | list) and len(value) == size else value

    fields = dataclasses.fields(batch)
    return dataclasses.replace(batch, **{field.name: cut(getattr(batch, field.name)) for field in fields})


def peak_memory(device: torch.device) -> int:
    """Bytes at most so far: allocated on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
