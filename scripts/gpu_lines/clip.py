"""CLIP's step in batches of 1,024, beside open_clip's own."""

import argparse
import functools

import torch
from benchmark_train import clip_batch, clip_config
from open_clip_baseline import LR, WEIGHT_DECAY, OpenClip

from gpu_lines.bench import Bench
from gpu_lines.line import Goal, Line, Report, ratio, report
from gpu_lines.medvl_step import medvl_step, precision
from gpu_lines.timing import Contender, Run, measure_in_turns, repeat, set_flops
from medvl.models import create_model
from medvl.train import OptimConfig
from medvl.train.doctor.timers import flops_per_sample  # internal: the figures are those of `medvl doctor`

OPTIM = OptimConfig(lr=LR, weight_decay=WEIGHT_DECAY, betas=(0.9, 0.98), eps=1e-6)
STEP = "open_clip: compiled model, ClipLoss, fused AdamW"


def measure_clip(bench: Bench, name: str) -> Report:
    """Measure medvl's step, open_clip's compiled model in a bare loop, and in its own trainer."""
    size, name = bench.size(1024, 4), bench.size(name, "small")
    config = clip_config(name)
    batch, pair = clip_batch(config.image_size, size)
    images_BCHW, ids_BT = (part.to(bench.device) for part in pair)
    options = argparse.Namespace(model=name, compile=True, precision="bf16", batch=size)
    counted: list[float] = []
    theirs: list[OpenClip] = []

    def ours() -> Run:
        torch.manual_seed(0)
        model = create_model(config, pretrained=False, tokenizer=None).to(bench.device)
        counted.append(flops_per_sample(model, batch.to(bench.device), precision(bench)))
        return medvl_step(bench, model, [batch], optim=OPTIM, compile=True)

    def bare() -> Run:
        torch.manual_seed(0)
        theirs.append(OpenClip(options, bench.ranks, fused=bench.device.type == "cuda"))
        return repeat(lambda _: theirs[0].bare(images_BCHW, ids_BT))

    def trainer() -> Run:
        return lambda steps, mark: theirs[0].trainer(((images_BCHW, ids_BT) for _ in range(steps)), steps, mark)

    rows = measure_in_turns(
        bench,
        (
            Contender(name="medvl: step, compiled", build=ours, samples=size),
            Contender(name=STEP, build=bare, samples=size),
            Contender(name="open_clip: its trainer, the same model", build=trainer, samples=size, shares=STEP),
        ),
    )
    for row in rows:
        set_flops(row, counted[0] if counted else None, bench)
    step, stock, train_one_epoch = (row.rate for row in rows)
    figures = {
        "times open_clip's compiled step": ratio(step, stock),
        "times open_clip's trainer": ratio(step, train_one_epoch),
    }
    return report(rows, figures)


def _line(name: str, model: str, stock: str, seconds: float) -> Line:
    return Line(
        name=name,
        measures=f"CLIP {model}, B = 1,024, 77 tokens: the step",
        goals=(Goal(figure="times open_clip's compiled step", value=1.15),),
        stock=f"{stock} pairs/s compiled, fused AdamW",
        seconds=seconds,
        function=functools.partial(measure_clip, name=model),
    )


LINES = {
    "clip-b32": _line("clip-b32", "ViT-B-32", "6,669", 130),
    "clip-b16": _line("clip-b16", "ViT-B-16", "2,949", 140),
}
