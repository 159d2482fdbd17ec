"""`recipes/convirt_mimic.py` as a command: its errors, and the imports before them."""

import subprocess
import sys
from pathlib import Path

import pytest
from helpers import forked
from helpers.forked_recipes import run_recipe
from helpers.spine_corpus import RECIPE


def recipe(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_recipe(RECIPE, *arguments, folder=folder)


@pytest.mark.parametrize(
    ("preset", "missing"),
    [
        ([], "data.train shards/mimic-cxr/train, data.valid shards/mimic-cxr/validate"),
        (["tiny", "--data.train", "here"], "data.train here"),
    ],
)
def test_missing_data_is_reported_with_the_commands_that_create_it(
    preset: list[str], missing: str, tmp_path: Path
) -> None:
    done = recipe(tmp_path, *preset)
    assert done.returncode == 1
    assert done.stdout == "imported:\n"
    first, *rest = done.stderr.strip().splitlines()
    assert first.startswith(f"error: not found: {missing}")
    commands = [line.strip() for line in rest if line.startswith("    ")]
    assert [command.split()[:2] for command in commands] == [
        ["medvl", "shards"],
        ["medvl", "train"],
        ["medvl", "shards"],
        ["medvl", "train"],
        ["medvl", "phantom"],
        ["medvl", "train"],
    ]
    assert not list(tmp_path.iterdir())


def test_commands_in_the_advice_exist(tmp_path: Path) -> None:
    """Every option and file in the advice exists."""
    advice = [
        line.split() for line in recipe(tmp_path).stderr.splitlines() if line.startswith("    ")
    ]
    shards, train, own_shards, train_own, phantom, train_tiny = advice
    for command in (shards, own_shards, phantom):
        done = forked.run([sys.executable, "-m", "medvl", *command[1:3], "--help"])
        assert done.returncode == 0
        assert all(word in done.stdout for word in command if word.startswith("--"))
    assert train[1:] == ["train", RECIPE.stem]
    assert train_own[1:4] == ["train", RECIPE.stem, "tiny"]
    assert train_tiny[1:] == ["train", RECIPE.stem, "tiny"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tinny"], "error: no preset 'tinny': did you mean 'tiny'?"),
        (["tiny", "--optim.lr=-1"], "error: lr must be above 0, got -1.0"),
        (["--model.temperature", "0"], "error: temperature must be above 0"),
        (
            ["tiny", "--train.global-batch", "7", "--train.accumulate", "2"],
            "error: global_batch 7 is not divisible",
        ),
        (["tiny", "--data.image.flip", "swop"], "invalid choice 'swop'"),
        (["--optim.lrr", "3"], "Unrecognized options: --optim.lrr"),
        (["tiny", "--optim.lr", "fast"], "could not convert string to float: 'fast'"),
    ],
)
def test_wrong_command_line_exits_without_a_traceback(
    arguments: list[str], message: str, tmp_path: Path
) -> None:
    done = recipe(tmp_path, *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    if message.startswith("error: "):
        assert len(done.stderr.splitlines()) == 1
    assert done.stdout == "imported:\n"


def test_help_lists_settings_with_published_defaults(tmp_path: Path) -> None:
    done = recipe(tmp_path, "--help-all")
    assert done.returncode == 0
    for flag in (
        "--model.image-encoder",
        "--data.train",
        "--optim.schedule.patience",
        "--train.run-dir",
        "--prompts",
    ):
        assert flag in done.stdout
    assert "(default: resnet50)" in done.stdout
    assert "(default: bioclinicalbert)" in done.stdout
    assert done.stdout.endswith("imported:\n")
