"""Help of the `medvl` command: overview, families, examples, former names, log level."""

import functools
import logging
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from medvl.cli import main as cli
from medvl.cli.help import GROUPS, OVERVIEW, WIDTH, describe, example, family_help
from medvl.cli.recipes import load_recipe
from medvl.common.process import LEVEL
from medvl.train.recipe_files import find_recipe

ROOT = Path(__file__).parents[2]
COMMANDS = cli.commands()


def test_overview_fits_on_one_screen_and_names_every_command() -> None:
    lines = OVERVIEW.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= WIDTH
    named = {
        name.strip()
        for line in lines
        if line.startswith("  ")
        for name in line[2:28].split("  ")[0].split(",")
    }
    assert named == {name.split()[0] for name in COMMANDS}


@pytest.mark.parametrize("family", GROUPS)
def test_family_lists_its_commands_in_groups(
    family: str, capsys: pytest.CaptureFixture[str]
) -> None:
    own = [name.split()[1] for name in COMMANDS if name.startswith(f"{family} ")]
    cli.main([family, "--help"])
    text = capsys.readouterr().out
    assert sorted(re.findall(r"^  ([\w-]+)  ", text, re.MULTILINE)) == sorted(own)
    assert all(f"\n{title}\n" in text for title in GROUPS[family])
    assert "Others" not in text
    assert max(map(len, text.splitlines())) <= WIDTH


def test_family_lists_commands_of_other_packages_last() -> None:
    def ours() -> None:
        """Convert our corpus."""

    text = family_help("shards", {"table": ours, "ours": ours})
    assert text.index("\nOthers\n  ours   Convert our corpus.") > text.index("  table")


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in ("train", "doctor")])
def test_example_is_in_the_help_and_parses(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    function = COMMANDS[name]
    shown = example(name)
    assert shown.startswith(f"medvl {name}")
    assert describe(name, function).endswith(f"Example: {shown}")
    calls: list[tuple[Any, Any]] = []
    record = functools.wraps(function)(lambda *args, **named: calls.append((args, named)))
    words = shlex.split(shown.partition(" > ")[0])[1 + len(name.split()) :]
    try:
        cli.parse_and_run(name, record, words)
    except SystemExit:
        pytest.fail(capsys.readouterr().err)
    assert len(calls) == 1


@pytest.mark.parametrize("name", ["train", "doctor"])
def test_example_of_a_recipe_command_parses(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([name, "--help"])
    assert f"Example: {example(name)}\n" in capsys.readouterr().out
    words = shlex.split(example(name))[2:]
    own = ["--seconds", "5"] if name == "doctor" else []
    assert words[len(words) - len(own) :] == own
    recipe, *settings = words[: len(words) - len(own)]
    module, _ = load_recipe(find_recipe(recipe), settings)
    assert "tiny" in module.PRESETS


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["vocab", "shards", "vocab"], "--data FOLDER --out FOLDER"),
        (["export", "runs/convirt"], "--checkpoint FOLDER"),
        (["knowledge", "find", "--folder", "graph"], "--knowledge"),
        (["eval", "text", "--vocab=v"], "--tokenizer"),
        (["doctor", "convirt", "--json", "file"], "--out"),
    ],
)
def test_former_names_are_refused_with_the_name_of_today(
    arguments: list[str], names: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert names in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "shown"), [([], True), (["--quiet"], False), (["--verbose"], True)]
)
def test_log_level_of_a_command(option: list[str], shown: bool, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "medvl", "verify", *option, str(tmp_path)]
    environment = {key: value for key, value in os.environ.items() if key != LEVEL}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert (f"opening {tmp_path}\n" in done.stderr) == shown
    assert ("Traceback" in done.stderr) == (option == ["--verbose"])
    assert done.stderr.splitlines()[-1].startswith("medvl: ")
    assert done.stdout == ""


def test_only_inputs_are_announced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def command(checkpoint: str, data: Path, out: Path, missing: Path) -> None:
        """Do nothing."""

    words = ["--checkpoint", "hf-hub:a/b", "--data", str(tmp_path), "--out", str(tmp_path)]
    with caplog.at_level(logging.INFO):
        cli.parse_and_run("x y", command, [*words, "--missing", str(tmp_path / "none")])
    assert caplog.messages == [f"opening hf-hub:a/b, {tmp_path}"]
