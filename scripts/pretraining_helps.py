"""What pretraining adds to visual question answering: the same fine-tuning from a checkpoint and from random weights.

    python scripts/pretraining_helps.py --start quickstart/m3ae/best --train quickstart/vqa/train \\
        --valid quickstart/vqa-valid/test --test quickstart/vqa/test --out quickstart/m3ae-helps

Fine-tunes `recipes/vqa_finetune.py` seed by seed from both, judges all of it on the same questions, and prints each run
and the means over seeds with intervals bootstrapped over images, and over the same images the difference of the two.
Random weights are the checkpoint's own system and sizes. What stands behind `--` goes to the recipe. A run that has
ended is not repeated.
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
from medvl.eval.core.bootstrap import bootstrap
from medvl.eval.vqa.predict import question_data
from medvl.eval.vqa.question_set import VQAData
from medvl.models import create_model
from medvl.models.checkpoint import save
from medvl.train import seeded

RECIPE = Path(__file__).parents[1] / "recipes" / "vqa_finetune.py"
STARTS = ("pretrained", "random")


def main() -> None:
    """Train what is missing, then compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--start", type=Path, required=True, help="checkpoint of the pretrained model")
    for name in ("train", "valid", "test"):
        parser.add_argument(f"--{name}", type=Path, required=True, help=f"folder of shards with questions to {name}")
    parser.add_argument("--out", type=Path, required=True, help="gets the runs")
    parser.add_argument("--preset", default="tiny", help="of the recipe (default: tiny)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("recipe_options", nargs="*", help="behind --: options of the recipe")
    options = parser.parse_args()
    for seed in options.seeds:
        for start in STARTS:
            answer(options, start, seed)
    data = question_data([ShardSource(options.test)]).part("test")
    credit_SRN = np.array([[credits_of(options.out / f"{s}-{seed}", data) for seed in options.seeds] for s in STARTS])
    print(table(credit_SRN, data, options.seeds))


def answer(options: argparse.Namespace, start: str, seed: int) -> None:
    """Fine-tune and answer the test questions, unless that has been done."""
    run = options.out / f"{start}-{seed}"
    if (run / "answers" / "results.json").is_file():
        return
    checkpoint = options.start if start == "pretrained" else blank(options.start, options.out / f"blank-{seed}", seed)
    arguments = [options.preset, "--init-from", checkpoint, "--train.seed", seed, "--train.run-dir", run]
    arguments += ["--data.train", options.train, "--data.valid", options.valid, *options.recipe_options]
    subprocess.run([sys.executable, RECIPE, *map(str, arguments)], check=True)
    judge = ["eval", "vqa", "--checkpoint", run / "best", "--data", options.test, "--train", options.train]
    subprocess.run([sys.executable, "-m", "medvl", *map(str, judge), "--out", run / "answers"], check=True)


def blank(start: Path, folder: Path, seed: int) -> Path:
    """A checkpoint of the same system and sizes at random weights."""
    folder.mkdir(parents=True, exist_ok=True)
    trained = medvl.load(start)
    with seeded(seed):
        save(create_model(trained.config, pretrained=False, tokenizer=trained.tokenizer), folder)
    return folder


def credits_of(run: Path, data: VQAData) -> list[float]:
    """Of every question of `data`, in its order."""
    rows = map(json.loads, (run / "answers" / "predictions.jsonl").read_text(encoding="utf-8").splitlines())
    credit = {row["id"]: float(row["model_credit"]) for row in rows}
    return [credit[question.id] for question in data.questions]


def table(credit_SRN: NDArray[np.float64], data: VQAData, seeds: Sequence[int]) -> str:
    """Overall, closed and open accuracy of every run, their means over seeds, and the difference of the starts."""
    closed_N = np.array([question.answer_type == "closed" for question in data.questions])
    parts = (np.ones_like(closed_N), closed_N, ~closed_N)
    means_SN = credit_SRN.mean(axis=1)
    lines = {
        f"{s}, seed {seed}": run_N
        for s, of in zip(STARTS, credit_SRN, strict=True)
        for seed, run_N in zip(seeds, of, strict=True)
    }
    lines |= {f"{s}, mean": mean_N for s, mean_N in zip(STARTS, means_SN, strict=True)}
    lines["difference of the means"] = means_SN[0] - means_SN[1]
    texts = [f"{'':24}{'overall':>24}{'closed':>24}{'open':>24}"]
    for name, value_N in lines.items():
        cells = [
            interval(value_N[part], [g for g, kept in zip(data.groups, part, strict=True) if kept]) for part in parts
        ]
        texts.append(f"{name:24}" + "".join(f"{cell:>24}" for cell in cells))
    return "\n".join(texts)


def interval(value_N: NDArray[np.float64], groups: Sequence[str]) -> str:
    """The mean, with its 95 % interval over images."""
    found = bootstrap(
        lambda counts_NR: (value_N @ counts_NR / counts_NR.sum(axis=0))[:, None], len(value_N), groups=groups
    )
    return f"{found.value_K[0]:.3f} [{found.low_K[0]:.3f}, {found.high_K[0]:.3f}]"


if __name__ == "__main__":
    try:
        main()
    except MedvlError as error:
        sys.exit(f"error: {error}")
