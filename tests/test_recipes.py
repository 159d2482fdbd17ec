"""Every recipe: its error without data, the imports before it, and its presets."""

import dataclasses
import re
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.errors import raises
from helpers.forked_recipes import run_recipe

import medvl.train
import medvl.train.run
from medvl.encoders.pretrained import hub_address
from medvl.errors import ConfigError

RECIPES = sorted((Path(__file__).parents[1] / "recipes").glob("*.py"))


@pytest.fixture(params=RECIPES, ids=lambda path: path.stem)
def recipe(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def presets(recipe: Path) -> dict[str, Any]:
    """Return the presets of a recipe by name."""
    names = runpy.run_path(str(recipe))
    return {name: value for name, value in names.items() if isinstance(value, type(names["paper"]))}


def test_presets_list_all_recipes_of_the_file(recipe: Path) -> None:
    names = runpy.run_path(str(recipe))
    defined = {
        name.replace("_", "-")
        for name, value in names.items()
        if isinstance(value, type(names["paper"]))
    }
    assert set(names["PRESETS"]) == defined


def test_torchrun_does_not_take_options_of_a_recipe_for_its_own(recipe: Path) -> None:
    """argparse completes abbreviations even behind the script name, so `--start` would be
    ambiguous.
    """
    from torch.distributed.run import get_args_parser

    own = [option for action in get_args_parser()._actions for option in action.option_strings]
    fields = [
        f"--{field.name.replace('_', '-')}"
        for field in dataclasses.fields(runpy.run_path(str(recipe))["paper"])
    ]
    assert not [(field, option) for field in fields for option in own if option.startswith(field)]


def test_missing_data_is_reported_with_the_commands_that_create_it(
    recipe: Path, tmp_path: Path
) -> None:
    ended = run_recipe(recipe, "tiny", folder=tmp_path)
    assert ended.returncode == 1
    assert (
        ended.stdout.splitlines()[-1] == "imported:"
    )  # the configs are in the systems' files, which need torch
    assert ended.stderr.startswith("error: not found: data.train ")
    assert "medvl shards " in ended.stderr
    assert "medvl phantom " in ended.stderr
    assert "scripts/" not in ended.stderr, "an installed wheel has no scripts"
    assert "Traceback" not in ended.stderr
    assert list(tmp_path.iterdir()) == []


def test_paper_without_data_is_reported_before_anything_is_made(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = runpy.run_path(str(recipe))
    monkeypatch.chdir(tmp_path)
    with raises(ConfigError, "not_found", names="medvl shards "):
        names["prepare"](names["paper"]).train()
    assert list(tmp_path.iterdir()) == []


def test_recipe_has_presets_paper_and_tiny(recipe: Path) -> None:
    names: dict[str, Any] = runpy.run_path(str(recipe))
    assert type(names["paper"]) is type(names["tiny"])
    assert names["prepare"].__doc__
    assert "torchrun" in names["__doc__"]


def test_paper_has_a_tokenizer(recipe: Path) -> None:
    """It comes from a folder, from published weights, or from the checkpoint that the preset or
    its text names.
    """
    names = runpy.run_path(str(recipe))
    paper, text = names["paper"], names["__doc__"]
    if not hasattr(paper.data, "tokenizer"):
        return
    weights = getattr(getattr(paper, "model", None), "text_weights", None)
    sources = [
        paper.data.tokenizer,
        getattr(paper, "pretrained", False),
        hub_address(weights),
        paper.init_from,
    ]
    named = re.search(rf"recipes/{recipe.name} [^\n]*--init-from|--model.text-weights", text)
    assert any(sources) or named


def test_every_recipe_starts_from_a_checkpoint(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    names: dict[str, Any] = runpy.run_path(str(recipe))
    assert "init_from" in {field.name for field in dataclasses.fields(names["paper"])}
    if not isinstance(names["paper"], medvl.train.Recipe):
        return  # fine-tuning, by functions of its own

    def start(config: Any, **arguments: Any) -> None:
        raise Started(arguments["init_from"])

    monkeypatch.setattr(medvl.train.run, "create_model", start)
    monkeypatch.setattr(type(names["paper"].data), "check", lambda data, advice: None)
    with pytest.raises(Started) as started:
        names["prepare"](dataclasses.replace(names["paper"], init_from=tmp_path))
    assert started.value.args == (tmp_path,)


class Started(Exception):
    """The model would be created now."""


def test_presets_write_to_different_folders(recipe: Path) -> None:
    runs = [preset.train.run_dir for preset in presets(recipe).values()]
    assert len(set(runs)) == len(runs) >= 2


def test_convirt_and_gloria_train_on_frontal_images() -> None:
    """The presets read all images of their shards, so the commands that make these leave out
    laterals.
    """
    convirt, gloria = (
        runpy.run_path(str(path)) for path in RECIPES if path.stem.startswith(("convirt", "gloria"))
    )
    assert "medvl shards mimic-cxr --root MIMIC-CXR --views PA AP --out" in convirt["MAKE_DATA"]
    assert "--where frontal_lateral=Frontal --out" in gloria["MAKE_DATA"]


@pytest.mark.parametrize(("name", "epochs"), [("medklip", 5), ("mavl", 5), ("kad", 20)])
def test_warm_up_is_over_within_the_first_epoch_as_in_the_released_loop(
    name: str, epochs: int
) -> None:
    """That loop, which these systems share with ALBEF, takes 100 batches of the first epoch for
    one of the warm-up.
    """
    names = runpy.run_path(str(RECIPES[0].with_name(f"{name}_mimic.py")))
    assert "--views PA AP" in names["MAKE_DATA"]
    assert names["PRESETS"]["paper"].optim.schedule.warmup_steps == 100 * epochs


def test_gloria_draws_sentences_of_two_words_and_not_of_one() -> None:
    """As in the authors' code, which leaves out sentences of one word or none."""
    (path,) = (path for path in RECIPES if path.stem.startswith("gloria"))
    text = runpy.run_path(str(path))["paper"].data.text
    rng = np.random.default_rng(0)
    drawn = {
        text({"impression": "Normal. No pneumothorax. The lungs are clear."}, rng)
        for _ in range(40)
    }
    assert drawn == {"No pneumothorax.", "The lungs are clear."}


def test_roentgen_from_scratch_draws_the_unet_alone() -> None:
    """From the checkpoint that `medvl import stable_diffusion` writes."""
    names = runpy.run_path(str(RECIPES[0].with_name("roentgen_mimic.py")))
    paper, scratch = names["PRESETS"]["paper"], names["PRESETS"]["from-scratch"]
    assert scratch == dataclasses.replace(paper, random_unet=True, train=scratch.train)
    assert scratch.train == dataclasses.replace(paper.train, run_dir=scratch.train.run_dir)
