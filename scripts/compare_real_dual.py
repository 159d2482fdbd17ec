"""Comparison of MGCA, LoVT and MedCLIP with ConVIRT on real images and texts, all from the same start.

    MEDVL_REAL_DATA=REAL python scripts/compare_real_dual.py --out DIR
    MEDVL_REAL_DATA=REAL python scripts/compare_real_dual.py --out DIR --corpora medpix --starts imagenet --seeds 0 1 2

Corpora, with the splits of their files, which share no case or patient: `medpix` (CT and MR slices with captions;
labels: body regions and modality) and `radiographs` (those of `cxr` with a text; labels: kinds of pneumonia). Starts:
`random`, or `imagenet`, the MobileNetV2 0.35 of `weights_imagenet_mobilenet` as image encoder; the text encoder is a
three-layer BERT at random weights. Each system trains with the `tiny` preset of its recipe (loss, heads, texts,
optimiser) at 112 pixels for `--steps` batches of `--batch` pairs, without a choice by any result. The weights after the
last step, and those before the first, are evaluated on the test split: recall at 10 in both directions, and
zero-shot AUROC of the labels by one prompt each, their name. Intervals are bootstraps over patients or cases.

Shards are written below `--out`, which must not be in the repository. Finished runs are not repeated.
"""

import argparse
import csv
import dataclasses
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from compare_dual import presets_by_system
from compare_dual_tasks import EVALUATIONS
from compare_runs import Run, Sizes, execute, failures, make_run, medvl
from results import cell

from medvl.data import ShardSource
from medvl.errors import ConfigError, MedvlError
from medvl.eval import Results, load_ensemble, load_prompts, open_for_evaluation, read_results, zero_shot

SYSTEMS = ("convirt", "mgca", "lovt", "medclip")
COLUMNS = {
    "zero-shot AUROC": ("labels", "auroc", "macro"),
    "R@10 image to text": ("retrieval", "recall@10", "image_to_text"),
    "R@10 text to image": ("retrieval", "recall@10", "text_to_image"),
}
"""Column -> evaluation, metric, target."""
PIXELS = {"mean": 0.5, "std": 0.5}
"""Statistics of pixels that the MobileNets were trained with."""
STARTS: dict[str, str | None] = {
    "random": None,
    "imagenet": "weights_imagenet_mobilenet/mobilenetv2_035_in1k_backbone.safetensors",
}
REGIONS = ("Head", "Spine and Muscles", "Thorax", "Abdomen", "Reproductive and Urinary System")
CAUSES = ("COVID-19", "Bacterial", "Fungal")
PARTS = {"train": "train", "val": "validate", "test": "test"}


