"""Evaluations on several ranks, for tests that compare their files with those of one process."""

from pathlib import Path

from medvl.cli import main as cli
from medvl.train.parallel.distributed import join

SPLITS = {"train": "train", "valid": "validate", "test": "test"}


def commands(home: Path, out: Path) -> dict[str, list[str]]:
    """Return the evaluations by name; a batch of 3 leaves an uneven number of batches for two
    ranks.
    """
    options = ["--batch", "3", "--workers", "0", "--resamples", "10", "--device", "cpu"]
    model, data = ["--checkpoint", str(home / "run/best")], ["--data", str(home / "shards/test")]
    splits = [
        word
        for option, split in SPLITS.items()
        for word in (f"--{option}", str(home / "shards" / split))
    ]
    words = {
        "zero-shot": [*model, *data, *splits[2:4]],
        "retrieval": [*model, *data],
        "classify": ["--checkpoint", str(home / "labels/best"), *data],
        "probe": [*model, *splits, "--fractions", "1.0"],
    }
    return {
        name: ["eval", name, *some, *options, "--out", str(out / name)]
        for name, some in words.items()
    }


def evaluate(home: Path, out: Path) -> None:
    """Run all evaluations in one process group: a second one would need a store that rank 0 has
    not closed yet.
    """
    with join("cpu"):
        for arguments in commands(home, out).values():
            cli.main(arguments)
