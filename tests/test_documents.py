"""The documents are true: their Python runs, and every command that a text names exists with its
options.

Texts are the Markdown files, and the docstrings at the top of recipes and scripts.
"""

import ast
import dataclasses
import inspect
import itertools
import re
import runpy
import shlex
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from helpers.script_modules import load_script

import medvl
from medvl.cli import main as cli
from medvl.cli.recipes import find_recipe
from medvl.train.recipe_files import DEFAULT_PRESET

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    *sorted(ROOT.glob("*.md")),
    *sorted(ROOT.glob("data_cards/*.md")),
    *sorted(ROOT.glob("docs/pages/**/*.md")),
]
PROGRAMS = [*sorted(ROOT.glob("recipes/*.py")), *sorted(ROOT.glob("scripts/*.py"))]
CODE = re.compile(r"^```\w*\n((?:(?!```).*\n)*)```|^((?:    .*\n)+)|`([^`\n]+)`", re.MULTILINE)
"""A fenced block, an indented one, or a span."""
COMMAND = re.compile(r"medvl [a-z]|torchrun .*recipes/|python scripts/")
GROUPS = {
    "knowledge": "build",
    "phantom": "mimic-cxr",
    "shards": "mimic-cxr",
    "eval": "zero-shot",
    "recipes": "copy",
    "cards": "show",
}
"""Commands with commands of their own, and one of these for what a text says of all."""