def medpix(real: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of MedPix's table."""
    for row in read_lines(real / "medpix/captions.jsonl"):
        labels = {name: int(row["location_category"] == name) for name in REGIONS}
        labels |= {name: int(row["modality_type"] == name) for name in ("CT", "MR")}
        yield row_of("medpix/" + row["image"], row["case_id"], row["caption"], row["split"], labels)


def radiographs(real: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of the radiographs that have a text."""
    for row in read_lines(real / "cxr/cxr.jsonl"):
        if row["text"]:
            labels = {name: int(name in row["labels"]) for name in CAUSES}
            yield row_of("cxr/" + row["image"], row["patient_id"], row["text"], row["split"], labels)


CORPORA = {"medpix": medpix, "radiographs": radiographs}


def main() -> int:
    """Make the data, execute the missing runs and print the tables; return the exit status."""
    options = parse()
    real = Path(os.environ.get("MEDVL_REAL_DATA", ""))
    if not (real / "medpix").is_dir():
        raise ConfigError("MEDVL_REAL_DATA names no folder with real data", "not_found", field="MEDVL_REAL_DATA")
    status = 0
    for corpus in options.corpora:
        sizes = Sizes(
            data=options.out / corpus,
            patients=0,
            side=0,
            **{name: getattr(options, name) for name in ("steps", "batch", "workers", "resamples")},
        )
        runs = {run.id: run for run in planned(options, real)}
        if options.only is not None:
            execute(runs[options.only], sizes, {**EVALUATIONS, "labels": by_labels})
            continue
        make_shards(corpus, real, sizes.data)
        command = [sys.executable, __file__, *sys.argv[1:], "--corpora", corpus, "--only"]
        failed = failures(runs, sizes, command)
        print(f"{corpus}\n{table(list(runs.values()), sizes.home, failed)}\n")
        status |= int(bool(failed))
    return status


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of shards and runs, outside of the repository")
    parser.add_argument("--corpora", nargs="+", choices=CORPORA, default=list(CORPORA), help="default: all")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), help="default: all")
    parser.add_argument("--starts", nargs="+", choices=STARTS, default=list(STARTS), help="default: both")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of weights, order and training (default: 0)")
    parser.add_argument("--steps", type=int, default=600, help="training steps (default: 600)")
    parser.add_argument("--batch", type=int, default=64, help="pairs of a step (default: 64)")
    parser.add_argument("--workers", type=int, default=1, help="loader processes")
    parser.add_argument("--resamples", type=int, default=1000, help="bootstrap resamples")
    parser.add_argument("--only", metavar="RUN", help="execute one run of one corpus in this process")
    return parser.parse_args()


def planned(options: argparse.Namespace, real: Path) -> Iterator[Run]:
    """Yield the runs of a corpus."""
    presets = presets_by_system()
    for start in options.starts:
        for name in options.systems:
            preset = presets[name]
            assert preset is not None
            changes = encoder_of(preset.config, None if (file := STARTS[start]) is None else str(real / file))
            for seed in options.seeds:
                yield make_run(f"{name}-{start}", preset, seed, changes=changes, tasks=("labels", "retrieval"))


def encoder_of(config: type[Any], weights: str | None) -> dict[str, Any]:
    """Return the fields of a system for its image encoder; some have fields of their own for statistics of pixels."""
    own = {"pixel_mean", "pixel_std"} <= {field.name for field in dataclasses.fields(config)}
    arguments: dict[str, Any] = {"pad_type": "same", "output_stride": 16, **({} if own else PIXELS)}
    statistics = {f"pixel_{name}": value for name, value in PIXELS.items()} if own else {}
    return {
        "image_encoder": "timm:mobilenetv2_035",
        "image_arguments": arguments,
        "image_weights": weights,
        **statistics,
    }


def make_shards(corpus: str, real: Path, folder: Path) -> None:
    """Write shards, vocabulary and prompts of a corpus, unless they exist."""
    if (folder / "vocab/tokenizer.json").is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    salt = folder / "salt"
    salt.write_text("0" * 64 + "\n")
    os.environ.setdefault("MEDVL_SALT_FILE", str(salt))
    rows = list(CORPORA[corpus](real))
    labels = [name for name in rows[0] if name not in ("image", "patient", "impression", "split")]
    with (folder / "table.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    classes = {name: {"positive": [f"{name.lower()}."]} for name in labels}
    prompts = {"scoring": "class_softmax", "temperature": 0.1, "classes": classes}
    (folder / "prompts.json").write_text(json.dumps({"name": corpus, **prompts}) + "\n")
    medvl("shards", "table", "--table", folder / "table.csv", "--image-root", real, "--out", folder / "shards",
          "--name", corpus, "--image-column", "image", "--patient-column", "patient", "--text-column", "impression",
          "--split-column", "split", "--label-column", *labels, "--short-side", 160)  # fmt: skip
    medvl("vocab", folder / "shards/train", folder / "vocab", "--size", 4000)


def by_labels(checkpoint: Path, sizes: Sizes) -> Results:
    """Evaluate zero-shot classification by the names of the labels."""
    [model] = load_ensemble([checkpoint])
    source = ShardSource(sizes.data / "shards/test")
    loader = open_for_evaluation(source, model.transform, model.tokenizer, batch=64, workers=sizes.workers)
    return zero_shot([model], loader, load_prompts(sizes.data / "prompts.json"), resamples=sizes.resamples).results


def table(runs: Sequence[Run], home: Path, failed: dict[str, str]) -> str:
    """Return a row for each run, and one for its start."""
    lines = [f"| | {' | '.join(COLUMNS)} |", "|" + "---|" * (len(COLUMNS) + 1)]
    for run in runs:
        for weights, title in (("trained", run.id), ("start", f"{run.id}, before training")):
            cells = []
            for task, metric, target in COLUMNS.values():
                path = run.results(home, weights, task) / "results.json"
                cells.append((cell(read_results(path), metric, target) or "–") if path.is_file() else "–")
            lines.append(f"| {title} | {' | '.join(cells)} |")
    notes = [f"{name}: {reason}." for name, reason in failed.items()]
    return "\n".join([*lines, *(["", *notes] if notes else [])])


def row_of(image: str, patient: str, text: str, split: str, labels: dict[str, int]) -> dict[str, Any]:
    """Return a row of the table for `medvl shards table`."""
    return {"image": image, "patient": patient, "impression": text, "split": PARTS[split], **labels}


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file of JSON lines."""
    with path.open(encoding="utf-8") as file:
        yield from map(json.loads, file)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except MedvlError as error:
        sys.exit(f"error: {error}")
