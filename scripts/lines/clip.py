"""CLIP's training step beside open_clip's trainer and a plain PyTorch loop, with one model and the
same data.

In memory: inputs on the device, 77 tokens per text; forward, loss, backward, AdamW, no clipping.
From files: medvl reads shards; open_clip's trainer (`open_clip_train`, its CSV dataset and
`train_one_epoch`) and the plain loop read a CSV of the JPEG files from which the shards were built,
with open_clip's validation transform, so without augmentation. medvl pads texts to the longest of a
batch, the others to 77 tokens. Ratios are medians over rounds, in CPU seconds of this process.
"""

import argparse
import csv
import dataclasses
import importlib.util
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from measure.bench import Bench
from measure.line import Line, Report, SkipLine, TableRow, ratio, report
from measure.medvl_step import medvl_step
from measure.open_clip_baseline import LR, SIZES, WEIGHT_DECAY, OpenClip, PairsOfFiles, model_sizes
from measure.timing import Contender, Flops, Run as Steps, measure_in_turns, repeat
from torch import Tensor
from torch.utils.data import DataLoader

from medvl import phantom
from medvl.data import (
    Deidentifier,
    EvalTransform,
    ShardOptions,
    ShardRun,
    ShardSource,
    WholeText,
    load_tokenizer,
    write_shards,
)
from medvl.data.corpora.reports import mimic_cxr
from medvl.models import CLIPConfig, create_model
from medvl.schema import Batch
from medvl.train import OptimConfig, Run, TrainConfig

# Internals on purpose: the benchmark times parts of the training loop alone.
from medvl.train.doctor.examine import synchronize
from medvl.train.loop.step import Step, against_cuda_graphs, compile_model
from medvl.train.optim.optimizer import Precision, build_optimizer
from medvl.train.parallel.distributed import BatchStream, RankInfo, side_stream
from medvl.train.parallel.model import DDPModel
from medvl.train.tasks.pretraining import DataConfig, open_data

CONTEXT = 77

Rate = Callable[[], float]
"""Function that measures one round and returns pairs per second."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a recipe that `Run` needs."""

    model: CLIPConfig
    data: DataConfig
    optim: OptimConfig
    train: TrainConfig


def measure_training(bench: Bench) -> Report:
    """Measure a small CLIP's step in memory and from files, without workers.

    Raises SkipLine without pandas, which open_clip's trainer needs.
    """
    if importlib.util.find_spec("pandas") is None:
        raise SkipLine("open_clip's trainer needs pandas: pip install medvl[bench]")
    steps_of_round, repeats = bench.size((5, 5), (1, 1))
    patients, pixels = bench.size((35, 512), (6, 64))
    options = argparse.Namespace(
        model=bench.size("small", "tiny"),
        batch=bench.size(16, 4),
        precision="bf16",
        compile=False,
        workers=0,
        steps=steps_of_round,
    )
    folder = bench.folder / "clip"
    write_data(folder, patients, pixels)
    settings = medvl_settings(folder, options)
    contenders = Contenders(settings, options, bench.ranks)
    step = alternate(steps(contenders), repeats)
    files = alternate(trainers(contenders, folder), repeats)
    figures: dict[str, float | None] = {}
    for place, rates in (("step", step), ("files", files)):
        figures |= {f"{place}, {name}, pairs/s": statistics.median(rates[name]) for name in rates}
    figures["step beside open_clip"] = median_ratio(step, "open_clip's trainer")
    figures["step beside a plain loop"] = median_ratio(step, "plain PyTorch loop")
    figures["files beside open_clip"] = median_ratio(files, "open_clip's trainer")
    figures["files beside a plain loop"] = median_ratio(files, "plain PyTorch loop")
    return report([], figures)


def median_ratio(rates: Mapping[str, list[float]], name: str) -> float:
    """Return medvl's rate relative to a contender's in the same round, the median."""
    pairs = zip(rates["medvl"], rates[name], strict=True)
    return statistics.median(ours / theirs for ours, theirs in pairs)


