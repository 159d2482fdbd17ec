"""Effect of pretraining on visual question answering: fine-tuning from a checkpoint and from random
weights.

    python scripts/pretraining_helps.py --start quickstart/m3ae/best --train quickstart/vqa/train \\
        --valid quickstart/vqa-valid/test --test quickstart/vqa/test --out quickstart/m3ae-helps

Fine-tunes `recipes/vqa_finetune.py` from both for every seed, evaluates all runs on the same
questions, and prints each run, the means over seeds and their difference, with intervals from a
bootstrap over images. Random weights have the checkpoint's system and sizes. Arguments after `--`
are passed to the recipe. Finished runs are not repeated.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import medvl
from medvl.data import ShardSource
from medvl.errors import MedvlError
from medvl.eval import VQAData, bootstrap, question_data
from medvl.models import create_model, save
from medvl.train import seeded

RECIPE = Path(__file__).parents[1] / "recipes" / "vqa_finetune.py"
STARTS = ("pretrained", "random")


def main() -> None:
    """Train and evaluate missing runs, then print the comparison."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--start", type=Path, required=True, help="checkpoint of the pretrained model"
    )
    for name in ("train", "valid", "test"):
        parser.add_argument(
            f"--{name}", type=Path, required=True, help=f"folder of shards with questions to {name}"
        )
    parser.add_argument("--out", type=Path, required=True, help="folder for the runs")
    parser.add_argument("--preset", default="tiny", help="preset of the recipe (default: tiny)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("recipe_options", nargs="*", help="after --: options of the recipe")
    options = parser.parse_args()
    for seed in options.seeds:
        for start in STARTS:
            fine_tune(options, start, seed)
    data = question_data([ShardSource(options.test)]).part("test")
    credit_SRN = np.array(
        [[credits_of(options.out / f"{s}-{seed}", data) for seed in options.seeds] for s in STARTS]
    )
    print(table(credit_SRN, data, options.seeds))


def fine_tune(options: argparse.Namespace, start: str, seed: int) -> None:
    """Fine-tune and answer the test questions, unless the results exist."""
    run = options.out / f"{start}-{seed}"
    if (run / "answers" / "results.json").is_file():
        return
    checkpoint = (
        options.start
        if start == "pretrained"
        else random_checkpoint(options.start, options.out / f"random-weights-{seed}", seed)
    )
    arguments = [
        options.preset,
        "--init-from",
        checkpoint,
        "--train.seed",
        seed,
        "--train.run-dir",
        run,
    ]
    arguments += [
        "--data.train",
        options.train,
        "--data.valid",
        options.valid,
        *options.recipe_options,
    ]
    subprocess.run([sys.executable, RECIPE, *map(str, arguments)], check=True)
    judge = [
        "eval",
        "vqa",
        "--checkpoint",
        run / "best",
        "--data",
        options.test,
        "--train",
        options.train,
    ]
    subprocess.run(
        [sys.executable, "-m", "medvl", *map(str, judge), "--out", run / "answers"], check=True
    )


def random_checkpoint(start: Path, folder: Path, seed: int) -> Path:
    """Save a checkpoint of the same system and sizes with random weights; return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    trained = medvl.load(start)
    with seeded(seed):
        save(create_model(trained.config, pretrained=False, tokenizer=trained.tokenizer), folder)
    return folder


def credits_of(run: Path, data: VQAData) -> list[float]:
    """Return the credit of every question of `data`, in its order."""
    rows = map(
        json.loads, (run / "answers" / "predictions.jsonl").read_text(encoding="utf-8").splitlines()
    )
    credit = {row["id"]: float(row["model_credit"]) for row in rows}
    return [credit[question.id] for question in data.questions]


def table(credit_SRN: NDArray[np.float64], data: VQAData, seeds: Sequence[int]) -> str:
    """Return a table of overall, closed and open accuracy: each run, means over seeds,
    difference of the means.
    """
    closed_N = np.array([question.answer_type == "closed" for question in data.questions])
    parts = (np.ones_like(closed_N), closed_N, ~closed_N)
    means_SN = credit_SRN.mean(axis=1)
    lines = {
        f"{s}, seed {seed}": run_N
        for s, runs_RN in zip(STARTS, credit_SRN, strict=True)
        for seed, run_N in zip(seeds, runs_RN, strict=True)
    }
    lines |= {f"{s}, mean": mean_N for s, mean_N in zip(STARTS, means_SN, strict=True)}
    lines["difference of the means"] = means_SN[0] - means_SN[1]
    texts = [f"{'':24}{'overall':>24}{'closed':>24}{'open':>24}"]
    for name, value_N in lines.items():
        cells = [
            interval(
                value_N[part],
                [g for g, included in zip(data.groups, part, strict=True) if included],
            )
            for part in parts
        ]
        texts.append(f"{name:24}" + "".join(f"{cell:>24}" for cell in cells))
    return "\n".join(texts)


def interval(value_N: NDArray[np.float64], groups: Sequence[str]) -> str:
    """Return the mean with its 95% interval over images."""
    result = bootstrap(
        lambda counts_NR: (value_N @ counts_NR / counts_NR.sum(axis=0))[:, None],
        len(value_N),
        groups=groups,
    )
    return f"{result.value_K[0]:.3f} [{result.low_K[0]:.3f}, {result.high_K[0]:.3f}]"


if __name__ == "__main__":
    try:
        main()
    except MedvlError as error:
        sys.exit(f"error: {error}")
