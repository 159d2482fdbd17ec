"""Train RadZero from boxes of lung opacity, and evaluate generalized grounding by cross-validation.

    MEDVL_REAL_DATA=DIR python scripts/boxes_nih.py --out real/boxes-nih

The images are those of NIH ChestX-ray14 that RSNA's radiologists looked at, in six parts by
patient. Each of five is tested once, after training on the other four; thresholds and settings are
those of the sixth. RadZero is trained on the stored features of EfficientNet-Lite0 and MiniLM, as
`medvl[weights]` brings them, once with the boxes and once with the labels alone. The mean place of
the training boxes, in every image, is a baseline.

Scores are counted from the threshold of their fold, so that the items of all folds are one set,
which is resampled by patient. Arguments after `--` are passed to the recipe. Finished runs are not
repeated.
"""

import argparse
import dataclasses
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from medvl.benchmark.real_tables import write_table
from medvl.data import ShardSource
from medvl.data.annotations import all_phrases_of
from medvl.errors import MedvlError
from medvl.eval import Results, read_results, write_results
from medvl.eval.core.metric_rows import measure
from medvl.eval.grounding.generalized import groups_of_lines, mean_place

VALID = "part-0"
FOLDS = ("part-1", "part-2", "part-3", "part-4", "part-5")
RUNS: Mapping[str, Sequence[str]] = {
    "boxes": ("--model.box-weight", "3"),
    "labels": ("--model.box-weight", "0"),
}
FEATURES = "lite0-224"
SIZE = ("--image-size", "224", "--fit", "squash")
SETTINGS = f"""--model.image-encoder efficientnet_lite0 --model.text-encoder minilm
--model.image-size 224 --model.fit squash --data.image.size 224 --data.image.fit squash
--data.image-features {FEATURES} --model.trained-layers 0 --model.frozen-text-layers 6
--data.text.source labels --prompts None --data.workers 1 --train.epochs None --train.steps 150
--train.global-batch 48 --optim.lr 2e-3 --optim.schedule.warmup-steps 15 --train.precision fp32
--train.early-stop-patience None --train.best-metric loss --train.best-mode min
--train.validate-every 150 --train.checkpoint-every 150"""
SIDE = 384
"""Pixels of a side of every image."""
Line = dict[str, Any]