def write_data(folder: Path, patients: int, size: int) -> None:
    """Write a phantom MIMIC-CXR-JPG as shards, and the same samples as a CSV of JPEG files."""
    phantom.write_mimic_cxr_jpg(folder / "corpus", patients=patients, size=size, workers=1)
    deid = Deidentifier(bytes(32))
    plan = mimic_cxr.MimicCXR(root=folder / "corpus", split="train").plan(deid)
    write_shards(
        plan, deid, ShardRun(out=folder / "shards", workers=1), ShardOptions(short_side=size)
    )
    source = ShardSource(folder / "shards/train")
    paths = {record.sample.key: record.sample.image for record in plan.records}
    policy, rng = WholeText(sections=("impression",)), np.random.default_rng(0)
    with (folder / "pairs.csv").open("w", newline="") as file:
        rows = csv.writer(file, delimiter="\t")
        rows.writerow(["filepath", "title"])
        for position in range(len(source)):
            sample = source.sample(position)
            text = " ".join(policy(sample.sections, rng).split()) or "-"
            rows.writerow([paths[sample.key], text])


def medvl_settings(folder: Path, options: argparse.Namespace) -> Settings:
    """Return the settings of a medvl run with this model and data."""
    model = clip_config(options.model)
    data = DataConfig(
        train=str(folder / "shards/train"),
        valid=None,
        text=WholeText(sections=("impression",)),
        image=EvalTransform(size=model.image_size),
        workers=options.workers,
    )
    return Settings(
        model=model,
        data=data,
        optim=OptimConfig(lr=LR, weight_decay=WEIGHT_DECAY, betas=(0.9, 0.98)),
        train=TrainConfig(
            run_dir=folder / "run",
            epochs=1,
            global_batch=options.batch,
            precision=options.precision,
            compile=options.compile,
        ),
    )


def clip_config(name: str) -> CLIPConfig:
    """Return medvl's CLIP with the sizes of an open_clip model, or one of `SIZES`."""
    sizes = model_sizes(name)
    image, text = sizes["vision_cfg"], sizes["text_cfg"]
    tower = f"open_clip:{name}"
    image_arguments: dict[str, Any] = {}
    text_arguments: dict[str, Any] = {}
    if name in SIZES:
        tower = "open_clip:custom"
        shared = {"embed_dim": sizes["embed_dim"]}
        image_fields = ("patch_size", "width", "layers", "head_width")
        image_arguments = shared | {field: image[field] for field in image_fields}
        text_fields = ("context_length", "width", "heads")
        text_arguments = shared | {field: text[field] for field in text_fields}
        text_arguments["num_hidden_layers"] = text["layers"]
    return CLIPConfig(
        image_encoder=tower,
        image_arguments=image_arguments,
        text_encoder=tower,
        text_arguments=text_arguments,
        image_size=image["image_size"],
        vocab_size=text["vocab_size"],
    )


def clip_batch(side: int, count: int) -> tuple[Batch, tuple[Tensor, Tensor]]:
    """Return random inputs with full texts, as medvl's batch of grey images and as open_clip's
    images and ids.
    """
    generator, vocabulary = torch.Generator().manual_seed(0), 49407
    grey_BCHW = torch.randint(
        0, 256, (count, 1, side, side), dtype=torch.uint8, generator=generator
    )
    ids_BT = torch.randint(1, vocabulary, (count, CONTEXT), generator=generator)
    ids_BT[:, -1] = vocabulary
    batch = Batch(
        keys=[str(row) for row in range(count)],
        image_BCHW=grey_BCHW,
        ids_BT=ids_BT,
        mask_BT=torch.ones_like(ids_BT, dtype=torch.bool),
        labels_BL=torch.zeros(count, 0),
        texts=[""] * count,
    )
    return batch, ((grey_BCHW.float() / 255).expand(-1, 3, -1, -1).contiguous(), ids_BT)


def medvl_run(settings: Settings) -> Run:
    """Return a run with model and loader."""
    model = create_model(settings.model, tokenizer=load_tokenizer("clip", max_tokens=CONTEXT))
    loaders = open_data(settings.data, model, settings.train.micro_batch)
    return Run(recipe="benchmark", settings=settings, model=model, data=loaders)


