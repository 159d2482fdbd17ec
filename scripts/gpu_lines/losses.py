"""Losses alone, forward and backward in bf16 autocast: GLoRIA's local loss, and InfoNCE of a
large batch.
"""

import functools
from collections.abc import Callable
from typing import Any

import benchmark_gloria
import torch
from benchmark_losses import in_precision, inputs, plain_info_nce
from torch import Tensor

from gpu_lines.bench import Bench
from gpu_lines.line import Goal, Line, Report, report
from gpu_lines.timing import Contender, Run, measure_in_turns, repeat
from medvl import losses


def measure_gloria(bench: Bench) -> Report:
    """Measure the local loss on 97 words and 19 x 19 regions of 768 dimensions; the published
    loop at 48 pairs.
    """
    large, small = bench.size((256, 48), (3, 2))

    def contender(name: str, form: Callable[..., Tensor], size: int) -> Contender:
        leaves = functools.partial(benchmark_gloria.inputs, size, str(bench.device))
        return Contender(
            name=f"{name}, B = {size}", build=functools.partial(steps, form, leaves), samples=size
        )

    rows = measure_in_turns(
        bench,
        (
            contender("medvl: gloria_local", benchmark_gloria.both_directions, large),
            contender("medvl: gloria_local", benchmark_gloria.both_directions, small),
            contender("published loop over texts", benchmark_gloria.loop_over_texts, small),
        ),
    )
    return report(rows, {"ms": rows[0].ms, "GB": rows[0].gb})


def measure_info_nce(bench: Bench) -> Report:
    """Measure InfoNCE of 65,536 pairs of 512 numbers with a learned scale, in blocks and plain."""
    size, dim = bench.size((65_536, 512), (64, 8))

    def clip(scale: Tensor, image_BE: Tensor, text_BE: Tensor) -> Tensor:
        return losses.clip(image_BE, text_BE, scale)

    leaves = functools.partial(inputs, size, dim, str(bench.device))
    rows = measure_in_turns(
        bench,
        [
            Contender(name=name, build=functools.partial(steps, form, leaves), samples=size)
            for name, form in (
                ("medvl: losses.clip, in blocks", clip),
                ("stock: all logits at once", plain_info_nce),
            )
        ],
    )
    return report(rows, {"ms": rows[0].ms, "GB": rows[0].gb})


def steps(form: Callable[..., Tensor], make_leaves: Callable[[], Any]) -> Run:
    """Return steps that compute a loss and its gradients."""
    leaves = make_leaves()
    function = in_precision(form, "bf16")

    def step(number: int) -> None:
        torch.autograd.grad(function(*leaves), leaves)

    return repeat(step)


LINES = {
    "gloria": Line(
        name="gloria",
        measures="GLoRIA's local loss, B = 256, forward and backward",
        goals=(
            Goal(figure="ms", value=300, at_most=True),
            Goal(figure="GB", value=5, at_most=True),
        ),
        stock="loop over texts 1,290 ms and 136 GB; in chunks with Gram matrices 401 ms and 4.9 GB",
        seconds=55,
        function=measure_gloria,
    ),
    "info-nce": Line(
        name="info-nce",
        measures="InfoNCE of 65,536 pairs, 512 dimensions, forward and backward",
        goals=(Goal(figure="ms", value=55, at_most=True), Goal(figure="GB", value=2, at_most=True)),
        stock="58.7 ms and 1.9 GB in chunks, compiled; 152 ms and 69 GB plain",
        seconds=25,
        function=measure_info_nce,
    ),
}
