"""Benchmark of training against open_clip's trainer and a plain PyTorch loop with one model and the
same data.

    python scripts/benchmark_train.py                                       # a small CLIP, a CPU
    python scripts/benchmark_train.py --model ViT-B-32 --batch 1024 --precision bf16 --compile --workers 16 \\
        --patients 4000 --steps 20                                          # a GPU

*Step*: inputs on the device, 77 tokens per text; forward, loss, backward, AdamW, no clipping. *End
to end*: from files. medvl reads shards; open_clip's trainer (`open_clip_train`, its CSV dataset and
`train_one_epoch`) and the plain loop read a CSV of the JPEG files from which the shards were built,
with open_clip's validation transform, so without augmentation. medvl pads texts to the longest of a
batch, the others to 77 tokens. The contenders alternate round by round, so that other load affects
all; ratios are medians over rounds. `--clock cpu --workers 0` measures CPU seconds of this process,
for very busy CPUs.

`medvl doctor RECIPE` measures the parts of a recipe; `--doctor` does so for the CLIP of this
benchmark.
"""

import argparse
import csv
import dataclasses
import logging
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from open_clip_baseline import CLOCKS, LR, WEIGHT_DECAY, OpenClip, PairsOfFiles, model_sizes
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
from medvl.train.doctor.examine import describe, examine, synchronize
from medvl.train.loop.step import Step
from medvl.train.optim.optimizer import Precision, build_optimizer
from medvl.train.parallel.distributed import BatchStream, RankInfo, join, side_stream
from medvl.train.parallel.model import DDPModel
from medvl.train.tasks.pretraining import DataConfig, open_data

SMALL_IMAGE = {"embed_dim": 128, "patch_size": 16, "width": 192, "layers": 4, "head_width": 64}
SMALL_TEXT = {
    "embed_dim": 128,
    "context_length": 77,
    "width": 192,
    "num_hidden_layers": 3,
    "heads": 3,
}
"""`open_clip_baseline.SMALL` with medvl's names."""
CONTEXT = 77

Rate = Callable[[], float]
"""Function that measures one round and returns pairs per second."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a recipe that `examine` and `Run` need."""

    model: CLIPConfig
    data: DataConfig
    optim: OptimConfig
    train: TrainConfig


def main() -> None:
    """Write the data, run the benchmark and print its tables."""
    options = _options()
    logging.disable(logging.INFO)
    if options.clock == "cpu" and (options.workers or torch.cuda.is_available()):
        raise SystemExit(
            "--clock cpu measures this process only: use it with --workers 0 and without a GPU"
        )
    with tempfile.TemporaryDirectory() as name, join("auto") as world:
        folder = Path(name)
        write_data(folder, options.patients, options.image_size)
        settings = medvl_settings(folder, options)
        print(
            f"{options.model}, batch {options.batch}, {options.precision}, {world.device}, "
            f"{options.workers} workers,"
        )
        print(
            f"JPEGs of {options.image_size} px; torch {torch.__version__}, "
            f"{torch.get_num_threads()} threads"
        )
        show("step", alternate(steps(settings, options, world), options.repeats))
        show("end to end", alternate(trainers(settings, folder, options, world), options.repeats))
        if options.doctor:
            print("\n" + describe(examine(medvl_run(settings), options.doctor), settings))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="small", help="small, or the name of an open_clip model such as ViT-B-32"
    )
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument(
        "--compile", action="store_true", help="compile all models with torch.compile"
    )
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--steps", type=int, default=6, help="steps per round")
    parser.add_argument("--repeats", type=int, default=5, help="rounds of each contender")
    parser.add_argument(
        "--patients",
        type=int,
        default=120,
        help="patients of the phantom corpus, with about 2.2 images each",
    )
    parser.add_argument("--image-size", type=int, default=512, help="size of the JPEGs")
    parser.add_argument(
        "--clock", choices=CLOCKS, default="wall", help="cpu: for a CPU without workers"
    )
    parser.add_argument(
        "--doctor", type=float, metavar="SECONDS", help="examine medvl's run for this long as well"
    )
    return parser.parse_args()


def write_data(folder: Path, patients: int, size: int) -> None:
    """Write a phantom MIMIC-CXR-JPG as shards, and the same samples as a CSV of JPEG files."""
    phantom.write_mimic_cxr_jpg(folder / "corpus", patients=patients, size=size)
    deid = Deidentifier(bytes(32))
    plan = mimic_cxr.MimicCXR(root=folder / "corpus", split="train").plan(deid)
    write_shards(plan, deid, ShardRun(out=folder / "shards"), ShardOptions(short_side=size))
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
    """Return medvl's CLIP with the sizes of an open_clip model, or of the small one."""
    sizes, small = model_sizes(name), name == "small"
    tower = f"open_clip:{'custom' if small else name}"
    return CLIPConfig(
        image_encoder=tower,
        image_arguments=SMALL_IMAGE if small else {},
        text_encoder=tower,
        text_arguments=SMALL_TEXT if small else {},
        image_size=sizes["vision_cfg"]["image_size"],
        vocab_size=sizes["text_cfg"]["vocab_size"],
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
        if settings.train.compile:
            self.model.compile()
        self.optimizer = build_optimizer(self.model, settings.optim)
        self.precision = Precision(settings.train.precision, world.device)
        parallel = DDPModel(self.model, world)
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


def steps(settings: Settings, options: argparse.Namespace, world: RankInfo) -> dict[str, Rate]:
    """Return each contender's rate of steps, with inputs on the device."""
    ours, theirs, plain = Medvl(settings, world), OpenClip(options, world), OpenClip(options, world)
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
        step_times.append(CLOCKS[options.clock]())

    theirs.trainer(batches, options.steps + 1, mark)
    return options.steps * options.batch / (step_times[-1] - step_times[1])


def timed(updates: Iterable[int], options: argparse.Namespace, world: RankInfo) -> float:
    """Return pairs per second of an iterable of updates that yields their pairs, without the
    first one.
    """
    clock, iterator = CLOCKS[options.clock], iter(updates)
    next(iterator)
    synchronize(world.device)
    started = clock()
    pairs = sum(iterator)
    synchronize(world.device)
    return pairs / (clock() - started)


def trainers(
    settings: Settings, folder: Path, options: argparse.Namespace, world: RankInfo
) -> dict[str, Rate]:
    """Return each contender's rate from files to updates."""
    import open_clip

    ours, theirs, plain = Medvl(settings, world), OpenClip(options, world), OpenClip(options, world)
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


def show(title: str, rates: Mapping[str, list[float]]) -> None:
    """Print median rates, and medvl's rate relative to each contender in the same round."""
    ours = rates["medvl"]
    print(f"\n{title:26}{'pairs/s':>10}   medvl is")
    for name, theirs in rates.items():
        ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
        line = f"{name:26}{statistics.median(theirs):10.1f}"
        note = (
            f"   {statistics.median(ratios):.2f} times as fast ({min(ratios):.2f} to "
            f"{max(ratios):.2f})"
        )
        print(line if name == "medvl" else line + note)


if __name__ == "__main__":
    main()
