"""Published numbers: every recipe has some or a reason, and the page is that of the file."""

import math
import re
from pathlib import Path

import pytest
from helpers.errors import raises

from medvl.cli import main as cli
from medvl.errors import EvaluationError
from medvl.eval import published_numbers
from medvl.eval.published.numbers import published_markdown, without_numbers

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
    runs = {run for one in numbers for run in re.findall(r"runs/[\w-]+", one.command)}
    assert {run for run in runs if f'"{run}"' not in texts} == set(), "no recipe writes these runs"


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
