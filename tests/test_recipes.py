"""Every recipe: what it says without data, how soon, and that its presets are whole."""

import dataclasses
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

RECIPES = sorted((Path(__file__).parents[1] / "recipes").glob("*.py"))
HEAVY = "torch", "transformers", "timm", "albumentations", "pydicom", "webdataset"
WATCHED = f"""
import runpy, sys
try:
    runpy.run_path(sys.argv.pop(1), run_name="__main__")
finally:
    print("imported:", *[name for name in {HEAVY!r} if name in sys.modules])
"""


@pytest.fixture(params=RECIPES, ids=lambda path: path.stem)
def recipe(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def presets(recipe: Path) -> dict[str, Any]:
    """Preset -> its settings."""
    names = runpy.run_path(str(recipe))
    return {name: value for name, value in names.items() if isinstance(value, names["Recipe"])}


def test_the_presets_on_offer_are_all_that_the_file_defines(recipe: Path) -> None:
    names = runpy.run_path(str(recipe))
    defined = {name.replace("_", "-") for name, value in names.items() if isinstance(value, names["Recipe"])}
    assert set(names["PRESETS"]) == defined


def test_torchrun_takes_none_of_its_options_for_one_of_its_own(recipe: Path) -> None:
    """argparse completes abbreviations, even behind the script: `--start` would be ambiguous to it."""
    from torch.distributed.run import get_args_parser

    own = [option for action in get_args_parser()._actions for option in action.option_strings]
    fields = [
        f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(runpy.run_path(str(recipe))["Recipe"])
    ]
    assert not [(field, option) for field in fields for option in own if option.startswith(field)]


@pytest.mark.parametrize("preset", [[], ["tiny"]], ids=["paper", "tiny"])
def test_without_data_it_names_the_commands_that_make_it(recipe: Path, preset: list[str], tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", WATCHED, str(recipe), *preset], capture_output=True, text=True, timeout=120, cwd=tmp_path
    )
    assert ended.returncode == 1
    assert ended.stdout.splitlines()[-1] == "imported:"  # nothing heavy: it ends in a second
    assert ended.stderr.startswith("error: not found: data.train ")
    for command in ("medvl shards ", "bash scripts/quickstart.sh"):
        assert command in ended.stderr
    assert "Traceback" not in ended.stderr
    assert list(tmp_path.iterdir()) == []


def test_it_has_both_presets_under_the_same_settings(recipe: Path) -> None:
    names: dict[str, Any] = runpy.run_path(str(recipe))
    assert type(names["paper"]) is type(names["tiny"]) is names["Recipe"]
    assert names["prepare"].__doc__
    assert "torchrun" in names["__doc__"]


def test_no_two_presets_write_to_the_same_folder(recipe: Path) -> None:
    runs = [preset.train.run_dir for preset in presets(recipe).values()]
    assert len(set(runs)) == len(runs) >= 2