class Medvl:
    """medvl's training step and loader."""

    def __init__(self, settings: Settings, world: RankInfo) -> None:
        run = medvl_run(settings)
        self.model, self.world = run.model.to(world.device).train(), world
        parallel = DDPModel(self.model, world)
        if settings.train.compile:
            compile_model(parallel, against_cuda_graphs(parallel))
        self.optimizer = build_optimizer(self.model, settings.optim)
        self.precision = Precision(settings.train.precision, world.device)
        self.step = Step(
            parallel, self.optimizer, self.precision, seed=0, clip_norm=None, channels_last=False
        )
        self.batches, self._number = (
            BatchStream(run.data.train, 1, side_stream(world.device, channels_last=False)),
            0,
        )

    def bare(self, batch: Batch) -> None:
        """Run forward, backward and update without the rest of the loop."""
        with self.precision.autocast():
            loss = self.model(batch).total
        self.precision.backward(loss)
        self.precision.step(self.optimizer)
        self.optimizer.zero_grad(set_to_none=True)

    def epoch(self, steps: int) -> Iterator[int]:
        """Run steps from the loader; yield the pairs of each."""
        for _ in range(steps):
            result = self.step(self._number, LR, self.batches.take(self._number), 1)
            self._number += 1
            yield result.pairs


class Contenders:
    """Models of one size with their optimisers, and the settings of all."""

    def __init__(self, settings: Settings, options: argparse.Namespace, world: RankInfo) -> None:
        self.settings, self.options, self.world = settings, options, world
        self.ours = Medvl(settings, world)
        self.theirs = OpenClip(options, world)
        self.plain = OpenClip(options, world)


def steps(contenders: Contenders) -> dict[str, Rate]:
    """Return each contender's rate of steps, with inputs on the device."""
    settings, options, world = contenders.settings, contenders.options, contenders.world
    ours, theirs, plain = contenders.ours, contenders.theirs, contenders.plain
    parameters = [
        sum(parameter.numel() for parameter in each.model.parameters()) for each in (ours, theirs)
    ]
    if parameters[0] != parameters[1]:
        raise SystemExit(
            f"expected equal models, got {parameters[0]} and {parameters[1]} parameters"
        )
    batch, pair = clip_batch(settings.model.image_size, options.batch)
    batch, pair = batch.to(world.device), (pair[0].to(world.device), pair[1].to(world.device))

    def rate(step: Callable[[], object]) -> Rate:
        def pairs() -> Iterator[int]:
            for _ in range(options.steps + 1):
                step()
                yield options.batch

        return lambda: timed(pairs(), options, world)

    return {
        "medvl": rate(lambda: ours.step(0, LR, [batch], 1)),
        "bare loop, medvl's model": rate(lambda: ours.bare(batch)),
        "open_clip's trainer": lambda: trainer_rate(
            theirs, (pair for _ in range(options.steps + 1)), options
        ),
        "plain PyTorch loop": rate(lambda: plain.plain(*pair)),
    }


def trainer_rate(
    theirs: OpenClip, batches: Iterable[tuple[Tensor, Tensor]], options: argparse.Namespace
) -> float:
    """Return pairs per second from the second step on; the first one waits for the workers.

    As in `timed`, the device is waited for after the first step and after the last one only.
    """
    step_times: list[float] = []

    def mark() -> None:
        if len(step_times) in (1, options.steps + 1):
            synchronize(theirs.world.device)
        step_times.append(time.process_time())

    theirs.trainer(batches, options.steps + 1, mark)
    return options.steps * options.batch / (step_times[-1] - step_times[1])


def timed(updates: Iterable[int], options: argparse.Namespace, world: RankInfo) -> float:
    """Return pairs per second of an iterable of updates that yields their pairs, without the
    first one.
    """
    clock, iterator = time.process_time, iter(updates)
    next(iterator)
    synchronize(world.device)
    started = clock()
    pairs = sum(iterator)
    synchronize(world.device)
    return pairs / (clock() - started)


def trainers(contenders: Contenders, folder: Path) -> dict[str, Rate]:
    """Return each contender's rate from files to updates."""
    import open_clip

    settings, options, world = contenders.settings, contenders.options, contenders.world
    ours, theirs, plain = contenders.ours, contenders.theirs, contenders.plain
    transform = open_clip.image_transform(settings.model.image_size, is_train=False)
    tokenize = open_clip.SimpleTokenizer(context_length=CONTEXT)
    arguments = SimpleNamespace(
        train_data=str(folder / "pairs.csv"), csv_img_key="filepath", csv_caption_key="title",
        csv_separator="\t", distributed=False, batch_size=options.batch, workers=options.workers,
    )  # fmt: skip
    loader = (
        import_module("open_clip_train.data")
        .get_csv_dataset(arguments, transform, is_train=True, tokenizer=tokenize)
        .dataloader
    )
    own = DataLoader(
        PairsOfFiles(folder / "pairs.csv", transform, tokenize),
        batch_size=options.batch,
        shuffle=True,
        num_workers=options.workers,
        drop_last=True,
        pin_memory=world.device.type == "cuda",
    )

    def plain_epoch() -> Iterator[int]:
        for _, (images_BCHW, ids_BT) in zip(range(options.steps + 1), own, strict=False):
            plain.plain(images_BCHW, ids_BT)
            yield len(ids_BT)

    if len(own) <= options.steps:
        raise SystemExit(
            f"expected more than {options.steps} batches per epoch, got {len(own)}: increase "
            f"--patients"
        )
    return {
        "medvl": lambda: timed(ours.epoch(options.steps + 1), options, world),
        "open_clip's trainer": lambda: trainer_rate(theirs, loader, options),
        "plain PyTorch loop": lambda: timed(plain_epoch(), options, world),
    }


