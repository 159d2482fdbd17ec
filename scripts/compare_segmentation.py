"""LViT with text, without text, and a U-Net on the same shards: train each with the tiny recipe,
print one table.

    medvl phantom qata --out phantom-qata --patients 700 --size 160
    medvl shards qata --root phantom-qata --out quickstart/qata --short-side 112
    medvl vocab --data quickstart/qata/train --out quickstart/qata-vocab
    python scripts/compare_segmentation.py --data quickstart/qata \\
        --vocab quickstart/qata-vocab --out runs/segmentation

On this corpus the image alone shows what is infected. `medvl phantom qata --distractors 1` adds
opacities that only the text tells from infected areas.

Thresholds are chosen on the validation images. Dice is the mean over test images with 95 %
intervals (patients); "no text" and "texts of other images" are the same network with other texts.
The last lines are differences of Dice between networks, image by image. Runs that are finished are
not repeated.
"""

import argparse
import dataclasses
import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import medvl
from medvl.data import OtherTexts, ShardSource, WholeText, no_text, open_loader
from medvl.eval import mask_segmentation

NETWORKS: Mapping[str, Mapping[str, Any]] = {
    "LViT": {},
    "LViT without text": {"text": "off"},
    "U-Net": {"network": "unet"},
}
TEXTS: Mapping[str, Any] = {"no text": "none", "texts of other images": "others"}


def train(arguments: argparse.Namespace, name: str, seed: int) -> Path:
    """Train a network unless its run is finished; return the best checkpoint."""
    names = runpy.run_path(str(Path(__file__).parents[1] / "recipes" / "lvit_qata.py"))
    recipe = names["PRESETS"]["tiny"]
    run_dir = arguments.out / f"{name.lower().replace(' ', '-')}-{seed}"
    if (run_dir / "finished").is_file():
        return run_dir / "best"
    labels = tuple(arguments.labels)
    settings = dataclasses.replace(
        recipe,
        model=dataclasses.replace(
            recipe.model, labels=labels, image_size=arguments.size,
            frozen_text=arguments.frozen_text, **NETWORKS[name]
        ),
        tokenizer=arguments.vocab,
        data=dataclasses.replace(
            recipe.data, train=arguments.data / "train", valid=arguments.data / "validate",
            labels=labels, workers=0, image=dataclasses.replace(recipe.data.image,
            size=arguments.size),
        ),
        train=dataclasses.replace(
            recipe.train, run_dir=run_dir, epochs=arguments.epochs or recipe.train.epochs,
            seed=seed, tensorboard=False, num_threads=1, early_stop_patience=None,
        ),
    )  # fmt: skip
    names["prepare"](settings).train()
    (run_dir / "finished").touch()
    return run_dir / "best"


def evaluate(checkpoint: Path, data: Path) -> Any:
    """Return the result of `mask_segmentation` on the test images, with other texts where the
    network reads text.
    """
    model: Any = medvl.load(checkpoint)

    def read(source: Any) -> Any:
        tokenizer = model.tokenizer or no_text
        return open_loader(
            source,
            batch=32,
            image=model.transform,
            text=WholeText(),
            tokenizer=tokenizer,
            train=False,
        )

    test = ShardSource(data / "test")
    others = {
        name: read(OtherTexts(test, texts))
        for name, texts in TEXTS.items()
        if model.tokenizer is not None
    }
    return mask_segmentation(
        model,
        read(test),
        valid_loader=read(ShardSource(data / "validate")),
        other_texts=others,
        empty="lvit",
    )


def interval(values_N: np.ndarray, seed: int = 0) -> str:
    """Return the mean of the differences of images, with its 95 % interval over resampled
    images.
    """
    rows = np.random.default_rng(seed).integers(len(values_N), size=(2000, len(values_N)))
    low, high = np.percentile(values_N[rows].mean(axis=1), [2.5, 97.5])
    return f"{values_N.mean():+.3f} [{low:+.3f}, {high:+.3f}]"


def cell(row: Any) -> str:
    """Return a value with its interval."""
    return f"{row.value:.3f} [{row.low:.3f}, {row.high:.3f}]"


def main() -> None:
    """Train, evaluate and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data",
        type=Path,
        required=True,
        help="folder with the shards train/, validate/ and test/",
    )
    parser.add_argument("--vocab", type=Path, required=True, help="folder of the tokenizer")
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--labels", nargs="+", default=["Infection"])
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--size", type=int, default=64, help="pixels of a side")
    parser.add_argument(
        "--epochs", type=int, default=None, help="default: those of the recipe's preset tiny"
    )
    parser.add_argument(
        "--frozen-text", action="store_true", help="leave the text encoder as it is, as published"
    )
    arguments = parser.parse_args()
    for seed in arguments.seeds:
        results = {
            name: evaluate(train(arguments, name, seed), arguments.data)
            for name in arguments.networks
        }
        print(
            f"| seed {seed} | Dice | IoU | Dice, pooled | "
            f"{' | '.join(f'Dice, {name}' for name in TEXTS)} |"
        )
        print("|---" * (4 + len(TEXTS)) + "|")
        target = arguments.labels[0] if len(arguments.labels) == 1 else "macro"
        for name, result in results.items():
            rows = {
                (row.metric, row.subgroup): row
                for row in result.results.rows
                if row.target == target
            }
            cells = [cell(rows[metric, ""]) for metric in ("dice", "iou", "dice_pooled")]
            cells += [cell(rows["dice", text]) if ("dice", text) in rows else "" for text in TEXTS]
            print(f"| {name} | {' | '.join(cells)} |")
        dice = {name: result.dice_NL.mean(axis=1) for name, result in results.items()}
        for one, other in (
            ("LViT", "LViT without text"),
            ("LViT without text", "U-Net"),
            ("LViT", "U-Net"),
        ):
            if one in dice and other in dice:
                print(f"{one} over {other}: {interval(dice[one] - dice[other])}")


if __name__ == "__main__":
    main()
