"""Training against open_clip's trainer and a plain PyTorch loop: one model, the same images and texts, one run.

    python scripts/benchmark_train.py                                       # a small CLIP, a CPU
    python scripts/benchmark_train.py --model ViT-B-32 --batch 1024 --precision bf16 --compile --workers 16 \\
        --patients 4000 --steps 20                                          # a GPU

Two tables. *Step*: inputs on the device, 77 tokens for all; forward, loss, backward, clipping nothing, AdamW. *End to
end*: from files. medvl reads shards; open_clip's trainer (`open_clip_train`, its own CSV dataset, its own
`train_one_epoch`) and the plain loop read a CSV of the very JPEG files that the shards were made of, with open_clip's
validation transform, so that nobody augments. medvl pads texts to the longest of a batch, the others to 77. The
contenders take turns, round by round, so that a busy machine is busy for all; ratios are medians over rounds. Where a
CPU is too busy even for that, `--clock cpu --workers 0` counts the seconds that the process was given.

`medvl doctor RECIPE` measures a recipe part by part; `--doctor` does that here, for the CLIP of the tables.
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
from open_clip_baseline import CLOCKS, LR, WEIGHT_DECAY, OpenClip, PairsOfFiles, sizes_of
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
from medvl.data.corpora import mimic_cxr
from medvl.models import create_model
from medvl.models.dual_encoders.clip import CLIPConfig
from medvl.schema import Batch
from medvl.train.config import OptimConfig, TrainConfig
from medvl.train.doctor.diagnosis import describe
from medvl.train.doctor.examine import examine
from medvl.train.doctor.timers import synchronize
from medvl.train.loop.step import Step
from medvl.train.optim.optimizer import build_optimizer
from medvl.train.optim.precision import Precision
from medvl.train.parallel.batches import BatchStream
from medvl.train.parallel.distributed import RankInfo, join
from medvl.train.parallel.prefetch import side_stream
from medvl.train.run import Run
from medvl.train.tasks.pretraining import DataConfig, open_data

SMALL_IMAGE = {"embed_dim": 128, "patch_size": 16, "width": 192, "layers": 4, "head_width": 64}
SMALL_TEXT = {"embed_dim": 128, "context_length": 77, "width": 192, "num_hidden_layers": 3, "heads": 3}
"""`open_clip_baseline.SMALL` in medvl's words."""
CONTEXT = 77

Rate = Callable[[], float]
"""One round: pairs a second."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What `examine` and `Run` read of a recipe."""

    model: CLIPConfig
    data: DataConfig
    optim: OptimConfig
    train: TrainConfig


def main() -> None:
    """Make the data, measure in turns, print."""
    options = _options()
    logging.disable(logging.INFO)
    if options.clock == "cpu" and (options.workers or torch.cuda.is_available()):
        raise SystemExit("--clock cpu counts this process alone: --workers 0, and no GPU")
    with tempfile.TemporaryDirectory() as name, join("auto") as world:
        folder = Path(name)
        write_data(folder, options.patients, options.image_size)
        settings = medvl_settings(folder, options)
        print(
            f"{options.model}, batch {options.batch}, {options.precision}, {world.device}, {options.workers} workers,"
        )
        print(f"JPEGs of {options.image_size} px; torch {torch.__version__}, {torch.get_num_threads()} threads")
        show("step", take_turns(steps(settings, options, world), options.repeats))
        show("end to end", take_turns(trainers(settings, folder, options, world), options.repeats))
        if options.doctor:
            print("\n" + describe(examine(medvl_run(settings), options.doctor), settings))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="small", help="small, or a name of open_clip's such as ViT-B-32")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--compile", action="store_true", help="all models, by torch.compile")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--steps", type=int, default=6, help="of a round")
    parser.add_argument("--repeats", type=int, default=5, help="rounds of each contender")
    parser.add_argument("--patients", type=int, default=120, help="of the phantom corpus; about 2.2 images each")
    parser.add_argument("--image-size", type=int, default=512, help="of the JPEGs")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: for a CPU without workers")
    parser.add_argument("--doctor", type=float, metavar="SECONDS", help="examine medvl's run as well")
    return parser.parse_args()


