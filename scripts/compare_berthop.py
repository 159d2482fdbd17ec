"""BERTHop's PixelHop++ beside a ResNet of similar size, at fractions of the labels, on the
phantom's Open-i stand-in.

    bash scripts/quickstart.sh         # makes the vocabulary
    python scripts/compare_berthop.py  # phantom, shards, PixelHop++, runs and results: quickstart/
    # to see it work
    python scripts/compare_berthop.py --patients 300 --fractions 1 --epochs 2 --modalities image

Both are the same BERT over visual tokens and report, trained by the recipe `berthop_openi.py tiny`.
BERTHop's tokens are those of PixelHop++, which is not trained; VisualBERT's are the cells of a
ResNet with about as many weights as the fitted PixelHop++ has numbers. Each is trained on image and
report and on the image alone. A row is the mean AUROC of the test patients with its 95% bootstrap
interval over patients; `best` is selected by validation patients. With few labels, there are more
epochs: their number is divided by the fraction, but at most 20 times larger, and `best` is chosen
among as many checkpoints as with all labels.
"""

import argparse
import dataclasses
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

from medvl.data import ShardSource
from medvl.encoders import create_image_encoder, pixelhop_arguments
from medvl.errors import MedvlError
from medvl.eval import LabelPolicy, classify, open_for_evaluation
from medvl.models import FusedClassifier, VisualBERTConfig, load

ROOT = Path(__file__).resolve().parents[1]
MOST_EPOCHS = 20
STAGES = (1, 2, 4, 8)
"""Widths of the ResNet's stages, as multiples of the first."""


def main() -> None:
    """Parse the command line, train and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("quickstart"))
    parser.add_argument("--patients", type=int, default=1200)
    parser.add_argument("--fractions", type=float, nargs="+", default=[0.01, 0.1, 1.0])
    parser.add_argument("--modalities", nargs="+", default=["image_text", "image"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--vocab", type=Path, default=Path("quickstart/vocab"))
    options = parser.parse_args()
    folder = options.folder
    shards, pixelhop = folder / "openi-shards", folder / "pixelhop"
    make_data(folder, shards, pixelhop, options.patients)
    similar = resnet(numbers_of(pixelhop))
    models = {"pixelhop": None, "resnet": similar}
    print(f"pixelhop: {numbers_of(pixelhop):,} fitted numbers; resnet: {similar[1]:,} weights")
    for modalities in options.modalities:
        for fraction in options.fractions:
            for name, other in models.items():
                for seed in options.seeds:
                    run = folder / f"compare-berthop/{name}-{modalities}-{fraction:g}-{seed}"
                    settings = recipe(options, shards, pixelhop, run, modalities, fraction, seed)
                    print(
                        f"{modalities:10} {100 * fraction:5g} % {name:9} seed {seed}: "
                        f"{auroc(settings, other, shards)}"
                    )


def make_data(folder: Path, shards: Path, pixelhop: Path, patients: int) -> None:
    """Write the phantom, its shards and the fitted PixelHop++, as far as they are missing."""
    medvl = [sys.executable, "-m", "medvl"]
    phantom = [
        "phantom",
        "openi",
        "--out",
        str(folder / "openi"),
        "--patients",
        str(patients),
        "--size",
        "160",
    ]
    convert = [
        "shards",
        "openi",
        "--root",
        str(folder / "openi"),
        "--out",
        str(shards),
        "--short-side",
        "160",
    ]
    fit = [
        "fit-pixelhop",
        "--data",
        str(shards / "train"),
        "--out",
        str(pixelhop),
        "--image-size",
        "112",
        "--fit",
        "squash",
    ]
    for target, command in (
        (shards, phantom),
        (shards, [*convert, "--views", "FRONTAL"]),
        (pixelhop, fit),
    ):
        if not target.is_dir():
            subprocess.run([*medvl, *command], check=True)


def numbers_of(pixelhop: Path) -> int:
    """Return the count of fitted numbers."""
    arguments: dict[str, Any] = pixelhop_arguments(pixelhop)
    return sum(
        buffer.numel()
        for buffer in create_image_encoder("pixelhop", image_size=112, **arguments).buffers()
    )


def resnet(numbers: int) -> tuple[dict[str, Any], int]:
    """Return the arguments and the size of the `resnet_tiny` whose number of weights is nearest."""
    found = []
    for width in range(4, 65, 4):
        arguments: dict[str, Any] = {"channels": tuple(width * factor for factor in STAGES)}
        encoder = create_image_encoder("resnet_tiny", image_size=112, **arguments)
        found.append((sum(weights.numel() for weights in encoder.parameters()), arguments))
    size, arguments = min(found, key=lambda pair: abs(pair[0] - numbers))
    return arguments, size


def recipe(
    options: Any,
    shards: Path,
    pixelhop: Path,
    run: Path,
    modalities: str,
    fraction: float,
    seed: int,
) -> Any:
    """Return the settings of a run."""
    tiny = runpy.run_path(str(ROOT / "recipes" / "berthop_openi.py"))["tiny"]
    longer = min(MOST_EPOCHS, round(1 / fraction))
    data = {
        "train": shards / "train",
        "valid": shards / "validate",
        "fraction": fraction,
        "fraction_seed": seed,
    }
    batch = 8 if fraction < 0.1 else 32
    every = max(1, round(longer * fraction * len(ShardSource(shards / "train")) / batch))
    schedule = {"epochs": longer * options.epochs, "global_batch": batch, "validate_every": every}
    return dataclasses.replace(
        tiny,
        pixelhop=pixelhop,
        tokenizer=options.vocab,
        modalities=modalities,
        data=dataclasses.replace(tiny.data, **data),
        train=dataclasses.replace(tiny.train, run_dir=run, seed=seed, **schedule),
    )


def auroc(settings: Any, other: tuple[dict[str, Any], int] | None, shards: Path) -> str:
    """Train a run unless it is finished, and return the mean AUROC of the test patients."""
    names = runpy.run_path(str(ROOT / "recipes" / "berthop_openi.py"))
    prepare, best = names["prepare"], settings.train.run_dir / "best"
    if other is not None:
        shared = {
            field.name: getattr(settings.model, field.name)
            for field in dataclasses.fields(VisualBERTConfig)
        }
        encoder = {
            "image_encoder": "resnet_tiny",
            "image_arguments": other[0],
            "image_positions": True,
        }
        settings = dataclasses.replace(settings, model=VisualBERTConfig(**{**shared, **encoder}))
        prepare = names["classifier_run"]("visualbert", "", LabelPolicy, names["ClassifyEval"])
    if not best.is_dir():
        prepare(settings).train()
    model = load(best)
    assert isinstance(model, FusedClassifier)
    loader = open_for_evaluation(
        ShardSource(shards / "test"), model.transform, model.tokenizer, batch=64, workers=0
    )
    row = classify(
        model, loader, policy=LabelPolicy(missing="ignore"), checkpoint=best
    ).results.row("auroc", "macro")
    return f"{row.value:.3f} [{row.low:.3f}, {row.high:.3f}]"


if __name__ == "__main__":
    try:
        main()
    except MedvlError as error:
        sys.exit(f"error: {error}")