def main() -> None:
    """Train and evaluate missing runs, pool their folds, and print the comparison."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for data and runs")
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("recipe_options", nargs="*", help="after --: options of the recipe")
    options = parser.parse_args()
    shards = make_shards(options.out)
    pooled = options.out / f"pooled-{options.seed}"
    for name in options.runs:
        folds = [run_fold(options, name, shards, part) for part in FOLDS]
        write_pooled(pooled / name, [aligned(folder) for folder in folds], read_results(folds[0]))
    baseline = mean_places([read_lines(folder) for folder in folds], true_boxes(shards / VALID))
    write_pooled(pooled / "mean place", baseline, read_results(folds[0]))
    names = ["mean place", *options.runs]
    command("compare", *(pooled / name for name in names), "--out", pooled / "comparison")


def make_shards(out: Path) -> Path:
    """Write the table and its shards, unless they exist; return their folder."""
    shards = out / "shards"
    if not (shards / VALID / "manifest.json").is_file():
        [table] = write_table("opacity-parts", out)
        columns = ["--image-column", "image", "--patient-column", "patient"]
        columns += ["--split-column", "split", "--label-column", "Lung Opacity", "--extra-column"]
        columns += ["phrases", "image_width", "image_height", "--short-side", "384"]
        images = os.environ["MEDVL_REAL_DATA"]
        folders = ("--table", table, "--image-root", images, "--out", shards)
        command("shards", "table", *folders, "--name", "opacities", *columns)
    for part in (VALID, *FOLDS):
        if not (shards / part / "regions" / FEATURES).is_dir():
            encoder = ("--detector", "grid:efficientnet_lite0", "--weights", "published")
            options = (*SIZE, "--all-tokens", "--name", FEATURES)
            command("regions", "--data", shards / part, *encoder, *options)
    return shards


def command(*arguments: object) -> None:
    """Run a command of medvl. Raises CalledProcessError where it fails."""
    subprocess.run([sys.executable, "-m", "medvl", *map(str, arguments)], check=True)


def run_fold(options: argparse.Namespace, name: str, shards: Path, part: str) -> Path:
    """Train on the other parts and evaluate on this one, unless the results exist; return their
    folder.
    """
    run = options.out / f"{name}-{options.seed}" / part
    results = run / "grounding"
    if not (results / "results.json").is_file():
        train, *others = (shards / fold for fold in FOLDS if fold != part)
        data = ["--data.train", train, "--data.extra-train", *others, "--data.valid"]
        data += [shards / VALID, "--train.run-dir", run, "--train.seed", options.seed]
        data += ["--data.seed", options.seed]
        settings = (*SETTINGS.split(), *RUNS[name], *options.recipe_options)
        command("train", "radzero", "paper", *settings, *data)
        folders = ("--data", shards / part, "--valid", shards / VALID, "--out", results)
        rules = ("--protocol", "generalized", "--scores", "peak")
        command("eval", "grounding", "--checkpoint", run / "last", *rules, *folders)
    return results


def read_lines(folder: Path) -> list[Line]:
    """Return the predictions of an evaluation."""
    text = (folder / "predictions.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def aligned(folder: Path) -> list[Line]:
    """Return the predictions with scores counted from their threshold."""
    threshold = read_results(folder).config["least_score"]
    lines = read_lines(folder)
    for box in itertools.chain.from_iterable(line["boxes"] for line in lines):
        box["score"] -= threshold
    return lines


def write_pooled(folder: Path, folds: Iterable[Sequence[Line]], first: Results) -> None:
    """Write the results of all folds as those of one evaluation, whose threshold is 0."""
    lines = [line for fold in folds for line in fold]
    config = {**first.config, "least_score": 0.0, "extent": None}
    pooled = Results(
        protocol=first.protocol,
        protocol_version=first.protocol_version,
        rows=(),
        config=config,
        inputs={},
    )
    groups = groups_of_lines(lines, pooled)
    rows = measure(groups, len(lines), groups=[line["patient"] for line in lines])
    write_results(dataclasses.replace(pooled, rows=rows), folder, lines)


def true_boxes(folder: Path) -> list[Line]:
    """Return the true boxes of each image of a folder of shards, as predictions without boxes."""
    source = ShardSource(folder)
    samples = (source.sample(position) for position in range(len(source)))
    phrases = itertools.chain.from_iterable(map(all_phrases_of, samples))
    return [{"boxes": [], "true": list(phrase.boxes)} for phrase in phrases]


def mean_places(folds: Sequence[Sequence[Line]], valid: Sequence[Line]) -> Iterator[list[Line]]:
    """Yield the items of each fold with the boxes of the mean place of the other folds' boxes, as
    judged by the validation images.
    """
    judges = [edges(line["true"]) / SIDE for line in valid]
    for number, fold in enumerate(folds):
        others = itertools.chain.from_iterable((*folds[:number], *folds[number + 1 :]))
        boxes_D4 = SIDE * mean_place([edges(line["true"]) / SIDE for line in others], judges)
        placed = [
            {"x": x, "y": y, "width": right - x, "height": bottom - y, "score": 0.0}
            for x, y, right, bottom in boxes_D4.tolist()
        ]
        yield [{**line, "boxes": placed} for line in fold]


def edges(boxes: Iterable[Mapping[str, Any]]) -> NDArray[np.float64]:
    """Return left, top, right and bottom edges (G, 4)."""
    rows = [[b["x"], b["y"], b["x"] + b["width"], b["y"] + b["height"]] for b in boxes]
    return np.array(rows, np.float64).reshape(-1, 4)


if __name__ == "__main__":
    try:
        main()
    except (MedvlError, subprocess.CalledProcessError) as error:
        sys.exit(f"error: {error}")
