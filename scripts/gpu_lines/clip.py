"""CLIP's step in batches of 1,024, beside open_clip's own."""

import argparse
from collections.abc import Callable

import torch
from benchmark_train import clip_batch, clip_config
from open_clip_baseline import LR, WEIGHT_DECAY, OpenClip

from gpu_lines.bench import Bench
from gpu_lines.line import Goal, Line, Report, ratio, report
from gpu_lines.medvl_step import medvl_step
from gpu_lines.timing import Contender, Flops, Run, measure_in_turns, repeat
from medvl.models import create_model
from medvl.train import OptimConfig

OPTIM = OptimConfig(lr=LR, weight_decay=WEIGHT_DECAY, betas=(0.9, 0.98), eps=1e-6)
STEP = "open_clip: compiled model, ClipLoss, fused AdamW"


def measure_clip(bench: Bench, name: str, size: int) -> Report:
    """Measure medvl's step, open_clip's compiled model in a bare loop, and in its own trainer."""
    name = bench.size(name, "small")
    config = clip_config(name)
    batch, pair = clip_batch(config.image_size, size)
    images_BCHW, ids_BT = (part.to(bench.device) for part in pair)
    options = argparse.Namespace(model=name, compile=True, precision="bf16", batch=size)
    flops = Flops()
    theirs: list[OpenClip] = []

    def ours() -> Run:
        torch.manual_seed(0)
        model = create_model(config, pretrained=False, tokenizer=None)
        flops.count(model, batch, bench)
        return medvl_step(bench, model, [batch], optim=OPTIM, compile=True)

    def bare() -> Run:
        torch.manual_seed(0)
        theirs.append(OpenClip(options, bench.ranks, fused=bench.device.type == "cuda"))
        return repeat(lambda _: theirs[0].bare(images_BCHW, ids_BT))

    def trainer() -> Run:
        return lambda steps, mark: theirs[0].trainer(
            ((images_BCHW, ids_BT) for _ in range(steps)), steps, mark
        )

    rows = measure_in_turns(
        bench,
        (
            Contender(name="medvl: step, compiled", build=ours, samples=size, flops=flops),
            Contender(name=STEP, build=bare, samples=size, flops=flops),
            Contender(
                name="open_clip: its trainer, the same model",
                build=trainer,
                samples=size,
                flops=flops,
                shares=STEP,
            ),
        ),
    )
    step, stock, train_one_epoch = (row.rate for row in rows)
    figures = {
        "times open_clip's compiled step": ratio(step, stock),
        "times open_clip's trainer": ratio(step, train_one_epoch),
    }
    return report(rows, figures, f"B = {size:,}")


def measure_b32(bench: Bench) -> Report:
    """Measure ViT-B-32, whose steps of 1,024 pairs take less than 40 GB."""
    return measure_clip(bench, "ViT-B-32", bench.size(1024, 4))


def measure_b16(bench: Bench) -> Report:
    """Measure ViT-B-16, whose steps of 1,024 pairs take more than 80 GB."""
    return measure_clip(bench, "ViT-B-16", bench.large_batch(1024, 4))


def _line(
    name: str, function: Callable[[Bench], Report], sizes: str, stock: str, seconds: float
) -> Line:
    return Line(
        name=name,
        measures=f"CLIP {sizes}, 77 tokens: the step",
        goals=(Goal(figure="times open_clip's compiled step", value=1.15),),
        stock=f"{stock} pairs/s compiled, fused AdamW",
        seconds=seconds,
        function=function,
    )


LINES = {
    "clip-b32": _line("clip-b32", measure_b32, "ViT-B-32, B = 1,024", "6,669", 125),
    "clip-b16": _line(
        "clip-b16", measure_b16, "ViT-B-16, B = 1,024 (512 below 100 GB)", "2,949", 130
    ),
}