def text_of(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    return text if path.suffix == ".md" else ast.get_docstring(ast.parse(text)) or ""


def test_files_that_a_package_lists_exist() -> None:
    """In the docstrings of packages: `name.py` and `name/`."""
    listed = {
        (path.parent, name)
        for path in sorted(ROOT.glob("medvl/**/__init__.py"))
        for name in re.findall(r"(?<![\w/.])[a-z_]+(?:\.py|/(?= ))", text_of(path))
    }
    assert len(listed) > 30
    assert [str(folder / name) for folder, name in listed if not (folder / name).exists()] == []


def commands() -> list[list[str]]:
    """The words of every command, once each."""
    lines = []
    for path in [*DOCUMENTS, *PROGRAMS]:
        for match in CODE.finditer(text_of(path) + "\n"):
            code = next(group for group in match.groups() if group)
            joined = re.sub(r"\\\n|\n +(?=--)", " ", code).replace(" && ", "\n")
            lines += [line.strip() for line in joined.splitlines()]
    found = dict.fromkeys(line for line in lines if COMMAND.match(line))
    return [shlex.split(re.sub(r"[\[\]]|\.\.\.", "", line), comments=True) for line in found]


def by_target(
    found: list[list[str]], target: Callable[[list[str]], tuple[str, ...]]
) -> dict[tuple[str, ...], set[str]]:
    """What is called (the words in front of the options) -> all options that it is called with
    anywhere.
    """
    options: dict[tuple[str, ...], set[str]] = {}
    for words in found:
        named = {
            word.split("=")[0]
            for word in words
            if word.startswith("--") and word not in ("--help", "--help-all")
        }
        options.setdefault(target(words), set()).update(named)
    return options


def from_recipe(words: list[str]) -> list[str]:
    """What stands before the recipe's file is torchrun's, or doctor's."""
    return words[next(place for place, word in enumerate(words) if word.startswith("recipes/")) :]


def leading(words: list[str], most: int) -> tuple[str, ...]:
    return tuple(itertools.takewhile(lambda word: not word.startswith("-"), words[:most]))


COMMANDS = commands()
OF_MEDVL = by_target(
    [
        words[1:]
        for words in COMMANDS
        if words[0] == "medvl" and words[1] not in ("doctor", "train")
    ],
    lambda words: leading(words, 2 if words[0] in GROUPS else 1),
)
OF_SCRIPTS = by_target(
    [words[1:] for words in COMMANDS if words[0] == "python"], lambda words: (words[0],)
)
OF_RECIPES = by_target(
    [from_recipe(words) for words in COMMANDS if any(word.startswith("recipes/") for word in words)]
    + [
        words[2:]
        for words in COMMANDS
        if words[:2] == ["medvl", "train"] and len(words) > 2 and not words[2].endswith(".py")
    ],
    lambda words: leading(words, 2),
)


def explained(capsys: pytest.CaptureFixture[str], run: Callable[[], object]) -> set[str]:
    """The options that a command's own help lists; those in its description do not count."""
    with pytest.raises(SystemExit) as ended:
        run()
    assert not ended.value.code
    listed = re.findall(r"^(?:│ |  )(-\S.*?)(?:  |$)", capsys.readouterr().out, re.MULTILINE)
    return {option for line in listed for option in re.findall(r"--[\w.-]*\w", line)}


def python_blocks(name: str) -> list[str]:
    text = (ROOT / name).read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def test_readme_python_runs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (block,) = python_blocks("README.md")
    exec(compile(block, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "left apical nodule" in printed
    assert "torch.Size([1, 128])" in printed
    assert "'medclip'" in printed
    assert printed.endswith("] 1280\n")


def test_python_of_the_guide_to_encoders_runs(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    for block in python_blocks("docs/pages/guides/encoders.md"):
        exec(compile(block, "encoders.md", "exec"), names)
    assert "torch.Size([2, 1024]) torch.Size([2, 49, 1024]) (7, 7)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "most"), [("README.md", 1000), ("RESULTS.md", 850), ("PERFORMANCE.md", 1100)]
)
def test_documents_that_everyone_reads_are_short(name: str, most: int) -> None:
    assert len((ROOT / name).read_text(encoding="utf-8").split()) <= most


def test_every_system_recipe_and_card_is_on_the_generated_page() -> None:
    page = load_script("build_docs").systems_page()
    for name in medvl.list_models():
        assert page.count(f"\n| `{name}` |") == 1, name
    for path in ROOT.glob("recipes/*.py"):
        assert f"`{path.stem}`: " in page, path.stem
    for path in ROOT.glob("data_cards/*.md"):
        assert f"[{path.stem}](data_cards/{path.name})" in page, path.stem


def test_commands_are_found_in_every_kind_of_text() -> None:
    assert {("shards", "nih-cxr14"), ("vocab",), ("eval", "probe")} <= OF_MEDVL.keys(), (
        "spans, blocks, fences"
    )
    assert "--steps" in OF_SCRIPTS["scripts/soak.py",], "in a table"
    assert "--predictions" in OF_SCRIPTS["scripts/slake.py",], "in a docstring"


@pytest.mark.parametrize("target", OF_MEDVL, ids=" ".join)
def test_medvl_commands_exist(target: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    names = (*target, GROUPS[target[0]]) if len(target) == 1 and target[0] in GROUPS else target
    assert OF_MEDVL[target] <= explained(capsys, lambda: cli.main([*names, "--help"]))


def test_options_of_slurm_are_one_value(capsys: pytest.CaptureFixture[str]) -> None:
    """They begin with dashes. Commands that are parsed end at the file that is missing, with
    status 1.
    """
    named = re.findall(r'--sbatch\S*"[^"]*"', inspect.getdoc(cli.commands()["benchmark"]) or "")
    found = [
        words[1:] for words in COMMANDS if words[:2] == ["medvl", "benchmark"] and "slurm" in words
    ]
    assert named
    assert found
    for words in [*found, *(["benchmark", "mine.toml", *shlex.split(option)] for option in named)]:
        with pytest.raises(SystemExit) as ended:
            cli.main(words)
        assert ended.value.code == 1, words
        assert "mine.toml" in capsys.readouterr().err


def flags(settings: Any, prefix: str = "--") -> set[str]:
    """The options of a recipe: the fields of its settings, and of those within them, but
    mappings with keys.
    """
    found = set()
    for field in dataclasses.fields(settings):
        name, value = prefix + field.name.replace("_", "-"), getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            found |= flags(value, f"{name}.")
        elif not (isinstance(value, Mapping) and value):
            found.add(name)
    return found


def test_the_help_of_a_recipe_lists_its_fields(capsys: pytest.CaptureFixture[str]) -> None:
    for preset, settings in runpy.run_path(str(find_recipe("vqa")))["PRESETS"].items():
        assert flags(settings) <= explained(
            capsys, partial(cli.main, ["doctor", "vqa", preset, "--help-all"])
        )


@pytest.mark.parametrize("recipe", sorted({recipe for recipe, *_ in OF_RECIPES}))
def test_recipes_have_these_presets_and_options(recipe: str) -> None:
    presets = runpy.run_path(str(ROOT / recipe if "/" in recipe else find_recipe(recipe)))[
        "PRESETS"
    ]
    named = {target[1:]: options for target, options in OF_RECIPES.items() if target[0] == recipe}
    for preset, options in named.items():
        (name,) = preset or (DEFAULT_PRESET,)
        assert name in presets
        assert options - {"--ranks"} <= flags(presets[name]), name


@pytest.mark.parametrize("target", OF_SCRIPTS, ids=" ".join)
def test_scripts_have_these_options(
    target: tuple[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [target[0], "--help"])
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))  # where a program finds its neighbours
    shown = explained(capsys, lambda: runpy.run_path(str(ROOT / target[0]), run_name="__main__"))
    assert OF_SCRIPTS[target] <= shown


def test_named_files_exist() -> None:
    name = re.compile(
        r"(?<![\w/.-])(?:scripts|recipes|data_cards|medvl|tests)/[\w./-]*\.(?:py|sh|md)\b"
    )
    named = {
        (path.name, found)
        for path in [*DOCUMENTS, *PROGRAMS]
        for found in name.findall(text_of(path))
    }
    assert {"CONTRIBUTING.md", "convirt_mimic.py"} <= {path for path, _ in named}
    assert [(path, found) for path, found in sorted(named) if not (ROOT / found).exists()] == []
