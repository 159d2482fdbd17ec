"""Timers and counters of operations and memory."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from medvl.common.peak_memory import peak_resident_bytes
from medvl.schema import Batch
from medvl.train.optim.precision import Precision

COUNTED = 8
"""Samples whose operations are counted: all but the similarity matrix of a contrastive loss grows with the batch."""


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_each(function: Callable[[int], object], device: torch.device, seconds: float, least: int = 3) -> float:
    """Return the mean time of `function(0)`, `function(1)`, ..., called for `seconds` and at least `least` times.

    The device is synchronised at the start and the end only, so that calls overlap as in a run.
    """
    synchronize(device)
    started, calls = time.perf_counter(), 0
    while calls < least or time.perf_counter() - started < seconds:
        function(calls)
        calls += 1
    synchronize(device)
    return (time.perf_counter() - started) / calls


def seconds_of(function: Callable[[], object], device: torch.device) -> float:
    """Return the time of one call, including its work on the device."""
    synchronize(device)
    started = time.perf_counter()
    function()
    synchronize(device)
    return time.perf_counter() - started


def matmul_flops(device: torch.device, precision: Precision, seconds: float = 1.0) -> float:
    """Return the operations per second of a large matrix product in the precision of the run: a reachable ceiling.

    The matrices are 8,192 squared on a GPU and 1,536 squared on a CPU. The fastest product within `seconds` counts,
    because other programs may use the machine.
    """
    size = 8192 if device.type == "cuda" else 1536
    generator = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(size, size, device=device, generator=generator) for _ in range(2))
    with precision.autocast():
        left, right = (left @ right).mul(1 / size), right  # converts to the dtype of products in the run
        right = right.to(left.dtype)
        out = left @ right
        best, until = float("inf"), time.perf_counter() + seconds
        while time.perf_counter() < until or best == float("inf"):
            best = min(best, seconds_of(lambda: torch.mm(left, right, out=out), device))
    return 2 * size**3 / best


def flops_per_sample(model: nn.Module, batch: Batch, precision: Precision) -> float:
    """Return the operations per sample of forward and backward pass, multiply and add as two, as counted by torch.

    Only matrix products and convolutions count. Attention is counted in its unfused form, without the recomputation of
    a fused kernel. The model is called uncompiled, and its gradients are cleared afterwards.
    """
    few = first_rows(batch, COUNTED)
    return count_operations(lambda: model.forward(few).total, model, precision) / len(few)


def count_operations(loss: Callable[[], Tensor], model: nn.Module, precision: Precision) -> int:
    """Return the operations of a loss of a model and of its backward pass, counted as `flops_per_sample` does."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        with precision.autocast():
            value = loss()
        value.backward()
    for parameter in model.parameters():
        parameter.grad = None
    return counter.get_total_flops()


def first_rows(batch: Batch, count: int) -> Batch:
    """Return the first samples of a batch; the complete batch where samples share images."""
    if batch.image_of_B is not None:
        return batch
    size = len(batch)

    def cut(value: Any) -> Any:
        return value[:count] if isinstance(value, Tensor | list) and len(value) == size else value

    fields = dataclasses.fields(batch)
    return dataclasses.replace(batch, **{field.name: cut(getattr(batch, field.name)) for field in fields})


def peak_memory(device: torch.device) -> int:
    """Return the peak memory so far in bytes: allocated on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return peak_resident_bytes()
