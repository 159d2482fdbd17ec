"""The README is run: its Python as it stands, its commands as far as their names and options go."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from medvl import cli

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def commands(first: str) -> list[list[str]]:
    """The words of every shell command that starts with that word."""
    lines = "".join(blocks("bash")).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines if line.startswith(first + " ")]


def options(words: list[str]) -> list[str]:
    return [word for word in words if word.startswith("--")]


def test_the_python_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert blocks("python")
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), {})
    assert "torch.Size([2, 1024]) torch.Size([2, 49, 1024]) (7, 7)" in capsys.readouterr().out


@pytest.mark.parametrize("words", commands("medvl"), ids=" ".join)
def test_medvl_commands_exist(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    names = words[1 : 3 if words[1] in ("phantom", "shards", "eval") else 2]
    with pytest.raises(SystemExit):
        cli.main([*names, "--help"])
    explained = capsys.readouterr().out
    assert [option for option in options(words) if option not in explained] == []


def test_recipe_options_exist() -> None:
    found = commands("torchrun")
    assert found
    for words in found:
        recipe = next(index for index, word in enumerate(words) if word.startswith("recipes/"))
        preset = [word for word in words[recipe + 1 : recipe + 2] if not word.startswith("--")]
        shown = subprocess.run(
            [sys.executable, ROOT / words[recipe], *preset, "--help"], capture_output=True, text=True, check=True
        ).stdout
        assert [option for option in options(words[recipe:]) if option not in shown] == []


@pytest.mark.parametrize("path", sorted(set(re.findall(r"\b(?:scripts|recipes|data_cards)/[\w./-]*\w", README))))
def test_named_files_exist(path: str) -> None:
    assert (ROOT / path).exists()
