"""Part of `compare_dual.py` and `compare_fusion.py`: data of all runs; training and cost of one run."""

import argparse
import csv
import dataclasses
import json
import os
import resource
import runpy
import statistics
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from medvl.data import ConVIRTAugmentation, ShardSource, encode_png, label_fraction
from medvl.errors import ConfigError, EvaluationError
from medvl.eval import Results, write_results
from medvl.models import TowersConfig, save
from medvl.train import Recipe

ROOT = Path(__file__).parents[1]
Evaluation = Callable[[Path, "Sizes"], Results]
"""An evaluation of a checkpoint."""
TASKS = ("zero-shot", "retrieval", "grounding", "probe")
"""Evaluations of every dual-encoder."""
ENCODERS: dict[str, Any] = {"image_encoder": "resnet_tiny", "text_encoder": "tiny_bert", "image_size": 112}
"""Settings that are the same for every system."""
CHANGES: Mapping[str, Mapping[str, Any]] = {
    **{name: {"text_arguments": {}} for name in ("chexzero", "clip", "siglip")},
    "umrl": {"text_encoder": "static"},
}
"""Fields of the model that do not fit `ENCODERS`: arguments of open_clip's text encoder; UMRL's TF-IDF with PCA."""
IMAGE_FROM = {"umrl": "convirt"}
"""Systems on a frozen image encoder -> the run of the same seed that has trained it."""
PAIRED, UNPAIRED = "paired-tenth/train", "unpaired-rest/train"
SECTIONS = ("findings", "impression")
STORED = ("--short-side", "160")
COST, REFUSAL = "cost.json", "unsupported.txt"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preset:
    """A preset of a recipe, and the configuration that is trained with its settings."""

    recipe: Path
    preset: str
    config: type[Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run(Preset):
    """A training run and its evaluations."""

    name: str
    """System, or a name of its own where a system is trained in several ways."""
    seed: int
    changes: dict[str, Any]
    """Fields of the model besides or in place of `ENCODERS`."""
    train: tuple[str, ...] = ("shards/train",)
    """Folders of training shards below the data folder."""
    tasks: tuple[str, ...] = TASKS
    image_from: str | None = None
    """Run of the same seed whose image encoder the recipe takes (its setting `image_from`)."""

    @property
    def id(self) -> str:
        """Name and seed."""
        return f"{self.name}-{self.seed}"

    def results(self, home: Path, weights: str, task: str) -> Path:
        """Return the folder of an evaluation; `weights` are "trained" or "start"."""
        return home / self.id / "results" / weights / task

    def finished(self, home: Path) -> bool:
        """Return whether the run was trained and evaluated; `home` is the folder of all runs."""
        folders = [self.results(home, weights, task) for weights in ("trained", "start") for task in self.tasks]
        return (home / self.id / COST).is_file() and all(map(is_evaluated, folders))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes that all runs share."""

    data: Path
    patients: int
    side: int
    """Height and width of the phantom's files."""
    steps: int
    batch: int
    workers: int
    resamples: int

    @property
    def home(self) -> Path:
        """Folder of all runs; runs of another length have another one."""
        return self.data / "compare" / f"{self.steps}x{self.batch}"


def is_evaluated(folder: Path) -> bool:
    """Return whether an evaluation is done, or was found not to apply."""
    return (folder / "results.json").is_file() or (folder / REFUSAL).is_file()


def make_run(name: str, preset: Preset, seed: int, **fields: Any) -> Run:
    """Return the run of a dual-encoder; `fields` are those of `Run`."""
    changes = {**ENCODERS, **CHANGES.get(preset.config.system, {}), **fields.pop("changes", {})}
    fields.setdefault("image_from", IMAGE_FROM.get(preset.config.system))
    return Run(name=name, seed=seed, **vars(preset), changes=changes, **fields)


def make_data(sizes: Sizes, needed: Collection[str]) -> None:
    """Write the shards and the vocabulary that do not exist yet.

    `needed` are folders of training shards and evaluations: "change" needs pairs of studies, `PAIRED` and `UNPAIRED`
    the training shards divided.
    """
    data, side, views = sizes.data, sizes.side, ("--views", "PA", "AP")
    data.mkdir(parents=True, exist_ok=True)
    salt = data / "salt"
    if not salt.exists():  # as in scripts/quickstart.sh
        salt.write_text("0" * 64 + "\n")
    os.environ.setdefault("MEDVL_SALT_FILE", str(salt))
    if not _complete(data / "shards/test"):
        size = ("--patients", sizes.patients, "--size", side, "--frontal-only")
        medvl("phantom", "mimic-cxr", "--out", data / "mimic-cxr", *size)
        medvl("shards", "mimic-cxr", "--root", data / "mimic-cxr", "--out", data / "shards", *views, *STORED)
    if not (data / "vocab/tokenizer.json").is_file():
        medvl("vocab", data / "shards/train", data / "vocab", "--size", 4000)
    few = max(4, sizes.patients * 3 // 14)  # 600 for 2,800
    for corpus, seed in (("ms-cxr", 32), *((("ms-cxr-t", 33),) if "change" in needed else ())):
        if not _complete(data / f"{corpus}-shards/test"):
            medvl("phantom", corpus, "--out", data / corpus, "--patients", few, "--size", side, "--seed", seed)
            medvl("shards", corpus, "--root", data / corpus, "--out", data / f"{corpus}-shards", *STORED)
    divided = [folder for folder in (PAIRED, UNPAIRED) if folder in needed and not _complete(data / folder)]
    if divided:
        _divide_pairs(data, divided)


def medvl(*arguments: object) -> None:
    """Run a command of medvl."""
    subprocess.run([sys.executable, "-m", "medvl", *map(str, arguments)], check=True)


def _complete(shards: Path) -> bool:
    return (shards / "manifest.json").is_file()


def _divide_pairs(data: Path, folders: Collection[str]) -> None:
    """Write the pairs of a tenth of the training patients, or the images and texts of the others apart."""
    source = ShardSource(data / "shards/train")
    samples = [source.sample(position) for position in range(len(source))]
    paired = set(label_fraction([sample.patient for sample in samples], 0.1, seed=0).tolist())
    files = data / "divided"
    files.mkdir(exist_ok=True)
    columns = ["image", "patient", *SECTIONS, "split", *source.label_names]
    with (files / "paired.csv").open("w", newline="") as pairs, (files / "unpaired.csv").open("w", newline="") as rest:
        tables = {name: csv.DictWriter(file, columns) for name, file in (("paired", pairs), ("unpaired", rest))}
        for writer in tables.values():
            writer.writeheader()
        for position, sample in enumerate(samples):
            (files / f"{position}.png").write_bytes(encode_png(source.pixels(position)))
            common = {"patient": sample.patient, "split": "train", **sample.labels}
            image, text = {"image": f"{position}.png"}, {name: sample.sections.get(name, "") for name in SECTIONS}
            if position in paired:
                tables["paired"].writerow(common | image | text)
            else:
                tables["unpaired"].writerows([common | image, common | text])
    options = {PAIRED: ("paired",), UNPAIRED: ("unpaired", "--keep-textless", "--keep-imageless")}
    for folder in folders:
        name, *kept = options[folder]
        medvl("shards", "table", "--table", files / f"{name}.csv", "--out", (data / folder).parent, "--name", name,
              "--image-column", "image", "--patient-column", "patient", "--text-column", *SECTIONS,
              "--split-column", "split", "--label-column", *source.label_names, *STORED, *kept)  # fmt: skip


def execute(run: Run, sizes: Sizes, evaluations: Mapping[str, Evaluation]) -> None:
    """Train the model of a run, or resume it; then run the evaluations that are missing."""
    folder = sizes.home / run.id
    recipe = runpy.run_path(str(run.recipe))
    settings = settings_of(run, sizes, recipe["PRESETS"][run.preset])
    if not (folder / COST).is_file():
        training = recipe["prepare"](settings)
        start = folder / "start"
        start.mkdir(parents=True, exist_ok=True)
        save(training.model, start)
        training.train()
        (folder / COST).write_text(json.dumps(cost(settings.train.run_dir)) + "\n")
    for weights, checkpoint in (("trained", settings.train.run_dir / "last"), ("start", folder / "start")):
        for task in run.tasks:
            results = run.results(sizes.home, weights, task)
            if not is_evaluated(results):
                evaluate(evaluations[task], checkpoint, sizes, results)


def settings_of(run: Run, sizes: Sizes, settings: Any) -> Any:
    """Return the settings of a recipe with the encoders, the data and the length of the comparison."""
    model = settings.model
    if run.config is not type(model):  # settings of another system
        model = run.config(**{field.name: getattr(model, field.name) for field in dataclasses.fields(run.config)})
    model = dataclasses.replace(model, **run.changes)
    train, *extra_train = (sizes.data / folder for folder in run.train)
    schedule = dataclasses.replace(settings.optim.schedule, warmup_steps=min(100, sizes.steps // 4))
    own: dict[str, Any] = {}
    if run.image_from is not None:
        own["image_from"] = sizes.home / f"{run.image_from}-{run.seed}" / "run/last"
    return dataclasses.replace(
        settings,
        **own,
        model=model,
        pretrained=False,
        init_from=None,
        data=dataclasses.replace(
            settings.data,
            image=ConVIRTAugmentation.weak(model.image_size),
            train=str(train),
            extra_train=tuple(extra_train),
            valid=None,
            tokenizer=sizes.data / "vocab",
            workers=sizes.workers,
            seed=run.seed,
        ),
        optim=dataclasses.replace(settings.optim, schedule=schedule),
        train=dataclasses.replace(
            settings.train,
            run_dir=sizes.home / run.id / "run",
            epochs=None,
            steps=sizes.steps,
            global_batch=sizes.batch,
            accumulate=1,
            seed=run.seed,
            validate_every="epoch",
            best_metric="loss",
            best_mode="min",
            checkpoint_every=250,
            early_stop_patience=None,
            keep_last=1,
            tensorboard=False,
        ),
    )


def cost(run_dir: Path) -> dict[str, float]:
    """Return the speed and the peak memory of the training run that this process has finished."""
    records = map(json.loads, (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    timings = [record["timing"] for record in records if record["kind"] == "train"]
    on_gpu = [timing["peak_memory_gb"] for timing in timings if "peak_memory_gb" in timing]
    return {
        "pairs_per_second": statistics.median(timing["pairs_per_second"] for timing in timings),
        "peak_memory_gb": max(on_gpu, default=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20),
    }


def evaluate(evaluation: Evaluation, checkpoint: Path, sizes: Sizes, folder: Path) -> None:
    """Write the results of an evaluation into a folder, or the reason why it does not apply to the model."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        results = evaluation(checkpoint, sizes)
    except EvaluationError as error:
        if error.code != "unsupported":
            raise
        (folder / REFUSAL).write_text(f"{error}\n")
    else:
        write_results(results, folder)


def failures(runs: Mapping[str, Run], sizes: Sizes, command: Sequence[str]) -> dict[str, str]:
    """Execute the runs that are not finished, each in a process of its own: `command` followed by the run's id.

    Returns the last line of the errors of those that failed.
    """
    failed = {}
    for name, run in runs.items():
        if run.finished(sizes.home):
            continue
        print(f"== {name}", flush=True)
        log = sizes.home / name / "log.txt"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as file:
            ended = subprocess.run([*command, name], stdout=file, stderr=subprocess.STDOUT, check=False)
        if ended.returncode:
            failed[name] = (log.read_text(encoding="utf-8").strip().splitlines() or [f"status {ended.returncode}"])[-1]
            print(f"{name} failed, see {log}: {failed[name]}", file=sys.stderr)
    return failed


def merged(runs: Sequence[Run]) -> dict[str, Run]:
    """Return runs by name and seed; equal ones are one run with the evaluations of both."""
    planned: dict[str, Run] = {}
    for run in runs:
        other = planned.get(run.id, run)
        planned[run.id] = dataclasses.replace(other, tasks=tuple(dict.fromkeys((*other.tasks, *run.tasks))))
    return planned


def prerequisites(runs: Sequence[Run], presets: Mapping[str, Preset | None]) -> list[Run]:
    """Return the runs whose image encoders others take, without evaluations of their own."""
    needed = [(run.image_from, presets[run.image_from], run.seed) for run in runs if run.image_from is not None]
    return [make_run(name, preset, seed, tasks=()) for name, preset, seed in needed if preset is not None]


def parse(description: str | None) -> argparse.Namespace:
    """Read the command line, whose options are those of both scripts."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", default="all", help="names separated by commas, all (default) or none")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of weights, order and training (default: 0)")
    parser.add_argument("--extras", action="store_true", help="also the table of ways to train one system")
    parser.add_argument("--data", type=Path, default=ROOT / "quickstart", help="folder of data and runs")
    parser.add_argument("--patients", type=int, default=2800, help="patients of the phantom")
    parser.add_argument("--side", type=int, default=256, help="height and width of the phantom's images")
    parser.add_argument("--steps", type=int, default=1100, help="training steps")
    parser.add_argument("--batch", type=int, default=64, help="pairs of a step")
    parser.add_argument("--workers", type=int, default=1, help="loader processes")
    parser.add_argument("--resamples", type=int, default=1000, help="bootstrap resamples")
    parser.add_argument("--dry-run", action="store_true", help="list the runs")
    parser.add_argument("--write", action="store_true", help="replace the tables in RESULTS.md")
    parser.add_argument("--only", metavar="RUN", help="execute one run in this process, without data and tables")
    return parser.parse_args()


def presets_of(kind: type[TowersConfig]) -> dict[str, Preset]:
    """Return the `tiny` preset of every system of a family that has a recipe.

    A second one, such as `tiny-large`, is named "SYSTEM-large".
    """
    found: dict[str, Preset] = {}
    for path in sorted((ROOT / "recipes").glob("*.py")):
        for preset, settings in runpy.run_path(str(path))["PRESETS"].items():
            pretrains = isinstance(settings, Recipe) and isinstance(settings.model, kind)
            if preset.split("-")[0] != "tiny" or not pretrains:
                continue
            model = settings.model
            name = model.system if model.system not in found else f"{model.system}-{preset.removeprefix('tiny-')}"
            found[name] = Preset(recipe=path, preset=preset, config=type(model))
    return found


def selected(text: str, known: Collection[str]) -> list[str]:
    """Return the systems that `--systems` names. Raises ConfigError for an unknown one."""
    if text in ("all", "none"):
        return list(known) if text == "all" else []
    names = text.split(",")
    unknown = sorted(set(names) - set(known))
    if unknown:
        message = f"expected systems out of {', '.join(known)}; got {', '.join(unknown)}"
        raise ConfigError(message, "unknown_name", field="systems")
    return names


def list_runs(planned: Mapping[str, Run], home: Path) -> None:
    """Print the runs and whether they are finished."""
    for name, run in planned.items():
        state = "finished" if run.finished(home) else "to do"
        print(f"{name}: {run.recipe.name} {run.preset}, {', '.join(run.tasks)}, {state}")