def write_data(folder: Path, patients: int, size: int) -> None:
    """A phantom MIMIC-CXR-JPG as shards, and the same samples as a CSV of JPEG files."""
    phantom.write_mimic_cxr_jpg(folder / "corpus", patients=patients, size=size)
    deid = Deidentifier(bytes(32))
    plan = mimic_cxr.plan(folder / "corpus", deid, split="train")
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
    """The same model and data as a run of medvl."""
    sizes = sizes_of(options.model)
    side = sizes["vision_cfg"]["image_size"]
    small = options.model == "small"
    tower = f"open_clip:{'custom' if small else options.model}"
    model = CLIPConfig(
        image_encoder=tower,
        image_arguments=SMALL_IMAGE if small else {},
        text_encoder=tower,
        text_arguments=SMALL_TEXT if small else {},
        image_size=side,
        vocab_size=sizes["text_cfg"]["vocab_size"],
    )
    data = DataConfig(
        train=str(folder / "shards/train"),
        valid=None,
        text=WholeText(sections=("impression",)),
        image=EvalTransform(size=side),
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


def medvl_run(settings: Settings) -> Run:
    """Model and loader."""
    model = create_model(settings.model, tokenizer=load_tokenizer("clip", max_tokens=CONTEXT))
    opened = open_data(settings.data, model, settings.train.micro_batch)
    return Run(recipe="benchmark", settings=settings, model=model, data=opened)


class Medvl:
    """medvl's step and loader."""

    def __init__(self, settings: Settings, world: RankInfo) -> None:
        run = medvl_run(settings)
        self.model, self.world = run.model.to(world.device).train(), world
        if settings.train.compile:
            self.model.compile()
        self.optimizer = build_optimizer(self.model, settings.optim)
        self.precision = Precision(settings.train.precision, world.device)
        self.step = Step(self.model, self.optimizer, self.precision, world, seed=0, clip_norm=None, channels_last=False)
        self.feed, self._number = BatchStream(run.data.train, 1, side_stream(world.device, channels_last=False)), 0

    def bare(self, batch: Batch) -> None:
        """Forward, backward and update, and nothing around them."""
        with self.precision.autocast():
            loss = self.model(batch).total
        self.precision.backward(loss)
        self.precision.update(self.optimizer)
        self.optimizer.zero_grad(set_to_none=True)

    def epoch(self, steps: int) -> Iterator[int]:
        """Steps from the loader; yields after each."""
        for _ in range(steps):
            outcome = self.step(self._number, LR, self.feed.take(self._number), 1)
            self._number += 1
            yield outcome.pairs


def steps(settings: Settings, options: argparse.Namespace, world: RankInfo) -> dict[str, Rate]:
    """Each contender's step on inputs that are on the device."""
    ours, theirs, plain = Medvl(settings, world), OpenClip(options, world), OpenClip(options, world)
    parameters = [sum(parameter.numel() for parameter in each.model.parameters()) for each in (ours, theirs)]
    if parameters[0] != parameters[1]:
        raise SystemExit(f"the models differ: {parameters[0]} and {parameters[1]} parameters")
    generator = torch.Generator().manual_seed(0)
    side, vocabulary = settings.model.image_size, 49407
    grey_BCHW = torch.randint(0, 256, (options.batch, 1, side, side), dtype=torch.uint8, generator=generator)
    ids_BT = torch.randint(1, vocabulary, (options.batch, CONTEXT), generator=generator)
    ids_BT[:, -1] = vocabulary
    batch = Batch(
        keys=[str(row) for row in range(options.batch)],
        image_BCHW=grey_BCHW,
        ids_BT=ids_BT,
        mask_BT=torch.ones_like(ids_BT, dtype=torch.bool),
        labels_BL=torch.zeros(options.batch, 0),
        texts=[""] * options.batch,
    ).to(world.device)
    images_BCHW = (grey_BCHW.float() / 255).expand(-1, 3, -1, -1).contiguous().to(world.device)
    pair = images_BCHW, ids_BT.to(world.device)

    def rate(step: Callable[[], object]) -> Rate:
        def pairs() -> Iterator[int]:
            for _ in range(options.steps + 1):
                step()
                yield options.batch

        return lambda: timed(pairs(), options, world)

    return {
        "medvl": rate(lambda: ours.step(0, LR, [batch], 1)),
        "bare loop, medvl's model": rate(lambda: ours.bare(batch)),
        "open_clip's trainer": lambda: trainer_rate(theirs, (pair for _ in range(options.steps + 1)), options),
        "plain PyTorch loop": rate(lambda: plain.plain(*pair)),
    }


def trainer_rate(theirs: OpenClip, batches: Iterable[tuple[Tensor, Tensor]], options: argparse.Namespace) -> float:
    """Pairs a second from the second step's start on: the first one waits for the workers to start."""
    marks: list[float] = []
    theirs.trainer(batches, options.steps + 1, marks)
    return options.steps * options.batch / (marks[-1] - marks[1])


def timed(updates: Iterable[int], options: argparse.Namespace, world: RankInfo) -> float:
    """Pairs a second of an iterable that makes updates and gives their pairs; the first one is not counted."""
    clock, iterator = CLOCKS[options.clock], iter(updates)
    next(iterator)
    synchronize(world.device)
    started = clock()
    pairs = sum(iterator)
    synchronize(world.device)
    return pairs / (clock() - started)


def trainers(settings: Settings, folder: Path, options: argparse.Namespace, world: RankInfo) -> dict[str, Rate]:
    """Each contender from files to updates."""
    import open_clip

    ours, theirs, plain = Medvl(settings, world), OpenClip(options, world), OpenClip(options, world)
    transform = open_clip.image_transform(settings.model.image_size, is_train=False)
    tokenize = open_clip.SimpleTokenizer(context_length=CONTEXT)
    arguments = SimpleNamespace(
        train_data=str(folder / "pairs.csv"), csv_img_key="filepath", csv_caption_key="title", csv_separator="\t",
        distributed=False, batch_size=options.batch, workers=options.workers,
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
        raise SystemExit(f"{len(own)} batches an epoch are too few for {options.steps} steps: more --patients")
    return {
        "medvl": lambda: timed(ours.epoch(options.steps + 1), options, world),
        "open_clip's trainer": lambda: trainer_rate(theirs, loader, options),
        "plain PyTorch loop": lambda: timed(plain_epoch(), options, world),
    }


def take_turns(contenders: Mapping[str, Rate], repeats: int) -> dict[str, list[float]]:
    """Rates of each contender, round by round; a first round is not counted."""
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(repeats + 1):
        for name, rate in contenders.items():
            measured = rate()
            if number:
                rates[name].append(measured)
    return rates


def show(title: str, rates: Mapping[str, list[float]]) -> None:
    """Medians, and how often medvl's rate each one's is in the same round."""
    ours = rates["medvl"]
    print(f"\n{title:26}{'pairs/s':>10}   medvl is")
    for name, theirs in rates.items():
        ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
        line = f"{name:26}{statistics.median(theirs):10.1f}"
        note = f"   {statistics.median(ratios):.2f} times as fast ({min(ratios):.2f} to {max(ratios):.2f})"
        print(line if name == "medvl" else line + note)


if __name__ == "__main__":
    main()