def alternate(contenders: Mapping[str, Rate], repeats: int) -> dict[str, list[float]]:
    """Return the rates of each contender, measured round by round without the first round."""
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(repeats + 1):
        for name, rate in contenders.items():
            measured = rate()
            if number:
                rates[name].append(measured)
    return rates


OPTIM = OptimConfig(lr=LR, weight_decay=WEIGHT_DECAY, betas=(0.9, 0.98), eps=1e-6)
STEP = "open_clip: compiled model, ClipLoss, fused AdamW"


def measure_clip(bench: Bench, name: str, size: int) -> Report:
    """Measure medvl's step, open_clip's compiled model in a bare loop, and in its own trainer."""
    name = bench.size(name, "tiny")
    config = clip_config(name)
    batch, pair = clip_batch(config.image_size, size)
    images_BCHW, ids_BT = (part.to(bench.device) for part in pair)
    options = argparse.Namespace(model=name, compile=True, precision="bf16", batch=size)
    flops = Flops()
    theirs: list[OpenClip] = []

    def ours() -> Steps:
        torch.manual_seed(0)
        model = create_model(config, pretrained=False, tokenizer=None)
        flops.count(model, batch, bench)
        return medvl_step(bench, model, [batch], optim=OPTIM, compile=True)

    def bare() -> Steps:
        torch.manual_seed(0)
        theirs.append(OpenClip(options, bench.ranks, fused=bench.device.type == "cuda"))
        return repeat(lambda _: theirs[0].bare(images_BCHW, ids_BT))

    def trainer() -> Steps:
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


PEERS = "open_clip's trainer; plain PyTorch loop"
LINES = (
    Line(
        name="clip-cpu",
        device="cpu",
        measures="a small CLIP, in memory and from files, beside open_clip's trainer and a plain "
        "loop",
        unit="times as fast",
        rows=(
            TableRow(
                title="CLIP, training step in memory",
                peer=PEERS,
                ours="{step beside open_clip:.2f}; {step beside a plain loop:.2f} times as fast",
            ),
            TableRow(
                title="CLIP, from files to updates",
                peer=PEERS,
                ours="{files beside open_clip:.2f}; {files beside a plain loop:.2f} times",
            ),
        ),
        seconds=300,
        function=measure_training,
    ),
    Line(
        name="clip-b32",
        device="gpu",
        measures="CLIP ViT-B-32, B = 1,024, 77 tokens: the step, beside open_clip's, compiled",
        unit="pairs/s",
        rows=(
            TableRow(
                title="`clip-b32`: ViT-B-32, batch 1,024, step",
                target="1.15 times the peer",
                peer="open_clip compiled: {rows[1].rate:,.0f} pairs/s",
                ours="{rows[0].rate:,.0f} pairs/s, {times open_clip's compiled step:.3f} times",
            ),
        ),
        seconds=125,
        function=measure_b32,
    ),
    Line(
        name="clip-b16",
        device="gpu",
        measures="CLIP ViT-B-16, B = 1,024 (512 below 100 GB), 77 tokens: the step, beside "
        "open_clip's, compiled",
        unit="pairs/s",
        rows=(
            TableRow(
                title="`clip-b16`: ViT-B-16, step",
                target="1.15 times the peer",
                peer="open_clip compiled: {rows[1].rate:,.0f} pairs/s",
                ours="{rows[0].rate:,.0f} pairs/s, {times open_clip's compiled step:.3f} times",
            ),
        ),
        seconds=130,
        function=measure_b16,
    ),
)
