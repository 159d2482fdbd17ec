"""Profiles of steps: the most expensive kernels, the share of each kind, and the idle share of
the device.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType

from medvl.train.doctor.examine import synchronize  # internal, as in `gpu_lines.timing`

KINDS = ("matrix products", "attention", "normalisation and element-wise", "optimiser", "copies")
_ATTENTION = ("flash", "fmha", "sdpa", "scaled_dot_product", "attention", "varlen")
_OPTIMISER = ("adam", "multi_tensor_apply")
"""The second also computes the norm of the gradients."""
_COPIES = (
    "memcpy",
    "memset",
    "copy_",
    "catarray",
    "aten::cat",
    "aten::fill_",
    "aten::zero_",
    "fillfunctor",
    "nchwtonhwc",
    "nhwctonchw",
)
_PRODUCTS = (
    "gemm",
    "gemv",
    "cutlass",
    "xmma",
    "nvjet",
    "cublas",
    "wgmma",
    "triton_tem",
    "splitk",
    "conv",
    "fprop",
    "dgrad",
    "wgrad",
    "winograd",
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::baddbmm",
)
_NOT_PRODUCTS = ("convert", "batch_norm", "bn_fw", "bn_bw")
"""Parts of names of kernels that would be taken for convolutions."""
_KERNELS, _NAME = 10, 120
"""Kernels of a profile, and the maximum length of their names."""


class Span(NamedTuple):
    """A kernel or copy on the device, or an operator on a CPU. Times in microseconds."""

    name: str
    start: float
    end: float
    time: float
    """Its own time: on a CPU without that of the operators that it calls."""


def profile_steps(run: Callable[[int], None], steps: int, device: torch.device) -> dict[str, Any]:
    """Run some steps under torch's profiler and return their summary.

    On a GPU only its own activity is recorded, which does not slow the host down.
    """
    on_gpu = device.type == "cuda"
    activity = (
        torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU
    )
    synchronize(device)
    with torch.profiler.profile(activities=[activity]) as recorded:
        run(steps)
        synchronize(device)
    events: Iterable[Any] = recorded.events() or ()
    return summarize(device_spans(events, on_gpu), steps)


def device_spans(events: Iterable[Any], on_gpu: bool) -> list[Span]:
    """Return the work on the device among the events of a profile, without annotated ranges."""
    kind = DeviceType.CUDA if on_gpu else DeviceType.CPU
    return [
        Span(
            event.name,
            event.time_range.start,
            event.time_range.end,
            event.time_range.elapsed_us() if on_gpu else event.self_cpu_time_total,
        )
        for event in events
        if event.device_type == kind and not event.is_user_annotation
    ]


def summarize(spans: Sequence[Span], steps: int) -> dict[str, Any]:
    """Return the milliseconds of a step, the share of each kind of kernel, the idle share and the
    longest kernels.

    Shares are of the summed times of all kernels; the idle share is that of the time from the first
    to the last one in which none runs.
    """
    spans = [span for span in spans if span.time > 0]
    if not spans:
        return {"kernel_ms": 0.0, "shares": {}, "idle": None, "kernels": []}
    by_name: dict[str, list[float]] = {}
    for span in spans:
        by_name.setdefault(span.name, []).append(span.time)
    total = sum(map(sum, by_name.values()))
    shares = dict.fromkeys(KINDS, 0.0)
    for name, times in by_name.items():
        shares[kind_of(name)] += sum(times) / total
    longest = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:_KERNELS]
    window = max(span.end for span in spans) - min(span.start for span in spans)
    return {
        "kernel_ms": total / steps / 1000,
        "shares": shares,
        "idle": 1 - busy_time(spans) / window,
        "kernels": [
            {
                "name": name[:_NAME],
                "kind": kind_of(name),
                "calls": len(times) / steps,
                "ms": sum(times) / steps / 1000,
                "share": sum(times) / total,
            }
            for name, times in longest
        ],
    }


def busy_time(spans: Sequence[Span]) -> float:
    """Return the length of the union of the spans."""
    busy, end = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.start):
        busy += max(0.0, span.end - max(span.start, end))
        end = max(end, span.end)
    return busy


def kind_of(name: str) -> str:
    """Return the kind of a kernel by its name, or of an operator on a CPU.

    Kernels that the compiler fused are named after the operators that they replace; all of them but
    templates of matrix products (`triton_tem_`) are element-wise passes or reductions.
    """
    lower = name.lower()
    if lower.startswith("triton_") and not lower.startswith("triton_tem"):
        return "normalisation and element-wise"
    if _has(lower, _ATTENTION):
        return "attention"
    if _has(lower, _OPTIMISER):
        return "optimiser"
    if _has(lower, _PRODUCTS) and not _has(lower, _NOT_PRODUCTS):
        return "matrix products"
    return "copies" if _has(lower, _COPIES) else "normalisation and element-wise"


def _has(name: str, parts: Sequence[str]) -> bool:
    return any(part in name for part in parts)
