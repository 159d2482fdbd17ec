"""Published numbers: every recipe has some or a reason, and the page is that of the file."""

import functools
import math
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest
from helpers.errors import raises
from helpers.script_modules import load_script

from medvl.cli import main as cli
from medvl.cli.eval import commands as evaluation
from medvl.data.corpora.labels import nih_cxr14
from medvl.errors import EvaluationError
from medvl.eval import load_prompts, published_numbers
from medvl.eval.published.numbers import published_markdown, without_numbers
from medvl.eval.zero_shot_classification.prompts import COMPETING
from medvl.eval.zero_shot_classification.scores import _text_functions
from medvl.models.registry import system as system_of
from medvl.schema import COMPETITION_FINDINGS
from medvl.train.recipe_cli import choose
from medvl.train.recipe_files import find_recipe

ROOT = Path(__file__).parents[3]
RECIPES = {path.stem for path in (ROOT / "recipes").glob("*.py")}


def test_every_recipe_has_numbers_or_a_reason() -> None:
    with_numbers, without = {number.recipe for number in published_numbers()}, set(without_numbers())
    assert with_numbers | without == RECIPES, "add rows, or a reason, to medvl/eval/published/published_numbers.json"
    assert not with_numbers & without
    assert all(without_numbers().values())


def test_numbers_are_complete_and_named_once() -> None:
    numbers = published_numbers()
    names = [(one.recipe, one.source, one.dataset, one.split, one.metric) for one in numbers]
    assert len(set(names)) == len(names)
    for one in numbers:
        assert all(isinstance(text, str) and text for text in (one.source, one.dataset, one.split, one.metric)), one
        assert isinstance(one.checked, bool)
        assert math.isfinite(one.value)
        assert one.value > 0
        assert one.command.startswith("medvl ")
        assert "medvl eval " in one.command, one
    texts = "".join((ROOT / f"recipes/{name}.py").read_text(encoding="utf-8") for name in RECIPES)
    commands = [one.command for one in numbers]
    own = {run for command in commands for run in re.findall(r"--train.run-dir (\S+)", command)}
    runs = {run for command in commands for run in re.findall(r"runs/[\w-]+", command)} - own
    assert {run for run in runs if f'"{run}"' not in texts} == set(), "no recipe writes these runs"


def steps() -> list[tuple[str, list[str]]]:
    """Return every distinct command of the numbers, split into arguments, with its recipe."""
    commands = dict.fromkeys(
        (one.recipe, command) for one in published_numbers() for command in one.command.split(" && ")
    )
    return [(recipe, shlex.split(command)) for recipe, command in commands]


@functools.cache
def presets(recipe: str) -> Mapping[str, Any]:
    path = find_recipe(recipe)
    return cast("Mapping[str, Any]", load_script(path.stem, path.parent).PRESETS)


def test_every_command_is_one_of_the_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []
    for name, function in evaluation.COMMANDS.items():

        def stub(*given: Any, _name: str = name, **options: Any) -> None:
            parsed.append(_name)

        monkeypatch.setitem(evaluation.COMMANDS, name, functools.wraps(function)(stub))
    for _, (program, command, name, *arguments) in steps():
        assert program == "medvl"
        if command == "train":
            assert choose(presets(name), arguments) is not None
        else:
            cli.main([command, name, *arguments])
            assert parsed.pop() == name


def test_systems_have_the_similarity_that_their_prompts_need() -> None:
    for recipe, arguments in steps():
        if arguments[1:3] != ["eval", "zero-shot"]:
            continue
        prompts = load_prompts(arguments[arguments.index("--prompts") + 1])
        model: Any = system_of(presets(recipe)["paper"].model.system)
        _text_functions(model, prompts)
        assert prompts.ensemble != "embedding_mean_raw" or hasattr(model, "unnormalized_text"), recipe


def test_commands_give_the_metric_of_their_row() -> None:
    """Decisions need validation images or competing classes, shares of the labels a run of their own."""
    for one in published_numbers():
        arguments = shlex.split(one.command)
        if "zero-shot" in arguments:
            prompts = load_prompts(arguments[arguments.index("--prompts") + 1])
            top_1 = prompts.scoring in COMPETING and "5x200" in one.dataset
            if one.metric.startswith(("F1", "accuracy")):
                assert top_1 or "--valid" in arguments, one
            if "5x200" in one.dataset:
                assert sorted(prompts.classes) == sorted(COMPETITION_FINDINGS), one
            if "NIH" in one.dataset and prompts.other_classes is not None:
                chosen = arguments[arguments.index("--labels") + 1 :]
                assert sorted([*chosen, "No Finding"]) == sorted(nih_cxr14.LABELS)
        if "vqa" in arguments:
            (data,) = {path.split("/")[1] for path in arguments if path.startswith("shards/")}
            assert f"runs/{data}/best" in arguments, "questions are answered by a model fine-tuned on them"
        share = re.search(r", (1|10) %", one.metric)
        if share is not None and "train" in arguments:
            assert arguments[arguments.index("--data.fraction") + 1] == f"{int(share[1]) / 100:g}", one
    stale = [one for one in published_numbers() if "--prompts statements" in one.command and "prompt file" in one.note]
    assert not stale, "statements has a sentence of every label"


def test_the_page_has_the_numbers_of_the_file() -> None:
    page = (ROOT / "docs/pages/published-numbers.md").read_text(encoding="utf-8")
    expected = published_markdown(published_numbers(), without_numbers())
    assert page.endswith(expected), "write the output of `medvl recipes numbers --markdown` into the page"


def test_recipes_show_their_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["recipes", "numbers", "carzero"])
    printed = capsys.readouterr().out
    assert "0.923    CheXpert, test, 500 patients, five findings: AUROC, zero-shot" in printed
    assert "medvl eval zero-shot --checkpoint runs/carzero-mimic/best --data shards/chexpert/test" in printed
    cli.main(["recipes", "numbers", "umrl"])
    assert "umrl_mimic: no numbers; results are plots" in capsys.readouterr().out
    cli.main(["list", "recipes", "--match", "*mimic"])
    printed = capsys.readouterr().out
    assert "carzero_mimic: CARZero" in printed
    assert "0.923    CheXpert, test, 500 patients, five findings: AUROC, zero-shot" in printed
    assert "umrl_mimic: no numbers; results are plots" in printed
    assert "r2gen_iu" not in printed
    cli.main(["recipes", "list", "--match", "carzero"])
    assert "published numbers: 9" in capsys.readouterr().out
    with raises(EvaluationError, "unknown_name", "recipe"):
        published_numbers("carzer")
