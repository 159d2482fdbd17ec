"""Short help of recipes: two screens, no PyTorch, and no stale texts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from medvl.cli import main as cli
from medvl.train import recipe_files
from medvl.train.recipe_files import (
    LINES,
    WIDTH,
    field_docs,
    load_recipe_module,
    packaged_files,
    short_help,
)

ROOT = Path(__file__).parents[2]
RECIPES = packaged_files("recipes", ".py")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("name", RECIPES)
def test_help_of_every_preset_fits_on_two_screens(name: str) -> None:
    presets = load_recipe_module(RECIPES[name]).PRESETS
    for preset in presets:
        text = short_help(f"medvl train {name} {preset}", "Summary.", presets, preset)
        lines = text.splitlines()
        assert len(lines) <= LINES == 60
        assert max(map(len, lines)) <= WIDTH == 100
        assert f"  --train.run-dir {presets[preset].train.run_dir}" in text
        assert f"  --optim.lr {presets[preset].optim.lr:g}" in text
        assert lines[-1].endswith("--help-all")


def test_help_shows_values_descriptions_and_what_the_preset_changes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    cli.main(["train", "convirt", "tiny", "--help"])
    text = capsys.readouterr().out
    assert text.startswith("usage: medvl train convirt tiny [OPTIONS]\n")
    assert "  --train.epochs 14   " in text
    assert "Passes over the training data" in text
    assert "  --model.frozen-text-layers 0 " in text  # not among the usual settings
    assert "--train.nonfinite-budget" not in text
    cli.main(["train", "convirt", "--help"])
    assert "  --train.epochs 200   " in capsys.readouterr().out


def test_all_settings_are_behind_help_all(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["medvl"])
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", "convirt", "tiny", "--help-all"])
    assert ended.value.code == 0
    assert "--train.nonfinite-budget" in capsys.readouterr().out


def test_cached_help_imports_no_torch(cache: Path) -> None:
    code = (
        "import sys; from medvl.cli import main as cli; cli.main(['train', 'convirt', '--help']);"
        "print([name for name in ('torch', 'transformers', 'timm', 'numpy', 'tyro') "
        "if name in sys.modules])"
    )
    shown = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "XDG_CACHE_HOME": str(cache)},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        shown.append(done.stdout.splitlines())
    assert "'torch'" in shown[0][-1]
    assert "torch" not in shown[1][-1]
    assert shown[0][:-1] == shown[1][:-1]


def test_cache_is_not_used_after_a_change(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tmp_path / "own.py"
    recipe.write_text("a = 1\n")
    recipe_files.cache_help(recipe.stem, {"paper": "text"}, recipe)
    assert recipe_files.cached_help(recipe.stem, "paper", recipe) == "text"
    assert recipe_files.cached_help(recipe.stem, "other", recipe) is None
    recipe.write_text("a = 12\n")
    assert recipe_files.cached_help(recipe.stem, "paper", recipe) is None
    recipe_files.cache_help(recipe.stem, {"paper": "later text"}, recipe)
    assert len(list(cache.rglob("own-*.json"))) == 1  # the file of the earlier source is gone
    monkeypatch.setenv("XDG_CACHE_HOME", str(recipe))  # a file: nothing can be stored
    recipe_files.cache_help(recipe.stem, {"paper": "text"}, recipe)
    assert recipe_files.cached_help(recipe.stem, "paper", recipe) is None


def test_field_docs_are_those_below_the_fields() -> None:
    from medvl.train import OptimConfig

    assert field_docs(OptimConfig)["clip_norm"] == "Maximum gradient norm; None disables clipping."


def test_unknown_preset_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["train", "convirt", "tyni", "--help"])
    assert "tiny" in capsys.readouterr().err
